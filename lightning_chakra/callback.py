"""The Lightning callback: hooks and nothing else. What is recorded is decided in :mod:`lightning_chakra.recording`."""

from typing import Any

import lightning.pytorch as pl
import torch.distributed
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_chakra.recording.barrier import FlushBarrier, GlooBarrier, StrategyBarrier
from lightning_chakra.recording.door import Door
from lightning_chakra.recording.opening import Place
from lightning_chakra.recording.storage import FolderError


class ChakraProfilerCallback(Door, Callback):
    """Write Kineto traces, and on request Chakra execution traces, of some steps of a training on some ranks.

    The files of a profiled rank ``N`` are ``pytorch_profile/rank-N.json.gz`` and ``chakra/rank-N.json.gz`` below
    ``dirpath``, or below ``dirpath/step-XXXXXXXX`` for each window when ``repeat`` is not 1. Earlier traces are never
    overwritten: the traces then go to ``dirpath/run-1``, ``run-2``, ...

    Args:
        dirpath: Output folder, a local path or an fsspec URL. ``None``: the logger's folder (``trainer.log_dir``), else
            ``trainer.default_root_dir``.
        profile_ranks: Global ranks to profile; empty means all. A list (tuple, set, range), a single rank, or a string
            as ``taskset --cpu-list`` takes it: ``"0,8-15"``, ``"0-255:8"``.
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

    def __getstate__(self) -> dict[str, Any]:
        # Lightning leaves two methods of the module on every callback, and with them the whole model would travel.
        return {name: value for name, value in super().__getstate__().items() if name not in ("log", "log_dict")}

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if stage != "fit":
            return
        _refuse_second_owner(trainer)
        # log_dir is a broadcast: it is asked for on every rank, and here
        dirpath = str(self.settings.dirpath or trainer.log_dir or trainer.default_root_dir)
        try:
            self._open(self._place(trainer), dirpath)
        except FolderError as error:
            raise MisconfigurationException(f"`ChakraProfilerCallback` {error}") from error

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        by_batch = self.settings.step_unit == "batch"
        note = ""
        if not by_batch and not trainer.lightning_module.automatic_optimization:
            note = " (more where a step moves the global step by more than one, as with several optimizers)"
        first = trainer.fit_loop.epoch_loop.total_batch_idx + 1 if by_batch else trainer.global_step
        self._start(first=first, global_step=trainer.global_step, most=self._most_steps(trainer), note=note)
        if self._profiling is not None:
            self._profiling.session.may_rest = not trainer.lightning_module.automatic_optimization

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        self._begin(lambda: self._step_number(trainer))

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._end(lambda: trainer.global_step)

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
        self._finish()

    @override
    def on_fit_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        # Still alive only if Lightning skipped the training: no batches, or a checkpoint of one that was done.
        if self._profiling is not None:
            self._profiling.session.tell_too_short()
            self._dispose()

    @override
    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        self._abort()

    @override
    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        self._dispose()  # a tuner ends its trial fit with nothing else

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
