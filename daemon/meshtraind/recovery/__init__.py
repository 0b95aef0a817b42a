"""How a learner gets into a job that runs: states are asked for, given, saved and loaded."""
