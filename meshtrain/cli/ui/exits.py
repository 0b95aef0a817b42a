"""The exit codes of commands; README.md has the table. A job's own outcome has those of `meshwire.jobs.lifecycle`."""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INCOMPLETE = 4  # of `get`: some of it could not be reached
EXIT_INTERRUPTED = 130
