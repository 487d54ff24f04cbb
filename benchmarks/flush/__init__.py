"""The figures of docs/cost.md: `python -m benchmarks.flush`, or one by one: `python -m benchmarks.flush.stall`."""
