"""What stands beside or in place of the script's optimizer: views, copies, other steps, clipping."""
