"""The membership machine: who takes part in a job (a generation), how all enter the next one together, and which side
of a partition goes on.
"""
