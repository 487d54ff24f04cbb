"""Plants causes of lateness in real trainings, to see whether `stragglers` finds them."""
