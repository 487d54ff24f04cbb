"""The process-wide slot for execution traces, and every hazard of it.

torch has one :class:`torch.profiler.ExecutionTraceObserver` slot per process. It reports success where it failed, and
several of its misuses end the process; each method below says which one it avoids.
"""

import contextlib
import functools
import gc
import os
import time
import weakref
from typing import Any

from torch.profiler import ExecutionTraceObserver

# Observers that torch believes to be registered although another one holds the slot. Dropping one would finalize the
# other's file and make its stop() a segmentation fault.
_abandoned: list[ExecutionTraceObserver] = []

_TAIL = 200
_GRACE = 0.1  # seconds between stopping and unregistering

_observer_class: Any = ExecutionTraceObserver
_register_callback: Any = ExecutionTraceObserver.register_callback


class ObserverError(RuntimeError):
    """The execution trace cannot be recorded."""


class ExecutionTrace:
    """One execution trace from registration to its finished file.

    Args:
        path: The plain ``.json`` file to write. Its folder must exist.

    Raises:
        ObserverError: Another observer holds the slot, or execution traces are broken in this process.
        OSError: The file cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._stopped = 0.0  # when, by the monotonic clock
        self._path = path
        # A registration that cannot open its file disables execution traces for the rest of the process: try first.
        with open(path, "wb"):
            pass
        os.remove(path)
        observer = _register(path)
        if observer is None:
            # A profile is a cycle of references: the observer that ENABLE_PYTORCH_EXECUTION_TRACE=1 gave to one that
            # is over and dropped holds the slot until it is collected.
            gc.collect()
            observer = _register(path)
        if observer is None:
            raise ObserverError(
                "another ExecutionTraceObserver is registered in this process, or one before could not open its file"
            )
        self._observer: ExecutionTraceObserver | None = observer
        self.refused: list[str] = []
        """Paths of other observers that somebody tried to register meanwhile."""
        self._refuse_others()

    def start(self) -> None:
        """Begin to record. Process groups that exist by now are in the trace."""
        assert self._observer is not None
        self._observer.start()
        _current.add(self._observer)

    def stop(self) -> None:
        """Stop recording; the file is not complete before :meth:`close`.

        Raises:
            ObserverError: Another observer was dropped meanwhile, which finished this file early.
        """
        if self._observer is None:
            return
        self._stopped = self._stopped or time.monotonic()
        if self._is_finalized():
            # Stopping now would be a segmentation fault: the C++ side has no observer any more.
            self._observer._execution_trace_running = False
            self._observer._registered = False
            self._forget()
            raise ObserverError(
                "another ExecutionTraceObserver was registered and dropped during the window, which ended this one's "
                "execution trace early"
            )
        self._observer.stop()

    def close(self) -> None:
        """Complete the file and give the slot back. Does nothing the second time.

        An operator of another thread (of autograd, of gloo, of the user's) can be inside torch's observer in the moment
        of the stop. Unregistering frees what it stands in: a segmentation fault or a hang. Nothing new enters after the
        stop, so a short while later nobody is in there any more. The export of all but tiny traces takes longer.
        """
        if self._observer is None:
            return
        try:
            self.stop()
            time.sleep(max(0.0, self._stopped + _GRACE - time.monotonic()))
            self._observer.unregister_callback()
        finally:
            self._forget()

    def _refuse_others(self) -> None:
        """Keep others from registering while this one holds the slot.

        torch would tell them that it worked. They would record nothing, stop this trace together with theirs, and be a
        segmentation fault if theirs is stopped after this one. An observer that is not registered is harmless.
        """

        @functools.wraps(_register_callback)
        def refuse(other: ExecutionTraceObserver, output_file_path: str) -> ExecutionTraceObserver:
            self.refused.append(output_file_path)
            return other

        _observer_class.register_callback = refuse

    @staticmethod
    def _accept_others() -> None:
        _observer_class.register_callback = _register_callback

    def _forget(self) -> None:
        self._accept_others()
        if self._observer is not None:
            _current.discard(self._observer)
            self._observer = None

    def _is_finalized(self) -> bool:
        with contextlib.suppress(OSError), open(self._path, "rb") as file:
            file.seek(max(0, os.path.getsize(self._path) - _TAIL))
            tail = file.read()
            return b'"finish_ts"' in tail and tail.rstrip().endswith(b"}")
        return False


def _register(path: str) -> ExecutionTraceObserver | None:
    observer = ExecutionTraceObserver()
    observer.register_callback(path)
    # torch reports a registration also when another observer holds the slot; the file is the only proof.
    if os.path.exists(path):
        return observer
    observer._registered = False
    _abandoned.append(observer)
    return None


_current: "weakref.WeakSet[ExecutionTraceObserver]" = weakref.WeakSet()


def _stop_in_child() -> None:
    """Keep forked children (DataLoader workers) from writing their operators into the parent's file."""
    for observer in list(_current):
        observer.stop()
    _current.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stop_in_child)
