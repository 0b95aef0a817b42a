"""Matrices as one of their two factors (Vogels et al."""
