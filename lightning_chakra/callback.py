"""The Lightning callback: hooks and arguments. The thinking is done in :mod:`lightning_chakra.session`."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch.distributed
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_chakra import storage
from lightning_chakra._version import __version__
from lightning_chakra.barrier import FlushBarrier, GlooBarrier, StrategyBarrier
from lightning_chakra.layout import Kind, PublishedTrace, TraceLayout, is_occupied, is_url, run_folder
from lightning_chakra.messages import info, warn
from lightning_chakra.private_torch import others
from lightning_chakra.ranks import named_ranks, parse_ranks, resolve_ranks
from lightning_chakra.recorder import RecordOptions, TraceRecorder
from lightning_chakra.schedule import ProfileSchedule
from lightning_chakra.scratch import Scratch, leftovers, owner_rank, windows
from lightning_chakra.session import ProfilingSession, Recording, Total
from lightning_chakra.writer import TraceWriter, check_complete, describe_error

_GIB = 1 << 30
_UNREADABLE = 1 << 30  # in place of the number of a run, more than any folder holds


class ChakraProfilerCallback(Callback):
    """Write Kineto traces, and on request Chakra execution traces, of some steps of a training on some ranks.

    The files of a profiled rank ``N`` are ``pytorch_profile/rank-N.json.gz`` and ``chakra/rank-N.json.gz`` below
    ``dirpath``, or below ``dirpath/step-XXXXXXXX`` for each window when ``repeat`` is not 1. Earlier traces are never
    overwritten: the traces then go to ``dirpath/run-1``, ``run-2``, ...

    Args:
        dirpath: Output folder, a local path or an fsspec URL. ``None``: the logger's folder (``trainer.log_dir``), else
            ``trainer.default_root_dir``.
        profile_ranks: Global ranks to profile; empty means all. A list, a single rank, or a string as
            ``taskset --cpu-list`` takes it: ``"0,8-15"``, ``"0-255:8"``.
        skip_first: Steps to leave alone once at the start of a fit.
        wait: Idle steps at the start of each cycle.
        warmup: Steps of each cycle during which the profiler is prepared and records nothing.
        active: Recorded steps of each cycle, its window. Readers drop the last step of several: take at least 2.
        repeat: Number of cycles; 0 means until training ends.
        step_unit: What a step is: ``"optimizer_step"``, the batches up to and including the one on which
            ``trainer.global_step`` moves, or ``"batch"``.
        collect_shapes: Record the shapes of operator inputs in the Kineto trace (``record_shapes``).
        collect_callstack: Record Python call stacks in the Kineto trace (``with_stack``).
        collect_chakra: Also write the execution trace. It adds some 20 microseconds to every operator of the window,
            which distorts the Kineto timeline of a model of many small operators.
        profile_memory: As in :class:`torch.profiler.profile`.
        with_flops: As in :class:`torch.profiler.profile`.
        with_modules: As in :class:`torch.profiler.profile`.
        barrier_timeout: Seconds a rank waits for the others to export before it gives up waiting.
        scratch_dir: Where raw files live until they are published; ``None``: the system's temporary folder. A window
            of a large model needs several gigabytes.
        on_error: ``"warn"``: a fault of the profiling is one warning and the training goes on. ``"raise"``: it is
            raised on the rank that has it.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has a value that no training could use.

    The steps are those of :func:`torch.profiler.schedule`, counted from the first step of the fit. The mark
    ``ProfilerStep#N`` of a step carries the trainer's global step at its start (the number of the batch with
    ``step_unit="batch"``). It reaches from the start of the step's first batch to the end of its last one; what happens
    between two steps, such as loading data, lies between two marks, and a validation run in a range ``validation``.

    Example::

        trainer = Trainer(callbacks=[ChakraProfilerCallback(profile_ranks=[0], collect_chakra=True)])
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        *,
        profile_ranks: list[int] | int | str = [],  # noqa: B006  # never changed, and shown as it is in help texts
        skip_first: int = 0,
        wait: int = 9,
        warmup: int = 1,
        active: int = 2,
        repeat: int = 1,
        step_unit: Literal["optimizer_step", "batch"] = "optimizer_step",
        collect_shapes: bool = False,
        collect_callstack: bool = False,
        collect_chakra: bool = False,
        profile_memory: bool = False,
        with_flops: bool = False,
        with_modules: bool = False,
        barrier_timeout: float = 1800,
        scratch_dir: str | os.PathLike[str] | None = None,
        on_error: Literal["warn", "raise"] = "warn",
    ) -> None:
        super().__init__()
        self.dirpath = _path("dirpath", dirpath)
        self.scratch_dir = _path("scratch_dir", scratch_dir)
        if self.scratch_dir is not None and is_url(self.scratch_dir):
            raise ValueError(
                f"`scratch_dir={self.scratch_dir!r}` must be a local folder: torch writes raw files there."
            )
        self.profile_ranks = parse_ranks(profile_ranks)
        self.schedule = ProfileSchedule(skip_first, wait, warmup, active, repeat)
        self.step_unit = _choice("step_unit", step_unit, ("optimizer_step", "batch"))
        self.on_error = _choice("on_error", on_error, ("warn", "raise"))
        self.options = RecordOptions(
            record_shapes=_flag("collect_shapes", collect_shapes),
            with_stack=_flag("collect_callstack", collect_callstack),
            profile_memory=_flag("profile_memory", profile_memory),
            with_flops=_flag("with_flops", with_flops),
            with_modules=_flag("with_modules", with_modules),
            execution_trace=_flag("collect_chakra", collect_chakra),
        )
        if isinstance(barrier_timeout, bool) or not isinstance(barrier_timeout, (int, float)):
            raise TypeError(f"`barrier_timeout={barrier_timeout!r}` must be a number of seconds.")
        if not 0 < barrier_timeout < 1e8:
            raise ValueError(f"`barrier_timeout={barrier_timeout}` must be more than 0 seconds and less than 1e8.")
        self.barrier_timeout = float(barrier_timeout)
        self._traces: list[PublishedTrace] = []
        self._profiling: _Profiling | None = None
        others.watch()  # one that is prepared by the time the fit begins must be known

    @property
    def traces(self) -> list[PublishedTrace]:
        """The files that this rank published, oldest first. Complete when ``fit`` has returned.

        A launcher that spawns all ranks (``ddp_spawn``) leaves it empty in the process that called ``fit``: that one is
        no rank.
        """
        return list(self._traces)

    def __getstate__(self) -> dict[str, Any]:
        # What is alive during a fit belongs to this process and to this object. Lightning leaves two methods of the
        # module on every callback, and with them the whole model would travel.
        state = {name: value for name, value in self.__dict__.items() if name not in ("log", "log_dict")}
        return {**state, "_profiling": None, "_traces": self.traces}

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if stage != "fit":
            return
        self._dispose()  # a fit that ended without a word
        profiled = resolve_ranks(self.profile_ranks, trainer.world_size)
        _refuse_second_owner(trainer)
        # log_dir is a broadcast: it is asked for on every rank, and here
        dirpath = storage.absolute(self.dirpath or trainer.log_dir or trainer.default_root_dir)
        try:
            storage.check(dirpath)
        except ValueError as error:
            raise MisconfigurationException(f"`ChakraProfilerCallback` cannot write to {dirpath}: {error}") from error
        barrier, root = self._meet_others(trainer, dirpath)
        if barrier is None:
            return
        layout = TraceLayout(root, folder_per_window=self.schedule.repeat != 1)
        self._tell_leftovers(trainer)
        recording = self._recording(trainer, layout, profiled) if trainer.global_rank in profiled else None
        session = ProfilingSession(
            rank=trainer.global_rank,
            schedule=self.schedule,
            barrier=barrier,
            recording=recording,
            raise_errors=self.on_error == "raise",
        )
        self._profiling = _Profiling(session, dirpath, root, profiled)

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        profiling = self._profiling
        if profiling is None:
            return
        profiling.session.global_step = trainer.global_step
        if trainer.global_rank == 0:
            info(self._describe_start(trainer, profiling))
            most = self._most_steps(trainer)
            if most is not None:
                profiling.session.expect(most)

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        profiling = self._profiling
        if profiling is None:
            return
        session = profiling.session
        if session.in_step:
            return
        if session.steps < session.next_busy:
            session.in_step = True  # all that an idle step costs, but for looking at global_step at its end
        else:
            session.begin_step(self._step_number(trainer))

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        profiling = self._profiling
        if profiling is None:
            return
        session = profiling.session
        if not session.in_step:
            return
        if self.step_unit == "optimizer_step":
            global_step = trainer.global_step
            if global_step == session.global_step:
                return  # its gradients are accumulated
            session.global_step = global_step
        session.end_step()

    @override
    def on_validation_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if self._profiling is not None:
            self._profiling.session.enter("validation")

    @override
    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if self._profiling is not None:
            self._profiling.session.leave("validation")

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        profiling = self._profiling
        if profiling is None:
            return
        total = profiling.session.finish()
        self._dispose()
        if trainer.global_rank == 0 and (total.files or total.lost):
            info(self._describe_end(total, profiling.root))

    @override
    def on_fit_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        # Still alive only if Lightning skipped the training: no batches, or a checkpoint of one that was done.
        if self._profiling is not None:
            self._profiling.session.tell_too_short()
            self._dispose()

    @override
    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        # No collective here: the other ranks may not have raised, and never come to it.
        profiling, self._profiling = self._profiling, None
        if profiling is not None:
            profiling.session.abort()

    @override
    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        self._dispose()  # a tuner ends its trial fit with nothing else

    def _dispose(self) -> None:
        profiling, self._profiling = self._profiling, None
        if profiling is not None:
            profiling.session.dispose()

    def _step_number(self, trainer: "pl.Trainer") -> int:
        if self.step_unit == "batch":
            return trainer.fit_loop.epoch_loop.total_batch_idx
        return trainer.global_step

    def _meet_others(self, trainer: "pl.Trainer", dirpath: str) -> tuple[FlushBarrier | None, str]:
        """Build the barrier on every rank and agree on the folder of this run; no barrier means no profiling.

        Whether it worked is itself agreed on: a rank that recorded while another one knows of no barrier would
        endanger the training.
        """
        barrier: FlushBarrier | None = None
        root, reason = dirpath, ""
        try:
            barrier = self._barrier(trainer)
            root = _free_run_folder(dirpath, barrier, trainer.global_rank)
        except Exception as error:
            reason = describe_error(error)
        if trainer.strategy.reduce_boolean_decision(not reason, all=True):
            return barrier, root
        if barrier is not None:
            barrier.close()
        message = (
            f"rank {trainer.global_rank}: the ranks could not build the group on which they wait for each other "
            f"({reason or 'another rank has the reason'}). Nothing is recorded in this fit. If the machines have "
            "several networks, set GLOO_SOCKET_IFNAME to the interface that they share."
            if barrier is None
            else f"rank {trainer.global_rank}: the ranks could not agree on a folder below {dirpath} "
            f"({reason or 'another rank has the reason'}). Nothing is recorded in this fit."
        )
        if self.on_error == "raise":
            raise RuntimeError(message)
        warn(message)
        return None, root

    def _barrier(self, trainer: "pl.Trainer") -> FlushBarrier:
        if trainer.world_size > 1 and torch.distributed.is_available() and torch.distributed.is_initialized():
            return GlooBarrier(self.barrier_timeout)
        return StrategyBarrier(trainer.strategy.barrier, trainer.strategy.broadcast)

    def _tell_leftovers(self, trainer: "pl.Trainer") -> None:
        """Warn of what killed processes left in the scratch folder, on one rank of this machine each."""
        for folder in leftovers(self._scratch_parent()):
            if owner_rank(folder) % max(1, trainer.num_devices) == trainer.local_rank:
                warn(
                    f"rank {trainer.global_rank}: an earlier process ended before it published its traces; in {folder} "
                    f"are {_describe_leftover(folder)}. `lightning-chakra recover {folder}` publishes what is "
                    "complete, removing the folder forgets it."
                )

    def _scratch_parent(self) -> str | None:
        return None if self.scratch_dir is None else storage.absolute(self.scratch_dir)

    def _recording(self, trainer: "pl.Trainer", layout: TraceLayout, profiled: Sequence[int]) -> Recording:
        rank = trainer.global_rank
        kinds: tuple[Kind, ...] = ("kineto", "chakra") if self.options.execution_trace else ("kineto",)
        scratch = Scratch(self._scratch_parent(), rank, layout, kinds)
        recorder = TraceRecorder(self.options, scratch, self._metadata(trainer, profiled))
        published: list[PublishedTrace] = []

        def keep(trace: PublishedTrace) -> None:
            published.append(trace)
            self._traces.append(trace)

        return Recording(recorder, TraceWriter(keep), scratch, _GIB * (4 if len(kinds) > 1 else 1), published)

    def _metadata(self, trainer: "pl.Trainer", profiled: Sequence[int]) -> dict[str, dict[str, Any]]:
        rank, world_size = trainer.global_rank, trainer.world_size
        return {
            "lightning_chakra": {
                "version": __version__,
                "rank": rank,
                "world_size": world_size,
                "profiled_ranks": list(profiled),
                "step_unit": self.step_unit,
                "strategy": type(trainer.strategy).__name__,
                "schedule": dataclasses.asdict(self.schedule),
                "options": {
                    "collect_shapes": self.options.record_shapes,
                    "collect_callstack": self.options.with_stack,
                    "collect_chakra": self.options.execution_trace,
                    "profile_memory": self.options.profile_memory,
                    "with_flops": self.options.with_flops,
                    "with_modules": self.options.with_modules,
                },
            },
            "distributedInfo": {"backend": "none", "rank": rank, "world_size": world_size},
        }

    def _describe_start(self, trainer: "pl.Trainer", profiling: "_Profiling") -> str:
        first = trainer.fit_loop.epoch_loop.total_batch_idx + 1 if self.step_unit == "batch" else trainer.global_step
        what = "Kineto traces and Chakra execution traces"
        hint = ""
        if not self.options.execution_trace:
            what = "Kineto traces"
            hint = " (collect_chakra=True adds execution traces)"
        steps = self.schedule.describe(first)
        if self.step_unit == "optimizer_step" and not trainer.lightning_module.automatic_optimization:
            steps += " (more where a step moves the global step by more than one, as with several optimizers)"
        moved = f", since {profiling.dirpath} holds earlier traces" if profiling.root != profiling.dirpath else ""
        ranks = named_ranks(profiling.profiled)
        return f"recording {steps} on {ranks} of {trainer.world_size}: {what}{hint}, to {profiling.root}{moved}"

    def _describe_end(self, total: Total, root: str) -> str:
        partial = f", {total.partial} of them of a window cut short" if total.partial else ""
        lost = f"; {total.lost} could not be written, see the warnings" if total.lost else ""
        hint = (
            f". Open those in pytorch_profile with https://ui.perfetto.dev, or ask `lightning-chakra summary {root}`"
            if total.kineto
            else ""
        )
        return (
            f"wrote {total.files} {'trace' if total.files == 1 else 'traces'}{partial}, {_size(total.bytes)}, to "
            f"{root}{lost}{hint}"
        )

    def _most_steps(self, trainer: "pl.Trainer") -> int | None:
        """The most steps this fit can have, as far as Lightning knows at its start."""
        bounds: list[float] = []
        if trainer.max_steps >= 0 and self.step_unit == "optimizer_step":
            bounds.append(trainer.max_steps - trainer.global_step)
        # reloaded loaders may have any length
        if trainer.max_epochs is not None and trainer.max_epochs >= 0 and not _reloads(trainer):
            batches = trainer.num_training_batches
            if self.step_unit == "optimizer_step" and not _changes_accumulation(trainer):
                # the last group of an epoch may be short
                batches = batches if batches == float("inf") else -(-batches // trainer.accumulate_grad_batches)
            bounds.append((trainer.max_epochs - trainer.current_epoch) * batches)
        least = min(bounds, default=float("inf"))
        return None if least == float("inf") else max(0, int(least))


@dataclasses.dataclass(frozen=True)
class _Profiling:
    """What is alive during a fit."""

    session: ProfilingSession
    dirpath: str
    root: str
    profiled: tuple[int, ...]


def _free_run_folder(dirpath: str, barrier: FlushBarrier, rank: int) -> str:
    """The first of ``dirpath``, ``run-1``, ``run-2``, ... that holds no traces on any rank.

    Raises:
        OSError: A rank cannot read the folder. It is raised on all of them.
    """
    index = 0
    while True:
        free = index
        fault: Exception | None = None
        try:
            # One look is enough where all ranks see the same store; a local folder may differ from machine to machine.
            if rank == 0 or not is_url(dirpath):
                while is_occupied(storage.entries(run_folder(dirpath, free))):
                    free += 1
        except Exception as error:  # the others wait below: they must hear of it
            free, fault = _UNREADABLE, error
        agreed = barrier.maximum(free)
        if agreed == _UNREADABLE:
            raise fault or OSError("another rank cannot read the folder")
        if agreed == index:
            return run_folder(dirpath, index)
        index = agreed


def _refuse_second_owner(trainer: "pl.Trainer") -> None:
    """Raise if something else in this trainer drives the one profiler of the process.

    Raises:
        MisconfigurationException: There are two of us, or the trainer has a profiler built on torch's.
    """
    twins = [callback for callback in _owned(trainer, "callbacks") if isinstance(callback, ChakraProfilerCallback)]
    if len(twins) > 1:
        raise MisconfigurationException(
            f"This Trainer has {len(twins)} `ChakraProfilerCallback`s, and a process has one Kineto profiler. Keep "
            "one of them (the environment variable LIGHTNING_CHAKRA adds one); `repeat` records several windows."
        )
    profiler = _owned(trainer, "profiler")
    # by name: a pytorch_lightning.Trainer has a class of its own
    if any(base.__name__ == "PyTorchProfiler" for base in type(profiler).__mro__):
        raise MisconfigurationException(
            f"`Trainer(profiler={type(profiler).__name__})` and `ChakraProfilerCallback` both drive Kineto, and a "
            "process has one Kineto profiler. Remove one of them; profiler='simple' and "
            "'advanced' go well with the callback."
        )


def _reloads(trainer: "pl.Trainer") -> bool:
    return bool(_owned(trainer, "reload_dataloaders_every_n_epochs"))


def _changes_accumulation(trainer: "pl.Trainer") -> bool:
    # by name, as above
    callbacks = _owned(trainer, "callbacks")
    return any(base.__name__ == "GradientAccumulationScheduler" for c in callbacks for base in type(c).__mro__)


def _describe_leftover(folder: str) -> str:
    found = []
    for window in windows(folder):
        for file in window.files:
            state = _size(os.path.getsize(file.path))
            try:
                check_complete(file)
            except (ValueError, OSError):
                state += ", not complete"
            found.append(f"{os.path.relpath(file.path, folder)} ({state})")
    return ", ".join(found) or "no raw files"


def _owned(trainer: "pl.Trainer", name: str) -> Any:
    """An attribute that the trainer's connectors set, which type checkers do not see."""
    return getattr(trainer, name)


def _path(name: str, value: "str | os.PathLike[str] | None") -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, Path, os.PathLike)):
        raise TypeError(f"`{name}={value!r}` must be a path or None.")
    path = os.fspath(value)
    if not path:
        raise ValueError(f"`{name}` is empty; leave it out (None) for the default folder.")
    return path


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"`{name}={value!r}` must be True or False.")
    return value


def _choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"`{name}={value!r}` must be one of {', '.join(map(repr, choices))}.")
    return value


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
