"""How much longer a recorded step takes, and what the execution trace does to the Kineto timeline.

Step times of one loop, recorded by each kind in turn and compared with the unrecorded steps of the same turn. Shapes
and stacks are options of Kineto; they change nothing in the execution trace.
"""

import json
import os
import tempfile
import time
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.flush.common import Tiny, Transformer, arguments, device, median, report, spread
from lightning_chakra.recording.observer import ExecutionTrace
from lightning_chakra.recording.private_torch import KinetoProfile, trace_only_config

OPTIONS: dict[str, dict[str, bool]] = {
    "plain": {},
    "shapes": {"record_shapes": True},
    "stacks": {"with_stack": True},
    "shapes and stacks": {"record_shapes": True, "with_stack": True},
}


class Loop:
    """Steps of a model."""

    def __init__(self, name: str, accelerator: str, layers: int) -> None:
        where = device(accelerator)
        tiny = name == "tiny operators"
        self._model = (Tiny(layers) if tiny else Transformer()).to(where)
        self._x = (torch.randn(4, 8) if tiny else Transformer.batch()).to(where)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3, foreach=False)
        self._wait = torch.cuda.synchronize if accelerator == "gpu" else lambda: None

    def steps(self, count: int) -> float:
        """Median seconds of ``count`` steps."""
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            self._model(self._x).square().mean().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._wait()
            seconds.append(time.perf_counter() - began)
        return median(seconds)


def record(loop: Loop, count: int, kineto: dict[str, bool] | None, et: str | None) -> tuple[float, float]:
    """Seconds of a recorded step, and microseconds of the median ``aten::addmm`` in its Kineto trace."""
    addmm = float("nan")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        profiler: Any = None
        trace = None
        if kineto is not None:
            config = None if kineto.get("with_stack") else trace_only_config()
            profiler = KinetoProfile(experimental_config=config, **kineto)
            profiler.prepare_trace()
        if et is not None:
            trace = ExecutionTrace(os.path.join(stack.enter_context(tempfile.TemporaryDirectory(dir=et)), "et.json"))
            trace.start()
        if profiler is not None:
            profiler.start_trace()
        seconds = loop.steps(count)
        if trace is not None:
            trace.stop()
        if profiler is not None:
            profiler.stop_trace()
            if not kineto:
                profiler.export_chrome_trace(f"{folder}/kineto.json")
                with open(f"{folder}/kineto.json", encoding="utf-8") as file:
                    events = json.load(file)["traceEvents"]
                addmm = median([e["dur"] for e in events if e["name"] == "aten::addmm"])
        if trace is not None:
            trace.close()
    return seconds, addmm


if __name__ == "__main__":
    args = arguments(__doc__, layers=200, steps=4)
    if args.quick:
        args.repeats, args.layers, args.steps = 1, 50, 2
    disk, memory = tempfile.gettempdir(), "/dev/shm"
    kinds: dict[str, tuple[dict[str, bool] | None, str | None]] = {
        **{f"Kineto, {name}": (options, None) for name, options in OPTIONS.items()},
        "ET": (None, disk),
        **({"ET, raw file in memory (/dev/shm)": (None, memory)} if os.path.isdir(memory) else {}),
        **{f"Kineto and ET, {name}": (options, disk) for name, options in OPTIONS.items()},
    }
    models = ("tiny operators", "transformer")
    slower: dict[str, dict[str, list[float]]] = {kind: {model: [] for model in models} for kind in kinds}
    addmm: dict[str, dict[str, list[float]]] = {kind: {model: [] for model in models} for kind in kinds}
    for model in models:
        loop = Loop(model, args.accelerator, args.layers)
        loop.steps(3)
        for _ in range(args.repeats):
            for kind, (kineto, et) in kinds.items():
                before = loop.steps(args.steps)
                seconds, operator = record(loop, args.steps, kineto, et)
                slower[kind][model].append(seconds / median([before, loop.steps(args.steps)]))
                addmm[kind][model].append(operator)
    rows = []
    for kind in kinds:
        cells = [spread(slower[kind][model]) for model in models]
        operators = [f"{median(addmm[kind][model]):.1f}" if "plain" in kind else "" for model in models]
        rows.append([kind, *cells, *operators])
    report(
        "A recorded step against an unrecorded one",
        ["recorded", *models, *(f"`aten::addmm` in the Kineto trace, {model}, microseconds" for model in models)],
        rows,
        args.accelerator,
        f"Medians of {args.repeats} (range). Tiny: {args.layers} linear layers of 8 x 8.",
    )
