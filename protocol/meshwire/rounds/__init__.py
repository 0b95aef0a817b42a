"""The round machine: which gradients belong to which round, when a round is complete, and when a learner may start its
next step.
"""
