"""Profiling a window with nothing but torch: what the callback is held against."""

import os
import time
from typing import Any

import torch.profiler
from lightning.pytorch import Callback
from torch.profiler import ExecutionTraceObserver, ProfilerAction, profile, record_function, schedule


class BareTorch(Callback):
    """torch's profiler and observer as directly as they can be driven, for one window of a fit.

    Args:
        folder: Where ``kineto`` and ``et`` are written.
        first: First recorded batch.
        active: Number of recorded batches.
        chakra: Whether to write an execution trace.
        suffix: ``".json"`` or, for torch's own compression on the training thread, ``".json.gz"``.
    """

    def __init__(self, folder: str, first: int, active: int, *, chakra: bool, suffix: str = ".json") -> None:
        self._path = os.path.join(folder, "{}" + suffix)
        self._first = first
        self._last = first + active - 1
        self._chakra = chakra
        self._mark: Any = None
        self.stall = 0.0
        """Seconds from the end of the window until the training could go on."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Start, or mark a step."""
        if batch_idx == self._first:
            self._profile = profile()
            self._observer = ExecutionTraceObserver() if self._chakra else None
            self._profile.prepare_trace()
            if self._observer is not None:
                self._observer.register_callback(self._path.format("et"))
                self._observer.start()
            self._profile.start_trace()
        if self._first <= batch_idx <= self._last:
            self._mark = record_function(f"ProfilerStep#{batch_idx}")
            self._mark.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the step and, after the last one, write."""
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None
        if batch_idx == self._last:
            began = time.perf_counter()
            if self._observer is not None:
                self._observer.stop()
            self._profile.stop_trace()
            if self._observer is not None:
                self._observer.unregister_callback()
            self._profile.export_chrome_trace(self._path.format("kineto"))
            self.stall = time.perf_counter() - began
            del self._profile, self._observer


class MegatronStyle(Callback):
    """The profiling block of a Megatron-like training loop: torch's schedule, a handler, a step call per iteration."""

    def __init__(self, folder: str, first: int, active: int, *, chakra: bool) -> None:
        observer = ExecutionTraceObserver() if chakra else None

        def write(finished: Any) -> None:
            finished.export_chrome_trace(f"{folder}/rank-0.json.gz")
            if observer is not None:
                observer.unregister_callback()

        self._start = lambda: observer and observer.register_callback(f"{folder}/et-rank-0.json.gz")
        self._profile = profile(
            schedule=schedule(wait=first - 1, warmup=1, active=active, repeat=1),
            on_trace_ready=write,
            execution_trace_observer=observer,
        )

    def on_train_start(self, *args: Any) -> None:
        """Begin with the training."""
        self._start()
        self._profile.start()

    def on_train_batch_end(self, *args: Any) -> None:
        """Move the schedule on."""
        self._profile.step()

    def on_train_end(self, *args: Any) -> None:
        """End with the training."""
        self._profile.stop()


class NemoStyle(Callback):
    """A profiler without a schedule of its own, started and stopped by the global step, as NeMo-like callbacks do."""

    def __init__(self, folder: str, first: int, active: int, *, chakra: bool) -> None:
        self._first = first
        self._last = first + active - 1
        self._folder = folder
        self._observer = ExecutionTraceObserver() if chakra else None
        self._profile = profile(
            schedule=lambda step: ProfilerAction.RECORD,
            on_trace_ready=lambda finished: finished.export_chrome_trace(f"{folder}/rank-0.json.gz"),
            execution_trace_observer=self._observer,
        )

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Start."""
        if batch_idx == self._first:
            if self._observer is not None:
                self._observer.register_callback(f"{self._folder}/et-rank-0.json.gz")
            self._profile.start()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Step and stop."""
        if self._first <= batch_idx < self._last:
            self._profile.step()
        if batch_idx == self._last:
            self._profile.stop()
            if self._observer is not None:
                self._observer.unregister_callback()


def lightning_profiler(folder: str, first: int, active: int) -> Any:
    """Lightning's own ``PyTorchProfiler`` for the same batches; it knows no execution trace."""
    from lightning.pytorch.profilers import PyTorchProfiler

    return PyTorchProfiler(
        dirpath=folder,
        filename="kineto",
        export_to_chrome=True,
        record_module_names=False,
        schedule=torch.profiler.schedule(wait=first - 1, warmup=1, active=active, repeat=1),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(folder, use_gzip=True),
    )
