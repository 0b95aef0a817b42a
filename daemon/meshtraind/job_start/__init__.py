"""The beginning of a job: what a learner has prepared, and where the job has begun."""
