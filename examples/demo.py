"""Train the transformer of transformer_ddp.py on two CPU ranks and show what was written. Run by ``make demo``."""

import subprocess
import sys
from pathlib import Path

from transformer_ddp import TinyTransformer, parse_arguments, train

if __name__ == "__main__":
    profiler = train(TinyTransformer(), parse_arguments(__doc__, "demo"))
    if profiler.traces[0].path.endswith("rank-0.json.gz"):
        folder = Path(profiler.traces[0].path).parents[1]
        for file in sorted(folder.glob("*/rank-*.json.gz")):
            print(f"{file.stat().st_size / 1e6:6.2f} MB  {file}")
        for command in ("check", "summary"):
            subprocess.run([sys.executable, "-m", "lightning_chakra.cli", command, str(folder)], check=True)
