"""The scheduler's pure core: events in, instructions out; no clock, randomness, I/O or logging."""
