"""Peak memory of a window, and what is left of it one step later (Linux).

Each measurement is a process of its own: without profiler, with nothing but Kineto (and torch's observer), with the
callback. The peak is that of the resident set from the first recorded step to the end of the fit.
"""

import subprocess
import sys
import tempfile
from typing import Any

from lightning.pytorch import Callback

from benchmarks.flush.bare import BareTorch
from benchmarks.flush.common import Tiny, arguments, fit, median, report, steps_for
from lightning_chakra import ChakraProfilerCallback
from lightning_chakra.recording import private_torch

FIRST = 3


def status(key: str) -> float:
    """A line of /proc/self/status, in MB."""
    with open("/proc/self/status", encoding="utf-8") as file:
        return int(next(line for line in file if line.startswith(key)).split()[1]) / 1024


class Watch(Callback):
    """Resident memory before the window, at its peak, and one step after it."""

    def __init__(self, active: int) -> None:
        self._last = FIRST + active - 1
        self.before = self.after = 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Look."""
        if batch_idx == FIRST - 1:
            with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
                file.write("5")  # forget the peak of the start
            self.before = status("VmRSS")
        if batch_idx == self._last + 2:
            self.after = status("VmRSS")


class TraceOnly(BareTorch):
    """Bare torch with the configuration that the callback uses."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Start with it."""
        from benchmarks.flush import bare

        before = bare.profile
        config = private_torch.trace_only_config()
        bare.profile = lambda: before(experimental_config=config)  # type: ignore[assignment, misc]
        try:
            super().on_train_batch_start(trainer, module, batch, batch_idx)
        finally:
            bare.profile = before  # type: ignore[misc]


def worker(kind: str, chakra: bool, active: int, args: Any) -> None:
    """One fit; print the three numbers."""
    watch = Watch(active)
    with tempfile.TemporaryDirectory() as folder:
        callbacks: list[Callback] = [watch]
        if kind == "bare torch":
            callbacks.append(BareTorch(folder, FIRST, active, chakra=chakra))
        elif kind == "bare torch, trace_only":
            callbacks.append(TraceOnly(folder, FIRST, active, chakra=chakra))
        elif kind == "callback":
            callbacks.append(ChakraProfilerCallback(folder, wait=FIRST - 1, active=active, collect_chakra=chakra))
        fit(Tiny(args.layers, FIRST + active + 6), callbacks, args.accelerator)
    print(watch.before, status("VmHWM"), watch.after)


if __name__ == "__main__":
    args = arguments(__doc__, size=500.0, layers=600, worker="", chakra=0, active=0)
    if args.quick:
        args.size, args.repeats, args.layers = 20.0, 1, 100
    if args.worker:
        worker(args.worker, bool(args.chakra), args.active, args)
        sys.exit()
    rows = []
    for chakra in (False, True):
        active = steps_for(args.size, chakra=chakra, layers=args.layers, accelerator=args.accelerator)
        kinds = ["no profiler", "bare torch", "bare torch, trace_only", "callback"]
        found: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
        for _ in range(args.repeats):
            for kind in kinds:
                command = [sys.executable, "-m", "benchmarks.flush.memory", "--worker", kind, "--active", str(active)]
                command += ["--layers", str(args.layers), "--chakra", str(int(chakra))]
                command += ["--accelerator", args.accelerator]
                line = subprocess.check_output(command, text=True).strip().splitlines()[-1]
                found[kind].append([float(number) for number in line.split()])
        peaks = {kind: median([peak for _, peak, _ in found[kind]]) for kind in kinds}
        for kind in kinds:
            left = median([after / before for before, _, after in found[kind]])
            above = peaks[kind] - peaks["no profiler"]
            ours = f"{peaks['callback'] - peaks['bare torch, trace_only']:.0f} MiB" if kind == "callback" else ""
            rows.append(["Kineto and ET" if chakra else "Kineto", kind, f"{above:.0f} MiB", ours, f"{left:.2f}"])
    report(
        f"Memory of a window of {args.size:.0f} MB raw",
        ["traces", "", "peak above no profiler", "of it ours", "one step after / before"],
        rows,
        args.accelerator,
        f"Medians of {args.repeats}.",
    )
