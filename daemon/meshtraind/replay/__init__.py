"""`meshtraind replay`: a trace is read with suspicion, decided again, and told to a person."""
