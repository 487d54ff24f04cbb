"""Holding signals back while the profiler is in a state that an exception must not interrupt."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_NUMBERS = tuple(signal.valid_signals())  # asked once: the answer takes longer than all the rest
_Handler = Callable[[int, FrameType | None], Any]


@contextlib.contextmanager
def deferred_signals(*, but: signal.Signals | None = None) -> Iterator[None]:
    """Run the Python handlers of signals, of all ``but`` one, after the block and not in the middle of it.

    A ``KeyboardInterrupt`` between two calls into torch's profiler would leave it half stopped, and stopping it again
    is a segmentation fault; a handler that enters a collective (Lightning's of SIGTERM, and of SIGUSR1 under SLURM)
    would meet nobody there while ranks export. Each signal that came is delivered once, in the order of their first
    arrival, when all handlers are back in place. Signals without a Python handler, and blocks outside the main thread,
    are left alone; so is a handler that was set inside the block.

    The exception of a handler leaves the ``with`` statement and replaces what its block was about to return.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[_Held] = []
    held: list[_Held] = []
    try:
        for number in _NUMBERS:
            handler = signal.getsignal(number)
            if callable(handler) and number != but:
                held.append(_Held(number, handler, arrived))
                signal.signal(number, held[-1])
        yield
    finally:
        try:
            _each([stand_in.restore for stand_in in reversed(held)])
        finally:
            _each([stand_in.deliver for stand_in in arrived])


class _Held:
    """Stands in for a handler, and is transparent once released.

    That makes one harmless that a second signal in just that moment keeps from being removed.
    """

    def __init__(self, number: int, handler: _Handler, arrived: "list[_Held]") -> None:
        self._number = number
        self._handler = handler
        self._arrived = arrived
        self._frame: FrameType | None = None
        self._holding = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self._holding:
            self._handler(number, frame)
        elif self not in self._arrived:
            self._frame = frame
            self._arrived.append(self)

    def restore(self) -> None:
        """Give the signal back to its handler, unless it has a new one."""
        self._holding = False
        current: object = signal.getsignal(self._number)
        if current is self:
            signal.signal(self._number, self._handler)

    def deliver(self) -> None:
        """Run the handler for the signal that came."""
        self._handler(self._number, self._frame)


def _each(calls: list[Callable[[], None]]) -> None:
    """Make all calls in order, also when one raises: a handler, or a signal that comes in between."""
    if calls:
        try:
            calls[0]()
        finally:
            _each(calls[1:])
