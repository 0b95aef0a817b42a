"""A connection to the daemon, errors, tables, progress, following a job."""
