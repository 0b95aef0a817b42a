"""What stands beside or in place of the script's optimizer: views, copies, local weights, an outer step, clipping."""
