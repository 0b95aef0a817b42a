"""Several learners on one device, which are one to its daemon (R6)."""
