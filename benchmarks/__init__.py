"""What the callback costs, measured."""
