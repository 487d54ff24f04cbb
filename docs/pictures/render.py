"""Renders a real run: the merged timeline of two ranks, and the plot of ``lightning-chakra summary``.

python docs/pictures/render.py        # trains for half a minute, writes timeline.png and summary.png beside this file

Needs matplotlib and the extra ``plot``. The timeline draws what Perfetto shows of the same file.
"""

import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

FOLDER = Path(__file__).parent
EXAMPLE = FOLDER.parents[1] / "examples" / "transformer_ddp.py"
# the first rule that matches an operator's name gives its colour
RULES = (
    ("step mark", "#1f2933", ("ProfilerStep#",)),
    ("collective", "#d64545", ("gloo:", "c10d::", "nccl:")),
    ("optimizer step with its closure", "#2e8b57", ("Optimizer.", "aten::_foreach", "aten::_fused")),
    ("backward", "#8656c7", ("autograd::engine", "torch::autograd", "torch.distributed.ddp.reducer", "Backward")),
    ("forward, update", "#2f6fde", ("",)),
)


def _run(*command: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    subprocess.run([sys.executable, *command], check=True, env=environment)


def _color(name: str) -> str:
    return next(color for _, color, starts in RULES if any(name.startswith(start) or start in name for start in starts))


def _slices(trace: dict[str, Any]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The slices of each thread that has more than one, by process; first the thread with the most."""
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e.get("name") == "process_name"}
    threads = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("dur", 0) > 0 and event.get("cat") in ("cpu_op", "user_annotation"):
            threads[str(names.get(event["pid"], event["pid"])), event["tid"]].append(event)
    order = sorted(threads.items(), key=lambda item: (item[0][0], -len(item[1])))
    return {key: events for key, events in order if len(events) > 1}


def draw(merged: Path, picture: Path) -> None:
    """Draw ``merged`` as icicles, one row of them for each thread."""
    with gzip.open(merged) as file:
        threads = _slices(json.load(file))
    begin = min(e["ts"] for events in threads.values() for e in events)
    figure, axes = plt.subplots(figsize=(12, 5.2), dpi=110)
    bottom = 0.0
    labels = []
    for (process, _), events in threads.items():
        top: list[float] = []
        deepest = 0
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            while top and top[-1] <= event["ts"] + 1e-3:
                top.pop()
            depth = len(top)
            if depth >= 6:
                continue
            deepest = max(deepest, depth)
            top.append(event["ts"] + event["dur"])
            axes.broken_barh(
                [((event["ts"] - begin) / 1000, event["dur"] / 1000)],
                (bottom - depth - 0.92, 0.84),
                facecolor=_color(event["name"]),
                linewidth=0,
            )
            if event["name"].startswith("ProfilerStep#"):
                middle = (event["ts"] + event["dur"] / 2 - begin) / 1000
                axes.text(middle, bottom - depth - 0.5, event["name"], color="white", ha="center", va="center", size=8)
        labels.append((bottom - (deepest + 1) / 2, process))
        bottom -= deepest + 1.8
    seen = ""
    ticks = []
    for y, process in labels:
        ticks.append((y, process.partition(" (")[0] if process != seen else "thread of gloo"))
        seen = process
    axes.set_yticks([y for y, _ in ticks], [name for _, name in ticks], size=8)
    axes.set_ylim(bottom + 0.6, 0.3)
    axes.set_xlabel("ms")
    axes.tick_params(axis="y", length=0)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    handles = [Patch(color=color, label=label) for label, color, _ in RULES]
    axes.legend(
        handles=handles, ncols=len(RULES), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=9
    )
    figure.tight_layout()
    figure.savefig(picture)


def main() -> None:
    """Record, merge, draw."""
    with tempfile.TemporaryDirectory() as folder:
        traces, merged = Path(folder, "traces"), Path(folder, "timeline.json.gz")
        _run(str(EXAMPLE), "--output", str(traces))
        cli = ("-m", "lightning_chakra.cli")
        _run(*cli, "merge", str(traces), "--output", str(merged))
        _run(*cli, "summary", str(traces), "--plot", str(FOLDER / "summary.png"))
        draw(merged, FOLDER / "timeline.png")


if __name__ == "__main__":
    main()
