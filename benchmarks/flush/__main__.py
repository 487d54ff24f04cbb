"""Make all figures, one after the other, each in processes of its own: `python -m benchmarks.flush > figures.md`."""

import subprocess
import sys

FIGURES = ("stall", "alternatives", "interference", "idle", "memory", "active", "compress")

if __name__ == "__main__":
    failed = [f for f in FIGURES if subprocess.call([sys.executable, "-m", f"benchmarks.flush.{f}", *sys.argv[1:]])]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
