"""The training library: the only part of the project, with the examples, that imports torch."""
