"""What the callback costs on a step outside of every window, and on a rank that is not profiled.

The two hooks are called many times within a running fit, where nothing else is timed; whole fits without a callback,
with an empty one and with ours follow each other, and the medians of their step times are compared.
"""

import time
from typing import Any

from lightning.pytorch import Callback

from benchmarks.flush.common import Tiny, arguments, fit, median, report, spread
from lightning_chakra import ChakraProfilerCallback

CALLS = 2000
FAR = 10**9


class Empty(Callback):
    """Nothing."""


class HookTimer(Callback):
    """Calls the two hooks of another callback within a fit and remembers the microseconds of each pair."""

    def __init__(self, other: Callback, repeats: int) -> None:
        self.other = other
        self.repeats = repeats
        self.microseconds: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Between two steps, so that the other's count of batches stays whole."""
        if len(self.microseconds) == self.repeats:
            return
        start, end = self.other.on_train_batch_start, self.other.on_train_batch_end
        moving = _Moving(trainer)
        began = time.perf_counter()
        for _ in range(CALLS):
            start(trainer, module, batch, batch_idx)
            end(moving, module, outputs, batch, batch_idx)
        self.microseconds.append((time.perf_counter() - began) / CALLS * 1e6)


class _Moving:
    """A trainer whose global step has moved, as it has at the end of every step."""

    def __init__(self, trainer: Any) -> None:
        self.global_step = trainer.global_step + 1
        self.fit_loop = trainer.fit_loop


def idle() -> ChakraProfilerCallback:
    """A profiled rank long before its first window."""
    return ChakraProfilerCallback(wait=FAR)


class Unprofiled(ChakraProfilerCallback):
    """A rank that is not profiled."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """What such a rank lacks is the recording."""
        super().setup(trainer, pl_module, stage)
        if self._profiling is not None:
            self._profiling.session._recording = None


def hook_times(other: Callback, args: Any) -> list[float]:
    """Microseconds of the two hooks in one fit."""
    timer = HookTimer(other, args.repeats)
    fit(Tiny(2, args.repeats + 1), [other, timer], args.accelerator)
    return timer.microseconds


if __name__ == "__main__":
    args = arguments(__doc__, steps=1000)
    if args.quick:
        args.steps = 100
    kinds: dict[str, Any] = {
        "no callback": list,
        "empty Callback": lambda: [Empty()],
        "idle": lambda: [idle()],
        "rank not profiled": lambda: [Unprofiled(wait=FAR)],
    }
    steps: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(args.repeats):
        for name, make in kinds.items():
            seconds = fit(Tiny(2, args.steps), make(), args.accelerator).seconds
            steps[name].append(median(seconds[10:-1]) * 1e6)
    hooks = {name: hook_times(make()[0], args) for name, make in kinds.items() if name != "no callback"}
    rows = []
    for name in kinds:
        added = [mine - none for mine, none in zip(steps[name], steps["no callback"], strict=True)]
        above = ""
        if name in hooks:
            above = spread([mine - median(hooks["empty Callback"]) for mine in hooks[name]])
        rows.append([name, spread(steps[name], ".0f"), spread(added, ".1f"), above])
    report(
        "Idle cost per step, in microseconds",
        ["callback", "step", "added to a step without callback", "the two hooks, above those of an empty Callback"],
        rows,
        args.accelerator,
        f"Medians (range) of {args.repeats} fits of {args.steps} steps; hooks called {CALLS} times.",
    )
