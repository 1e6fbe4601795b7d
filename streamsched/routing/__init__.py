"""Which pool a job goes to."""
