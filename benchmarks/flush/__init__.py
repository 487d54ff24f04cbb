"""The figures of docs/cost.md, a module each: `python -m benchmarks.flush.stall`; all: `python -m benchmarks.flush`."""
