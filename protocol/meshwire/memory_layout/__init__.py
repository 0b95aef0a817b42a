"""Offsets and sizes in the memory that both map, and how much a job takes of a machine."""
