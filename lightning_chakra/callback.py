"""The Lightning callback: hooks and nothing else. What is recorded is decided in :mod:`lightning_chakra.recording`."""

import dataclasses
import os
from typing import Any, Literal

import lightning.pytorch as pl
import torch.distributed
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_chakra.recording.barrier import FlushBarrier, GlooBarrier, StrategyBarrier
from lightning_chakra.recording.layout import PublishedTrace
from lightning_chakra.recording.messages import info
from lightning_chakra.recording.opening import Place, Profiling, open_profiling
from lightning_chakra.recording.private_torch import others
from lightning_chakra.recording.reports import describe_end, describe_start
from lightning_chakra.recording.schedule import ProfileSchedule
from lightning_chakra.recording.settings import Settings
from lightning_chakra.recording.storage import FolderError


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
        self.settings = Settings(
            dirpath=dirpath,
            profile_ranks=profile_ranks,
            skip_first=skip_first,
            wait=wait,
            warmup=warmup,
            active=active,
            repeat=repeat,
            step_unit=step_unit,
            collect_shapes=collect_shapes,
            collect_callstack=collect_callstack,
            collect_chakra=collect_chakra,
            profile_memory=profile_memory,
            with_flops=with_flops,
            with_modules=with_modules,
            barrier_timeout=barrier_timeout,
            scratch_dir=scratch_dir,
            on_error=on_error,
        )
        self._traces: list[PublishedTrace] = []
        self._profiling: Profiling | None = None
        others.watch()  # one that is prepared by the time the fit begins must be known

    def __getattr__(self, name: str) -> Any:
        # Each argument can be read back under its own name; it is looked for here only where nothing else has it.
        if name in _ARGUMENTS and "settings" in self.__dict__:
            return getattr(self.settings, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def schedule(self) -> ProfileSchedule:
        """Which steps are recorded."""
        return self.settings.schedule

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
        _refuse_second_owner(trainer)
        # log_dir is a broadcast: it is asked for on every rank, and here
        dirpath = str(self.settings.dirpath or trainer.log_dir or trainer.default_root_dir)
        try:
            self._profiling = open_profiling(self.settings, self._place(trainer), dirpath, self._traces.append)
        except FolderError as error:
            raise MisconfigurationException(f"`ChakraProfilerCallback` {error}") from error

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
        if self.settings.step_unit == "optimizer_step":
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
            info(describe_end(total, profiling.root))

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
        if self.settings.step_unit == "batch":
            return trainer.fit_loop.epoch_loop.total_batch_idx
        return trainer.global_step

    def _place(self, trainer: "pl.Trainer") -> Place:
        return Place(
            global_rank=trainer.global_rank,
            world_size=trainer.world_size,
            local_rank=trainer.local_rank,
            ranks_here=trainer.num_devices,
            strategy=type(trainer.strategy).__name__,
            make_barrier=lambda: self._barrier(trainer),
            all_agree=lambda fine: trainer.strategy.reduce_boolean_decision(fine, all=True),
        )

    def _barrier(self, trainer: "pl.Trainer") -> FlushBarrier:
        if trainer.world_size > 1 and torch.distributed.is_available() and torch.distributed.is_initialized():
            return GlooBarrier(self.settings.barrier_timeout)
        return StrategyBarrier(trainer.strategy.barrier, trainer.strategy.broadcast)

    def _describe_start(self, trainer: "pl.Trainer", profiling: Profiling) -> str:
        by_batch = self.settings.step_unit == "batch"
        note = ""
        if not by_batch and not trainer.lightning_module.automatic_optimization:
            note = " (more where a step moves the global step by more than one, as with several optimizers)"
        return describe_start(
            self.settings,
            first=trainer.fit_loop.epoch_loop.total_batch_idx + 1 if by_batch else trainer.global_step,
            profiled=profiling.profiled,
            world_size=trainer.world_size,
            root=profiling.root,
            moved_from=profiling.dirpath,
            note=note,
        )

    def _most_steps(self, trainer: "pl.Trainer") -> int | None:
        """The most steps this fit can have, as far as Lightning knows at its start."""
        bounds: list[float] = []
        if trainer.max_steps >= 0 and self.settings.step_unit == "optimizer_step":
            bounds.append(trainer.max_steps - trainer.global_step)
        # reloaded loaders may have any length
        if trainer.max_epochs is not None and trainer.max_epochs >= 0 and not _reloads(trainer):
            batches = trainer.num_training_batches
            if self.settings.step_unit == "optimizer_step" and not _changes_accumulation(trainer):
                # the last group of an epoch may be short
                batches = batches if batches == float("inf") else -(-batches // trainer.accumulate_grad_batches)
            bounds.append((trainer.max_epochs - trainer.current_epoch) * batches)
        least = min(bounds, default=float("inf"))
        return None if least == float("inf") else max(0, int(least))


_ARGUMENTS = frozenset(field.name for field in dataclasses.fields(Settings))


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


def _owned(trainer: "pl.Trainer", name: str) -> Any:
    """An attribute that the trainer's connectors set, which type checkers do not see."""
    return getattr(trainer, name)
