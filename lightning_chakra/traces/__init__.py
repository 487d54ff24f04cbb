"""From trace files to typed events, a few megabytes at a time; neither torch nor Lightning is imported."""
