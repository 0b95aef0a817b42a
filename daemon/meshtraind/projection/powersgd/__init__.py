"""Matrices as their two factors (Vogels et al. 2019)."""
