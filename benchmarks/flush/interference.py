"""Training time lost while the writer works, per second of its CPU time.

A bare loop of few large operators, on one thread, has one core for itself and the writer, or two. Raw files of a real
window are handed to the writer in the middle; what the steps take longer than those before and after is the loss.
"""

import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from benchmarks.flush.bare import BareTorch
from benchmarks.flush.common import Tiny, arguments, device, fit, median, report, spread, steps_for
from lightning_chakra.recording import writer
from lightning_chakra.recording.layout import RawTrace, RawWindow


class TimedWriter(writer.TraceWriter):
    """Knows the CPU seconds of its thread."""

    cpu = 0.0

    def _publish_window(self, window: RawWindow) -> None:
        began = time.thread_time()
        super()._publish_window(window)
        self.cpu += time.thread_time() - began


def window(raw: str, folder: str) -> RawWindow:
    """The raw files under new names, as a window that the writer may consume."""
    own = os.path.join(folder, "window")
    os.makedirs(own)
    files = []
    for kind, name in (("kineto", "kineto.json"), ("chakra", "et.json")):
        os.link(os.path.join(raw, name), os.path.join(own, name))
        files.append(RawTrace(kind, os.path.join(own, name), os.path.join(folder, name + ".gz")))  # type: ignore[arg-type]
    return RawWindow(0, 1, False, own, tuple(files))


class Loop:
    """A training loop of few large operators."""

    def __init__(self, accelerator: str) -> None:
        where = device(accelerator)
        self._model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).to(where)
        self._x = torch.randn(256, 1024, device=where)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._wait = torch.cuda.synchronize if accelerator == "gpu" else lambda: None

    def step(self) -> float:
        """One step, in seconds."""
        began = time.perf_counter()
        self._model(self._x).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._wait()
        return time.perf_counter() - began


def lost(raw: str, loop: Loop) -> tuple[float, float, float]:
    """Seconds that the training lost, CPU seconds of the writer, factor by which steps were longer."""
    before = [loop.step() for _ in range(20)]
    with tempfile.TemporaryDirectory(dir=os.path.dirname(raw)) as folder:
        timed = TimedWriter(lambda trace: None)
        timed.submit(window(raw, folder))
        during = []
        while not timed.join(0):
            during.append(loop.step())
        timed.close()
        assert timed.take_errors() == []
    undisturbed = median(before + [loop.step() for _ in range(20)])
    return sum(during) - len(during) * undisturbed, timed.cpu, sum(during) / len(during) / undisturbed


def worker(raw: str, cores: int, compressor: str, args: Any) -> None:
    """Measure on the first ``cores`` cores and print one line of the table."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    if compressor == "standard library":
        sys.modules["isal"] = None  # type: ignore[assignment]  # as if it were not installed
    loop = Loop(args.accelerator)
    for _ in range(10):
        loop.step()
    found = [lost(raw, loop) for _ in range(args.repeats)]
    ratios = [seconds / cpu for seconds, cpu, _ in found]
    row = [compressor, cores - 1, f"{median([cpu for _, cpu, _ in found]):.2f} s", spread(ratios)]
    print("|".join(map(str, [*row, spread([factor for *_, factor in found])])))


if __name__ == "__main__":
    args = arguments(__doc__, size=200.0, worker="", cores=1, compressor="isal")
    if args.quick:
        args.size, args.repeats = 20.0, 1
    if args.worker:
        worker(args.worker, args.cores, args.compressor, args)
        sys.exit()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        raw = os.path.join(folder, "raw")
        os.makedirs(raw)
        active = steps_for(args.size, chakra=True, layers=200, accelerator=args.accelerator)
        fit(Tiny(200, active + 2), [BareTorch(raw, 1, active, chakra=True)], args.accelerator)
        for cores in (1, 2):
            for compressor in ("isal", "standard library"):
                command = [sys.executable, "-m", "benchmarks.flush.interference", "--worker", raw]
                command += ["--cores", str(cores), "--compressor", compressor, "--repeats", str(args.repeats)]
                command += ["--accelerator", args.accelerator]
                rows.append(subprocess.check_output(command, text=True).strip().splitlines()[-1].split("|"))
    report(
        f"Training time lost while the writer publishes {args.size:.0f} MB raw",
        ["compressor", "cores to spare", "CPU time of the writer", "lost / CPU time", "step while it works / else"],
        rows,
        args.accelerator,
        f"Medians of {args.repeats} (range).",
    )
