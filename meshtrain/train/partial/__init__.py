"""Models of which only a part is trained, and travels: sparse ones (`--masks`), and ones that grow."""
