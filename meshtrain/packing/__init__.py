"""A folder as a manifest of files: what is left out, by git's rules and by names of keys and tokens."""
