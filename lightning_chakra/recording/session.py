"""The profiling of one fit on one rank: steps become windows, windows become files.

What all ranks must do alike (count steps, meet at the barrier) and what only profiled ranks do (record, write) is
decided here, without Lightning.
"""

import atexit
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from tqdm import tqdm
from typing_extensions import ParamSpec

from lightning_chakra.recording.advice import describe_lost, resting, too_short
from lightning_chakra.recording.barrier import BarrierError, FlushBarrier
from lightning_chakra.recording.layout import PublishedTrace
from lightning_chakra.recording.messages import info, warn
from lightning_chakra.recording.recorder import RecorderError, TraceRecorder
from lightning_chakra.recording.schedule import Phase, ProfileSchedule, named_steps
from lightning_chakra.recording.scratch import Scratch
from lightning_chakra.recording.signals import deferred_signals
from lightning_chakra.recording.writer import TraceWriter, describe_error

_PATIENCE = 2.0  # seconds of waiting for the writer before the user is told
_MOST_RESTING = 32  # batches without a step before the user is told
_BACKLOG = 3  # windows waiting for the writer before the user is told

_WINDOW_LOST = "Nothing of this window is kept; the training goes on."
_MARK_LOST = "A mark of the trace is missing or wrong; the training goes on."

# Lightning answers SIGTERM, and SIGUSR1 under SLURM, with collectives on the group that trains. In the middle of an
# export, or of the wait for one, they would meet nobody there until that group's timeout ends the job: the answer waits
# until all have met. Ctrl-C ends a wait.
_meeting = deferred_signals(but=signal.SIGINT)

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass
class Recording:
    """What a profiled rank has and another one has not.

    Attributes:
        least_free_bytes: Free scratch space below which a window begins with a warning.
        published: The files published in this fit.
        lost: Number of files that could not be published in this fit.
    """

    recorder: TraceRecorder
    writer: TraceWriter
    scratch: Scratch
    least_free_bytes: int
    published: list[PublishedTrace] = field(default_factory=list)
    lost: int = 0


@dataclass(frozen=True)
class Total:
    """What all ranks together published in one fit."""

    files: int
    bytes: int
    lost: int
    partial: int
    kineto: int


