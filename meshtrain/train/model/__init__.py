"""Model and optimizer as peers compare them: tensors, options, masks, growth, the state of a replica."""
