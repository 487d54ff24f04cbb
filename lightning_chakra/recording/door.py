"""What the doors to a recording have in common: the arguments, one recording at a time, what is said at its two ends.

A door is what a user holds: the Lightning callback, :class:`lightning_chakra.profile_window`, the callback of another
trainer. It translates the hooks of its side into steps, and the rest is here.
"""

import dataclasses
import os
import weakref
from collections.abc import Callable
from typing import Any, Literal

from lightning_chakra.recording.layout import PublishedTrace
from lightning_chakra.recording.messages import info
from lightning_chakra.recording.opening import Place, Profiling, open_profiling
from lightning_chakra.recording.private_torch import others
from lightning_chakra.recording.reports import describe_end, describe_start
from lightning_chakra.recording.schedule import ProfileSchedule
from lightning_chakra.recording.settings import Settings

_ARGUMENTS = tuple(field.name for field in dataclasses.fields(Settings))
_opened: "weakref.WeakSet[Door]" = weakref.WeakSet()


class Door:
    """The arguments, which :class:`lightning_chakra.ChakraProfilerCallback` describes, and the life of a recording.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has a value that no training could use.
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
        super().__init__()  # of the trainer's own class of callbacks
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
        others.watch()  # one that is prepared by the time the training begins must be known

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={getattr(self.settings, name)!r}" for name in _ARGUMENTS)
        return f"{type(self).__name__}({arguments})"

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
        """The files that this rank published, oldest first. Complete when the training has returned.

        A launcher that spawns all ranks (``ddp_spawn``) leaves it empty in the process that called it: that one is no
        rank.
        """
        return list(self._traces)

    def __getstate__(self) -> dict[str, Any]:
        # What is alive during a training belongs to this process and to this object.
        return {**self.__dict__, "_profiling": None, "_traces": self.traces}

    def _refuse_nested(self) -> None:
        """Refuse to begin beside another recording of this process.

        Raises:
            RuntimeError: One is going on, here or in another door.
        """
        for other in _opened:
            if other._profiling is not None:
                raise RuntimeError(
                    f"`{type(self).__name__}` to {self.settings.dirpath or 'its default folder'} begins while "
                    f"`{type(other).__name__}` to {other._profiling.root} records, and a process has one Kineto "
                    "profiler. End that one first, or keep one of them; `repeat` records several windows."
                )

    def _open(self, place: Place, dirpath: str) -> None:
        """Begin a recording; all ranks come here together. A collective.

        Raises:
            FolderError: Nothing could be written to this folder.
            ValueError: No training could use these settings here.
        """
        self._dispose()  # a training that ended without a word
        self._profiling = open_profiling(self.settings, place, dirpath, self._traces.append)
        _opened.add(self)

    def _start(self, *, first: int, global_step: int, most: int | None = None, note: str = "") -> None:
        """The first step is about to begin: say what will be recorded.

        Args:
            first: Number of the first step.
            global_step: Number of optimizer steps so far.
            most: The most steps that this training can have, if that is known.
            note: What there is to say about the numbers of the steps.
        """
        profiling = self._profiling
        if profiling is None:
            return
        profiling.session.global_step = global_step
        if profiling.place.global_rank == 0:
            info(
                describe_start(
                    self.settings,
                    first=first,
                    profiled=profiling.profiled,
                    world_size=profiling.place.world_size,
                    root=profiling.root,
                    moved_from=profiling.dirpath,
                    note=note,
                )
            )
            if most is not None:
                profiling.session.expect(most)

    def _begin(self, number: Callable[[], int]) -> None:
        """A batch begins, and with it a step unless it belongs to the current one; ``number`` is what its mark gets."""
        profiling = self._profiling
        if profiling is None or profiling.session.in_step:
            return
        session = profiling.session
        if session.steps < session.next_busy:
            session.in_step = True  # all that an idle step costs, but for looking at global_step at its end
        else:
            session.begin_step(number())

    def _end(self, global_step: Callable[[], int]) -> None:
        """A batch ended, and with it the step unless its gradients are accumulated: then ``global_step`` rests."""
        profiling = self._profiling
        if profiling is None or not profiling.session.in_step:
            return
        session = profiling.session
        if self.settings.step_unit == "optimizer_step":
            reached = global_step()
            if reached == session.global_step:
                session.rest()
                return
            session.global_step = reached
        session.end_step()

    def _finish(self) -> None:
        """The training ended well: meet the other ranks once more, and say what was written. A collective.

        Raises:
            RuntimeError: A fault of the profiling, and ``on_error="raise"``.
        """
        profiling = self._profiling
        if profiling is None:
            return
        try:
            total = profiling.session.finish()
        except BaseException:  # of a signal, too
            self._abort()
            raise
        self._dispose()
        if profiling.place.global_rank == 0 and (total.files or total.lost):
            info(describe_end(total, profiling.root))

    def _abort(self) -> None:
        """The training ended by an exception: save what there is. No collective: the other ranks may never come."""
        profiling, self._profiling = self._profiling, None
        if profiling is not None:
            profiling.session.abort()

    def _dispose(self) -> None:
        """Give everything back; not a collective."""
        profiling, self._profiling = self._profiling, None
        if profiling is not None:
            profiling.session.dispose()
