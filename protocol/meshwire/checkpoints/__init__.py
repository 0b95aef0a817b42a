"""What a saved state says about itself, and from which state all go on when no learner is left."""
