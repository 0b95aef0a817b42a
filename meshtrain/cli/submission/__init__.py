"""What is packed, measured, resumed and handed over, one step a file."""