class ProfilingSession:
    """One fit on one rank.

    Args:
        rank: Global rank.
        schedule: Which steps to record.
        barrier: Where all ranks meet.
        recording: The recorder and the writer of a profiled rank; ``None`` on the others.
        raise_errors: Raise the first fault of the profiling instead of warning of it, once the call in which it arose
            has done the rest of its work.
    """

    def __init__(
        self,
        *,
        rank: int,
        schedule: ProfileSchedule,
        barrier: FlushBarrier,
        recording: Recording | None,
        raise_errors: bool,
    ) -> None:
        self.in_step = False
        self.number = 0
        """Number of the current or last step: what its mark carries."""
        self.steps = 0
        """Steps completed in this fit, which is also the index of the current or next one."""
        self.next_busy = schedule.next_busy(0)
        """Index of the next step that is not idle: the steps before it need no :meth:`begin_step`."""
        self.global_step = 0
        """The trainer's when the last step ended; kept here for the callback, which asks for it once per batch."""
        self.may_rest = False
        """Whether the global step may never move, as with raw optimizers under manual optimization."""
        self._rested = 0  # batches before the first step that did not end it
        self._open = False  # whether an active step began whose window has not closed; the same on every rank
        self._first = 0  # its first step
        self._begun = 0  # the index of that one
        self._windows = 0  # windows begun
        self._given_up = False  # whether the barrier failed, so that recording on would endanger the training
        self._rank = rank
        self._schedule = schedule
        self._barrier: FlushBarrier | None = barrier
        self._recording = recording
        self._raise_errors = raise_errors
        self._first_fault: RuntimeError | None = None  # to be raised when the current call has done its work
        self._told_too_short = False
        self._told_backlog = False
        self._pid = os.getpid()
        # Leaving the interpreter with a running profiler is a segmentation fault.
        atexit.register(self.abort)

    def begin_step(self, number: int) -> None:
        """The first batch of a step begins; ``number`` is what its mark shall carry."""
        self.in_step = True
        self.number = number
        phase = self._schedule.phase(self.steps)
        if phase is Phase.IDLE or self._given_up:
            return
        if phase is Phase.ACTIVE and not self._open:
            self._open = True
            self._first = number
            self._begun = self.steps
            self._windows += 1
            self._check_space()
        if self._recording is not None:
            window = "This window" if phase is Phase.ACTIVE else "The window for which this step warms up"
            lost = f"{window} is not recorded; the training goes on."
            self._attempt(lost, self._recording.recorder.begin_step, number, phase)
        self._raise_first_fault()

    def end_step(self) -> None:
        """The last batch of the step ended."""
        self.in_step = False
        index = self.steps
        self.steps += 1
        if index < self.next_busy:
            return
        self.next_busy = self._schedule.next_busy(self.steps)
        if not self._open:
            return
        if self._recording is not None:
            self._attempt(_MARK_LOST, self._recording.recorder.end_step)
        if self._schedule.ends_window(index):
            self._close_window(partial=False)
        self._raise_first_fault()

    def cancel_step(self) -> None:
        """The step that began does not come: a loop knows only then that it is over. Not a collective.

        A window that has no other step is forgotten.
        """
        self.in_step = False
        if self._open and self.steps == self._begun:
            self._open = False
            self._windows -= 1
            if self._recording is not None:
                self._recording.recorder.discard()

    def rest(self) -> None:
        """A batch ended, and the global step did not move."""
        if self.may_rest and not self.steps:
            self._rested += 1
            if self._rested == _MOST_RESTING and self._rank == 0:
                self._told_too_short = True
                warn(resting(self._rested))

    def enter(self, name: str) -> None:
        """Something that is no training step begins; its operators go into a range of this name."""
        if self._recording is not None:
            self._attempt(_MARK_LOST, self._recording.recorder.enter, name)
        self._raise_first_fault()

    def leave(self, name: str) -> None:
        """It ended."""
        if self._recording is not None:
            self._attempt(_MARK_LOST, self._recording.recorder.leave, name)
        self._raise_first_fault()

    def expect(self, steps: int) -> None:
        """Lightning knows already that the fit will have at most ``steps`` steps: warn if that is too few."""
        if self._rank == 0 and steps < self._schedule.steps_begun:
            self._told_too_short = True
            warn(too_short(self._schedule, steps, certain=False))

    @_meeting
    def finish(self) -> Total:
        """The training ended well: save a window cut short, wait for the writer and for the other ranks."""
        if self._open:
            self._close_window(partial=True)
        elif self._recording is not None:
            self._recording.recorder.discard()  # prepared, and not started
        self.tell_too_short()
        self._flush()
        # Ranks with nothing to write must not run ahead into collectives of the training, or out of the process.
        self._meet("publish the last traces")
        total = self._total()
        self._raise_first_fault()
        return total

    def tell_too_short(self) -> None:
        """The fit ended: warn if no window began, unless :meth:`expect` did. Not a collective."""
        if self._rank == 0 and not (self._windows or self._given_up or self._told_too_short):
            if self._rested and not self.steps:
                warn(resting(self._rested))
            else:
                warn(too_short(self._schedule, self.steps, certain=True))

    def abort(self) -> None:
        """Save what there is, without any collective: an exception, a signal or the end of the interpreter."""
        if os.getpid() != self._pid:
            return  # a child forked by the training: profiler, files and connections are its parent's
        self._raise_errors = False  # the training's own exception is the one to be seen
        fault, self._first_fault = self._first_fault, None
        if fault is not None:
            warn(str(fault))
        try:
            if self._recording is not None:
                try:
                    self._attempt(_WINDOW_LOST, self._recording.recorder.close, True)
                finally:
                    self._submit()
                self._flush()
                self._tell_saved(self._recording.published)
        finally:
            self.dispose()

    def _tell_saved(self, published: list[PublishedTrace]) -> None:
        """Somebody who interrupted a training has no other reason to look for its traces."""
        if published:
            paths = ", ".join(trace.path for trace in published)
            info(f"rank {self._rank} saved its traces before the training ended early: {paths}")

    def dispose(self) -> None:
        """Give everything back. Not a collective. Does nothing the second time."""
        atexit.unregister(self.abort)
        if self._recording is not None:
            self._recording.recorder.end()
            self._recording.writer.close()
            self._recording.scratch.close()
            self._recording = None
        self._drop_barrier()

    @_meeting
    def _close_window(self, *, partial: bool) -> None:
        """Export, meet the other ranks, flush in the background. Every rank comes here after the same step."""
        self._open = False
        if self._recording is not None:
            self._attempt(_WINDOW_LOST, self._recording.recorder.close, partial)
        try:
            self._meet(f"export {self._window()}")
        finally:
            self._submit()

    def _window(self) -> str:
        return named_steps(self._first, self.number)

    def _meet(self, what: str) -> None:
        if self._barrier is None:
            return
        try:
            self._barrier.wait(what)
        except Exception as error:  # whatever a strategy's barrier raises
            self._drop_barrier()
            self._given_up = True
            text = f"rank {self._rank} could not wait for the others to {what}: {describe_error(error)}"
            if isinstance(error, BarrierError):
                text = str(error)
            self._fault(f"{text}. Nothing more is recorded in this fit; the training goes on.", error)

    def _drop_barrier(self) -> None:
        barrier, self._barrier = self._barrier, None
        if barrier is not None:
            barrier.close()

    def _total(self) -> Total:
        mine = [0, 0, 0, 0, 0]
        if self._recording is not None:
            published = self._recording.published
            mine = [
                len(published),
                sum(trace.bytes for trace in published),
                self._recording.lost,
                sum(trace.partial for trace in published),
                sum(trace.kind == "kineto" for trace in published),
            ]
        if self._barrier is not None:
            mine = self._attempt("The sums at the end are those of this rank.", self._barrier.total, mine) or mine
        return Total(*mine)

    def _submit(self) -> None:
        """Hand the window that was closed last to the writer, and tell what went wrong since the last time."""
        if self._recording is None:
            return
        problems, self._recording.recorder.problems = self._recording.recorder.problems, []
        for problem in problems:
            self._fault(f"rank {self._rank}, {self._window()}: {problem}. The training goes on.")
        with deferred_signals():
            raw = self._recording.recorder.take()
            if raw is not None:
                self._recording.writer.submit(raw)
        if raw is not None:
            backlog = self._recording.writer.backlog
            if backlog >= _BACKLOG and not self._told_backlog:
                self._told_backlog = True
                warn(
                    f"rank {self._rank}, {self._window()}: {backlog} windows wait to be compressed and published, "
                    f"their raw files fill {self._recording.scratch.where()}. Record less often (`wait`) or less "
                    "(`active`)."
                )
        self._tell_write_errors()

    def _flush(self) -> None:
        """Wait for the writer, and say so when it takes long."""
        if self._recording is None:
            return
        writer = self._recording.writer
        if not writer.join(_PATIENCE):
            _watch(writer, self._rank)
        writer.close()
        self._tell_write_errors()

    def _tell_write_errors(self) -> None:
        if self._recording is None:
            return
        for error in self._recording.writer.take_errors():
            self._recording.lost += 1
            self._fault(describe_lost(self._rank, error), error)

    def _check_space(self) -> None:
        if self._recording is None:
            return
        try:
            free = self._recording.scratch.free_bytes()
        except OSError:
            return  # the recorder is about to find the same, and says it
        least = self._recording.least_free_bytes
        if free < least:
            warn(
                f"rank {self._rank}, from step {self._first}: {free / 1e9:.1f} GB are free in "
                f"{self._recording.scratch.where()}, and a window can take {least / 1e9:.1f} GB or more. "
                "If they do not fit, this window is lost. Set `scratch_dir` to a folder with more space."
            )

    def _attempt(self, consequence: str, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        try:
            return function(*args, **kwargs)
        except Exception as error:  # no fault of the profiling may end a training
            reason = str(error) if isinstance(error, RecorderError) else describe_error(error)
            where = self._window() if self._open else f"step {self.number}"
            self._fault(f"rank {self._rank}, {where}: {reason}. {consequence}", error)
            return None

    def _fault(self, message: str, error: BaseException | None = None) -> None:
        if self._raise_errors and self._first_fault is None:
            self._first_fault = RuntimeError(message)
            self._first_fault.__cause__ = error
        else:
            warn(message)

    def _raise_first_fault(self) -> None:
        fault, self._first_fault = self._first_fault, None
        if fault is not None:
            self._raise_errors = False  # raised once; what the clean-up still meets are warnings
            raise fault


def _watch(writer: TraceWriter, rank: int) -> None:
    """Show the progress of the writer until it is done."""
    done, todo = writer.progress
    if rank != 0 or not sys.stderr.isatty():
        info(f"rank {rank} is compressing its traces, {done / 1e6:.0f} of {todo / 1e6:.0f} MB so far")
        writer.join()
        return
    with tqdm(total=todo, initial=done, unit="B", unit_scale=True, desc="compressing traces", leave=False) as bar:
        while not writer.join(0.2):
            bar.update(writer.progress[0] - bar.n)
