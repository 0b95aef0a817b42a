"""Tasks, threads, the log and the data folder: what every other room needs and no other room explains."""
