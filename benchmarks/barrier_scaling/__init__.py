"""How the barrier grows with the number of ranks: `python -m benchmarks.barrier_scaling`."""
