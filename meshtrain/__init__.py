"""Train one PyTorch script on all the laptops you own."""
