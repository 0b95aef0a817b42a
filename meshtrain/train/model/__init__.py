"""Model and optimizer as peers compare them: tensors, options, the state of a replica."""
