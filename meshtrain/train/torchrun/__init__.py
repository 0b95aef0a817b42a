"""The world of a script that torchrun, Slurm or Ray Train starts: mt.prepare trains over torch.distributed."""
