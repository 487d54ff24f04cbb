"""Holding signals back while the profiler is in a state that an exception must not interrupt."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def deferred_signals(*numbers: signal.Signals) -> Iterator[None]:
    """Run the Python handlers of signals, SIGINT and SIGTERM unless named, after the block and not in the middle of it.

    A ``KeyboardInterrupt`` between two calls into torch's profiler would leave it half stopped, and stopping it again
    is a segmentation fault. Signals without a Python handler, and blocks outside the main thread, are left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    handlers = {}
    for number in numbers or (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if callable(handler):
            handlers[number] = handler
            signal.signal(number, lambda caught, frame: arrived.append((caught, frame)))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for caught, frame in dict(arrived).items():
            handlers[signal.Signals(caught)](caught, frame)
