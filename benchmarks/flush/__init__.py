"""The figures of docs/cost.md, one module each (`python -m benchmarks.flush.stall`), or all (`python -m benchmarks.flush`)."""
