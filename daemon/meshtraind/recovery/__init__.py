"""How a learner gets into a job, at its beginning or later: states are asked for, given, saved and loaded."""
