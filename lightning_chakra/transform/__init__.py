"""From trace files to other files: one timeline, Chakra traces, what a killed job left."""
