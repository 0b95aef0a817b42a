"""A job as a person follows it."""
