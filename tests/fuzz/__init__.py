"""Random programs with faults and resume: `python -m tests.fuzz`."""
