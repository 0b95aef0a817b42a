"""What a job would cost in time on a network, before it begins: pure arithmetic over the programs that run."""
