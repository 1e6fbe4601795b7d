"""The seeded fault simulation: production code in virtual time over fakes. See `faults.py`."""
