"""How long training stands still at the end of a window, against what torch itself needs for it.

The floor of a window is the time in torch's own calls within our stall: stop the observer, stop the profiler, complete
the execution trace, export the raw Kineto file. Two more fits record equal windows with torch's defaults: one exports
raw (the floor of default torch), the other lets torch compress both files as it does for names ending in `.gz`.
"""

import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.profiler import ExecutionTraceObserver

from benchmarks.flush.bare import BareTorch
from benchmarks.flush.common import Tiny, arguments, fit, folder_size, median, report, spread, steps_for
from lightning_chakra import ChakraProfilerCallback
from lightning_chakra.recording.private_torch import KinetoProfile

FIRST = 3


class Timed(ChakraProfilerCallback):
    """Remembers the longest of its hooks in seconds: the one that closes the window."""

    stall = 0.0

    def on_train_batch_end(self, *args: Any) -> None:
        """The hook as it is, timed."""
        began = time.perf_counter()
        super().on_train_batch_end(*args)
        self.stall = max(self.stall, time.perf_counter() - began)


class Floor:
    """Time in torch's calls that end a window, in seconds, and the size of what they wrote, in MB."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.raw = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure within this block."""
        calls = [
            (KinetoProfile, "stop_trace"),
            (KinetoProfile, "export_chrome_trace"),
            (ExecutionTraceObserver, "stop"),
            (ExecutionTraceObserver, "unregister_callback"),
        ]
        before = [(owner, name, getattr(owner, name)) for owner, name in calls]
        self._depth = 0
        for owner, name, function in before:
            setattr(owner, name, self._timed(function))
        try:
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:  # unregister_callback calls stop
                    self.seconds += time.perf_counter() - began
                if function.__name__ == "export_chrome_trace":
                    window = os.path.dirname(os.path.dirname(args[1]))
                    self.raw = folder_size(window)

        return timed


def measure(megabytes: float, chakra: bool, args: Any) -> list[object]:
    """One row of the table."""
    active = steps_for(megabytes, chakra=chakra, layers=args.layers, accelerator=args.accelerator)
    found: dict[str, list[float]] = {"stall": [], "ratio": [], "default": [], "gzip": [], "ratio_default": []}
    found |= {"ratio_gzip": [], "next": [], "raw": []}
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            timed = Timed(folder, skip_first=0, wait=FIRST - 1, warmup=1, active=active, collect_chakra=chakra)
            floor = Floor()
            with floor.measured():
                clock = fit(Tiny(args.layers, FIRST + active + 6), [timed], args.accelerator)
            assert len(timed.traces) == 1 + chakra
        seconds = clock.seconds
        after = seconds[FIRST + active : FIRST + active + 5]
        found["next"].append(after[0] / median(after[1:]))
        found["stall"].append(timed.stall)
        found["ratio"].append(timed.stall / floor.seconds)
        found["raw"].append(floor.raw)
        for name, suffix in (("default", ".json"), ("gzip", ".json.gz")):
            with tempfile.TemporaryDirectory() as folder:
                bare = BareTorch(folder, FIRST, active, chakra=chakra, suffix=suffix)
                fit(Tiny(args.layers, FIRST + active + 1), [bare], args.accelerator)
            found[name].append(bare.stall)
        found["ratio_default"].append(timed.stall / found["default"][-1])
        found["ratio_gzip"].append(found["gzip"][-1] / timed.stall)
    return [
        f"{median(found['raw']):.0f} MB",
        "Kineto and ET" if chakra else "Kineto",
        f"{median(found['stall']):.2f} s",
        spread(found["ratio"]),
        spread(found["ratio_default"]),
        f"{median(found['gzip']):.1f} s",
        spread(found["ratio_gzip"], ".1f"),
        spread(found["next"], ".1f"),
    ]


if __name__ == "__main__":
    args = arguments(__doc__, sizes=(50.0, 500.0), layers=600)
    if args.quick:
        args.sizes, args.repeats, args.layers = (10.0,), 1, 100
    report(
        "Stall at the end of a window",
        [
            "raw",
            "traces",
            "stall",
            "stall / floor",
            "stall / floor of default torch",
            "torch's own path",
            "torch's own path / stall",
            "first step after it / later ones",
        ],
        [measure(size, chakra, args) for size in args.sizes for chakra in (False, True)],
        args.accelerator,
        f"Medians of {args.repeats} (range).",
    )
