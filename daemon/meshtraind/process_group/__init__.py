"""Process groups of torch.distributed, as far as a daemon serves them: a relay among learners, and the job's store."""
