"""What `whatif` measures here, and how it tells what follows."""
