"""A job from its first generation to its end: its members, its learner, its generations."""
