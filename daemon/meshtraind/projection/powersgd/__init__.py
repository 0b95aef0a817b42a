"""powersgd."""
