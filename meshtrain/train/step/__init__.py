"""From the hooks of `loss.backward()` to the round in the base: gradients leave, means come back, and the next step may
start.
"""
