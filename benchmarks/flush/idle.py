"""What the callback costs on a step outside of every window, and on a rank that is not profiled.

Within a running fit, Lightning's own calls of the two hooks of a step are repeated many times: with no callback in the
trainer, with an empty one, with ours. That is all the code by which such steps differ; whole fits, one after the other,
are timed too and must agree within their noise.
"""

import time
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.trainer.call import _call_callback_hooks

from benchmarks.flush.common import Tiny, arguments, fit, median, report, spread
from lightning_chakra import ChakraProfilerCallback

CALLS = 2000
FAR = 10**9


class Empty(Callback):
    """Nothing."""


class Unprofiled(ChakraProfilerCallback):
    """A rank that is not profiled: what it lacks is the recording."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take it away."""
        super().setup(trainer, pl_module, stage)
        if self._profiling is not None:
            self._profiling.session._recording = None


class HookTimer(Callback):
    """Between two steps, times the two hooks of a step for several lists of callbacks in turn.

    Attributes:
        microseconds: For each list, those of each turn.
    """

    def __init__(self, lists: dict[str, list[Callback]], turns: int) -> None:
        self._lists = lists
        self._turns = turns
        self.microseconds: dict[str, list[float]] = {name: [] for name in lists}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """One turn."""
        if batch_idx >= self._turns:
            return
        before = trainer.callbacks
        for name, callbacks in self._lists.items():
            trainer.callbacks = callbacks
            ours = [c._profiling.session for c in callbacks if isinstance(c, ChakraProfilerCallback) and c._profiling]
            began = time.thread_time()
            for _ in range(CALLS):
                _call_callback_hooks(trainer, "on_train_batch_start", batch, batch_idx)
                for session in ours:
                    session.global_step = -1  # differs from the trainer's now, as at the end of each step
                _call_callback_hooks(trainer, "on_train_batch_end", outputs, batch, batch_idx)
            self.microseconds[name].append((time.thread_time() - began) / CALLS * 1e6)
        trainer.callbacks = before


def hook_times(kinds: dict[str, Any], args: Any) -> dict[str, list[float]]:
    """Microseconds of the hooks of a step, per kind and turn."""
    lists = {name: make() for name, make in kinds.items()}
    timer = HookTimer(lists, args.repeats)
    for callbacks in lists.values():
        for callback in callbacks:
            callback.setup = _setup_alone(callback)
    fit(Tiny(2, args.repeats + 1), [timer, *(c for callbacks in lists.values() for c in callbacks)], args.accelerator)
    return timer.microseconds


def _setup_alone(callback: Callback) -> Any:
    """Its setup in a trainer that seems to have no other callback: two of ours are refused."""

    def setup(trainer: Any, pl_module: Any, stage: str) -> None:
        before, trainer.callbacks = trainer.callbacks, [callback]
        type(callback).setup(callback, trainer, pl_module, stage)
        trainer.callbacks = before

    return setup


if __name__ == "__main__":
    args = arguments(__doc__, steps=1000)
    if args.quick:
        args.steps = 100
    kinds: dict[str, Any] = {
        "no callback": list,
        "empty Callback": lambda: [Empty()],
        "idle": lambda: [ChakraProfilerCallback(wait=FAR)],
        "rank not profiled": lambda: [Unprofiled(wait=FAR)],
    }
    steps: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(args.repeats):
        for name, make in kinds.items():
            steps[name].append(median(fit(Tiny(2, args.steps), make(), args.accelerator).seconds[10:-1]) * 1e6)
    hooks = hook_times(kinds, args)

    def above(name: str, other: str) -> str:
        """How much one kind takes more than another."""
        return spread([mine - theirs for mine, theirs in zip(hooks[name], hooks[other], strict=True)], ".1f")

    rows = [
        [name, above(name, "no callback"), above(name, "empty Callback"), spread(steps[name], ".0f")] for name in kinds
    ]
    report(
        "Idle cost per step, in microseconds",
        ["callback", "added to a step without callback", "above an empty Callback", "step of a whole fit"],
        rows,
        args.accelerator,
        f"Medians (range) of {args.repeats}: hooks called {CALLS} times (CPU time), fits of {args.steps} steps.",
    )
