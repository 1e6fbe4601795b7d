"""Executors: carry placements out on something that has GPUs. The simulated fleet of tests is in loadgen."""
