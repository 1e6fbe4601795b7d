"""Measurements: `python -m benchmarks [name...] [--quick]`. See `__main__.py` for how to add one."""
