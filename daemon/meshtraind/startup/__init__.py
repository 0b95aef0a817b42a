"""Model, plan and equal state are agreed by all members; or a job goes on from a checkpoint."""
