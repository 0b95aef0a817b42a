"""Which member trains on which samples, so that each is used once an epoch, whoever comes and goes."""
