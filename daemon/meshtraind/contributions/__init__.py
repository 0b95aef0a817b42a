"""A contribution, from the learner's gradients to encoded segments: error feedback, momentum, seeds, a budget of bytes;
and the contributions of others.
"""
