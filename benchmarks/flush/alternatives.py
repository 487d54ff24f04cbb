"""The same window with other people's ways to profile: stall, and size of the files.

The stall is the longest time from the start of a batch to the start of the next one (or the end of the fit), less the
median recorded step: it can be measured alike from outside of them all.
"""

import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks.flush.bare import MegatronStyle, NemoStyle, lightning_profiler
from benchmarks.flush.common import Clock, Tiny, arguments, fit, folder_size, median, report, spread, steps_for
from lightning_chakra import ChakraProfilerCallback

FIRST = 3


def stall(clock: Clock, active: int) -> float:
    """Seconds in which the training stood still."""
    seconds = clock.seconds
    return max(seconds[FIRST:]) - median(seconds[FIRST + 1 : FIRST + active - 1] or seconds[FIRST : FIRST + active])


def capture(name: str, folder: str, active: int, chakra: bool, args: Any) -> Clock:
    """One fit."""
    model = Tiny(args.layers, FIRST + active + 5)
    ways: dict[str, Callable[[], Any]] = {
        "lightning-chakra": lambda: ChakraProfilerCallback(
            folder, wait=FIRST - 1, active=active, collect_chakra=chakra
        ),
        "Megatron style": lambda: MegatronStyle(folder, FIRST, active, chakra=chakra),
        "NeMo style": lambda: NemoStyle(folder, FIRST, active, chakra=chakra),
    }
    if name in ways:
        return fit(model, [ways[name]()], args.accelerator)
    return fit(model, [], args.accelerator, profiler=lightning_profiler(folder, FIRST, active))


if __name__ == "__main__":
    args = arguments(__doc__, size=100.0, layers=600)
    if args.quick:
        args.size, args.repeats, args.layers = 10.0, 1, 100
    rows = []
    for chakra in (False, True):
        active = max(4, steps_for(args.size, chakra=chakra, layers=args.layers, accelerator=args.accelerator))
        names = ["lightning-chakra", "Megatron style", "NeMo style", *([] if chakra else ["PyTorchProfiler"])]
        stalls: dict[str, list[float]] = {name: [] for name in names}
        sizes = {}
        for _ in range(args.repeats):
            for name in names:
                with tempfile.TemporaryDirectory() as folder:
                    clock = capture(name, folder, active, chakra, args)
                    sizes[name] = folder_size(folder)
                stalls[name].append(stall(clock, active))
        for name in names:
            times = [mine / ours for mine, ours in zip(stalls[name], stalls["lightning-chakra"], strict=True)]
            what = "Kineto and ET" if chakra else "Kineto"
            rows.append([what, name, spread(stalls[name]), spread(times, ".1f"), f"{sizes[name]:.1f} MB"])
    report(
        f"The same window, {args.size:.0f} MB raw, four ways",
        ["traces", "way", "stall in seconds", "against lightning-chakra", "files"],
        rows,
        args.accelerator,
        f"Medians of {args.repeats} (range). PyTorchProfiler writes no execution trace.",
    )
