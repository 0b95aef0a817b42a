"""Codecs that sum a shorter vector in place of the model's: what all of them have in common."""
