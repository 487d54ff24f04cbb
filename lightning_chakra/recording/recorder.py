"""Driving torch's profiler: from step marks to a pair of raw files. Nothing here waits for another rank."""

import contextlib
import dataclasses
import json
import shutil
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.profiler import record_function

from lightning_chakra.recording.layout import RawWindow
from lightning_chakra.recording.memory import many_frees
from lightning_chakra.recording.observer import ExecutionTrace, ObserverError
from lightning_chakra.recording.private_torch import (
    NOBODY,
    PREPARED,
    RUNNING,
    KinetoProfile,
    is_noted,
    note_owner,
    others,
    profiler_enabled,
    trace_only_config,
)
from lightning_chakra.recording.schedule import Phase
from lightning_chakra.recording.scratch import Scratch, describe_window
from lightning_chakra.recording.settings import RecordOptions
from lightning_chakra.recording.signals import deferred_signals

_SETTLE = 0.002  # seconds between the last mark and the stop


class RecorderError(RuntimeError):
    """A window, or a part of it, cannot be recorded."""


class TraceRecorder:
    """Records the windows of one rank, one low-level profiler each.

    A fresh profiler per window, driven by its three plain calls (prepare, start, stop), has no state that could carry
    over: nothing can be stopped twice, no handler runs inside torch's own bookkeeping, and dropping it gives its
    memory back.

    Args:
        options: What to collect.
        scratch: Where the raw files go.
        metadata: Top-level entries for the Kineto file; ``first_step``, ``last_step`` and ``partial`` are added to the
            ``lightning_chakra`` one.
    """

    def __init__(self, options: RecordOptions, scratch: Scratch, metadata: Mapping[str, dict[str, Any]]) -> None:
        self._options = options
        self._scratch = scratch
        self._metadata = metadata
        self._live: _Window | None = None
        self._lost = False
        self.problems: list[str] = []
        """What could not be recorded although the window goes on; the owner takes and tells it."""
        self._finished: RawWindow | None = None
        others.watch()
        others.before.append(self._make_way)

    @property
    def recording(self) -> bool:
        """Whether a window is open."""
        return self._live is not None and self._live.raw is not None

    def begin_step(self, step: int, phase: Phase) -> None:
        """Enter a step in its phase: prepare on warmup, record and mark it when active.

        Raises:
            RecorderError: Another profiler runs. This window is given up.
            OSError: The scratch folder cannot be written. This window is given up.
        """
        if phase is Phase.IDLE or self._lost:
            return
        with deferred_signals():
            try:
                if self._live is None:
                    self._live = _Window(self._options, self._metadata)
                if phase is Phase.ACTIVE:
                    if self._live.raw is None:
                        self._live.start(self._scratch, step, self.problems)
                    self._live.mark(step)
            except Exception:
                self.discard()
                self._lost = True
                raise

    def end_step(self) -> None:
        """Close the mark of the current step."""
        if self._live is not None:
            self._live.leave_all()

    def enter(self, name: str) -> None:
        """Open a named range, if a window is open."""
        if self._live is not None and self._live.raw is not None:
            self._live.enter(name)

    def leave(self, name: str) -> None:
        """Close the range that :meth:`enter` opened last under this name."""
        if self._live is not None:
            self._live.leave(name)

    def close(self, partial: bool) -> None:
        """End the window: stop, finish the execution trace, export. Blocks as long as torch takes for that.

        :meth:`take` has the raw files. They are not returned: the ``KeyboardInterrupt`` of a Ctrl-C during the export
        is raised at its end, and a return value would be lost by it.
        """
        with deferred_signals():
            window, self._live = self._live, None
            self._lost = False
            if window is not None:
                self._finished = window.close(partial, self.problems)

    def take(self) -> RawWindow | None:
        """The raw files of the window that was closed last, once; ``None`` if nothing was recorded."""
        finished, self._finished = self._finished, None
        return finished

    def discard(self) -> None:
        """End the window and drop what it recorded. Never raises."""
        with deferred_signals():
            window, self._live = self._live, None
            self._lost = False
            if window is not None:
                with contextlib.suppress(Exception):
                    window.close(True, [])
                if window.raw is not None:
                    shutil.rmtree(window.raw.folder, ignore_errors=True)
            if (finished := self.take()) is not None:
                shutil.rmtree(finished.folder, ignore_errors=True)

    def end(self) -> None:
        """Drop everything, and look no more at what other profilers do."""
        self.discard()
        with contextlib.suppress(ValueError):  # the second time
            others.before.remove(self._make_way)

    def _make_way(self) -> None:
        """Another profiler is about to begin: this one must be over by then.

        What it only prepared is released; a window ends here and is kept. In another thread than that of the window
        nothing can be stopped.
        """
        window = self._live
        if window is None or not window.is_here:
            return
        with deferred_signals():
            if window.raw is None:
                window.release()
                return
            self._live, self._lost = None, True
            self.problems.append(
                "the window ends where another profiler was started; what it recorded until then is kept"
            )
            with contextlib.suppress(Exception):  # nothing of this belongs into the code of who starts a profiler
                self._finished = window.close(True, self.problems)


