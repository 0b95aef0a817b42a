"""Trains the autoencoder of LGC, when the daemon asks for it at a step's boundary."""
