"""Who survives a flush that takes longer than the timeout of the group that trains: `python -m benchmarks.timeout`."""
