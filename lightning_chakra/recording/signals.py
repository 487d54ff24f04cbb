"""Holding signals back while the profiler is in a state that an exception must not interrupt."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def deferred_signals(*numbers: signal.Signals) -> Iterator[None]:
    """Run the Python handlers of signals, SIGINT and SIGTERM unless named, after the block and not in the middle of it.

    A ``KeyboardInterrupt`` between two calls into torch's profiler would leave it half stopped, and stopping it again
    is a segmentation fault. Signals without a Python handler, and blocks outside the main thread, are left alone.

    The exception of a handler leaves the ``with`` statement and replaces what its block was about to return.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[_Held] = []
    try:
        for number in numbers or (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if callable(handler):
                held.append(_Held(number, handler))
                signal.signal(number, held[-1])
        yield
    finally:
        _release(held)


class _Held:
    """Stands in for a handler, and is transparent once released.

    That makes one harmless that a second signal in just that moment keeps from being removed.
    """

    def __init__(self, number: int, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._number = number
        self._handler = handler
        self._holding = True
        self._arrived: FrameType | None = None
        self._has_arrived = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._holding:
            self._has_arrived, self._arrived = True, frame
        else:
            self._handler(number, frame)

    def release(self) -> None:
        """Give the signal back to its handler, and run that if the signal came meanwhile."""
        self._holding = False
        signal.signal(self._number, self._handler)
        if self._has_arrived:
            self._has_arrived = False
            self._handler(self._number, self._arrived)


def _release(held: list[_Held]) -> None:
    """Release all, also when the handler of one raises."""
    if held:
        try:
            held[-1].release()
        finally:
            _release(held[:-1])