class _Window:
    """One profiler from prepare to export. Closing it works from every state, once."""

    def __init__(self, options: RecordOptions, metadata: Mapping[str, dict[str, Any]]) -> None:
        self._options = options
        self._metadata = metadata
        self._thread = threading.get_ident()
        self._ranges: list[tuple[str, record_function]] = []
        self._trace: ExecutionTrace | None = None
        self.raw: RawWindow | None = None
        _refuse_beside_others()
        self._prepare()

    @property
    def is_here(self) -> bool:
        """Whether this is the thread that can stop it."""
        return threading.get_ident() == self._thread

    def _prepare(self) -> None:
        self._profile = _profile(self._options)
        with others.ours():
            self._profile.prepare_trace()
        note_owner(PREPARED)

    def start(self, scratch: Scratch, step: int, problems: list[str]) -> None:
        _refuse_beside_others()
        if not is_noted(PREPARED):
            # Somebody ran a profiler since: starting on what he left is a segmentation fault.
            self._prepare()
        self.raw = raw = scratch.open_window(step)
        files = {file.kind: file for file in raw.files}
        if "chakra" in files:
            try:
                self._trace = ExecutionTrace(files["chakra"].path)
                self._trace.start()
            except (ObserverError, OSError) as error:
                self._trace = None
                problems.append(f"no execution trace of this window: {error}")
                self.raw = dataclasses.replace(raw, files=(files["kineto"],))
        for key, value in self._metadata.items():
            # torch writes its own distributedInfo when there is a process group
            if key != "lightning_chakra" and not (key == "distributedInfo" and _has_process_group()):
                self._profile.preset_metadata_json(key, json.dumps(value))
        note_owner(NOBODY)  # if it raises
        with others.ours():
            self._profile.start_trace()
        note_owner(RUNNING)

    def mark(self, step: int) -> None:
        assert self.raw is not None
        self.raw = dataclasses.replace(self.raw, last_step=step)
        self.enter(f"ProfilerStep#{step}")

    def enter(self, name: str) -> None:
        entered = record_function(name)
        entered.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._ranges.append((name, entered))

    def leave(self, name: str) -> None:
        if self._ranges and self._ranges[-1][0] == name:
            self._ranges.pop()[1].__exit__(None, None, None)

    def leave_all(self) -> None:
        while self._ranges:
            self._ranges.pop()[1].__exit__(None, None, None)

    def close(self, partial: bool, problems: list[str]) -> RawWindow | None:
        self.leave_all()
        if self.raw is None:
            self.release()
            return None
        raw = dataclasses.replace(self.raw, partial=partial)
        kept = {file.kind: file for file in raw.files}
        # torch stops the observer first and the profiler then; the pair covers the same operators only so. What one of
        # them cannot do must not keep the other from being saved.
        try:
            if self._trace is not None:
                # An operator gets its node when it ends, and gloo wakes the waiting thread a moment before its worker
                # has ended the collective.
                time.sleep(_SETTLE)
                self._trace.stop()
        except Exception as error:
            problems.append(f"no whole execution trace of this window: {error}")
            kept.pop("chakra", None)
        try:
            self._stop(raw)
        except Exception as error:
            problems.append(f"no Kineto trace of this window: {error}")
            kept.pop("kineto", None)
        if self._trace is not None and self._trace.refused:
            problems.append(
                f"another ExecutionTraceObserver was registered for {', '.join(self._trace.refused)}; a process has "
                "one at a time, so that one records nothing"
            )
        try:
            if "kineto" in kept:
                # Raises nothing on a full disk: the writer looks at the file before it publishes it.
                self._profile.export_chrome_trace(kept["kineto"].path)
        except Exception as error:
            problems.append(f"no Kineto trace of this window: {error}")
            kept.pop("kineto", None)
        with many_frees():
            del self._profile
        # Last, because it must come some time after the stop.
        try:
            if self._trace is not None:
                self._trace.close()
        except Exception as error:
            if "chakra" in kept:
                problems.append(f"no whole execution trace of this window: {error}")
            kept.pop("chakra", None)
        raw = dataclasses.replace(raw, files=tuple(kept.values()))
        if not raw.files:
            shutil.rmtree(raw.folder, ignore_errors=True)
            return None
        with contextlib.suppress(OSError):
            describe_window(raw)
        return raw

    def _stop(self, raw: RawWindow) -> None:
        """End the profiler; its results can be exported then.

        Raises:
            RecorderError: Another one was started meanwhile. Stopping would stop that one, and exporting what it took
                over is a segmentation fault. Or this is the end of the interpreter while a daemon thread still trains:
                stopping in another thread is one as well, and leaving the profiler alone is not.
        """
        if not self.is_here:
            raise RecorderError("the training still runs in another thread, which alone could stop the profiler")
        if not is_noted(RUNNING):
            self.release()
            raise RecorderError("another profiler was started in it and ended it")
        try:
            span = {"first_step": raw.first_step, "last_step": raw.last_step, "partial": raw.partial}
            entry = json.dumps({**self._metadata.get("lightning_chakra", {}), **span})
            self._profile.add_metadata_json("lightning_chakra", entry)
        finally:
            try:
                with others.ours():
                    self._profile.stop_trace()
            finally:
                note_owner(NOBODY)

    def release(self) -> None:
        """End a profiler that was prepared and never started; torch's own way out of the warmup."""
        # A note that is gone is another profiler's; so is what it left in Kineto.
        if self.is_here and is_noted(PREPARED) and not profiler_enabled():
            with others.ours():
                self._profile.start_trace()
                self._profile.stop_trace()
            note_owner(NOBODY)


def _refuse_beside_others() -> None:
    if profiler_enabled():
        raise RecorderError("another profiler is running in this process")
    if others.busy:
        raise RecorderError("another profiler is prepared in this process, or was and never stopped")


def _profile(options: RecordOptions) -> Any:
    return KinetoProfile(
        record_shapes=options.record_shapes,
        profile_memory=options.profile_memory,
        with_stack=options.with_stack,
        with_flops=options.with_flops,
        with_modules=options.with_modules,
        # stacks need the post-processing
        experimental_config=None if options.with_stack else trace_only_config(),
    )


def _has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
