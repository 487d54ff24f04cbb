"""Background gzip, verification and publication of raw traces. Knows neither torch nor lightning."""

import contextlib
import gzip
import os
import shutil
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import IO, Any

from lightning_chakra.recording import storage
from lightning_chakra.recording.layout import Kind, PublishedTrace, RawTrace, RawWindow
from lightning_chakra.recording.mend import Mender
from lightning_chakra.recording.nesting import true_parents

PIECE = 1 << 20
"""Bytes handed to the compressor at a time: it gives up the GIL for each piece."""

# The last thing torch writes into each kind of raw file.
_LAST_KEY: dict[Kind, bytes] = {"kineto": b'"traceName"', "chakra": b'"finish_ts"'}
_TAIL = 8192


class PublishError(Exception):
    """A raw file could not be published.

    Attributes:
        window: The window it belongs to.
        raw: The raw file, kept where it exists.
        reason: What went wrong.
    """

    def __init__(self, window: RawWindow, raw: RawTrace, reason: str) -> None:
        super().__init__(f"{raw.target}: {reason}")
        self.window = window
        self.raw = raw
        self.reason = reason


class TraceWriter:
    """Publishes raw windows in one background thread, in the order in which they were submitted.

    Args:
        on_published: Called from the thread with each file that is complete under its final name.
    """

    def __init__(self, on_published: Callable[[PublishedTrace], None]) -> None:
        self._on_published = on_published
        self._executor: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._errors: list[PublishError] = []
        self._lock = threading.Lock()
        self._todo = 0
        self._done = 0

    def submit(self, window: RawWindow) -> None:
        """Take over the raw files of ``window``; they vanish once published. Returns at once."""
        with contextlib.suppress(OSError):
            self._todo += sum(os.path.getsize(file.path) for file in window.files)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="lightning-chakra-writer")
        try:
            self._pending.append(self._executor.submit(self._publish_window, window))
        except RuntimeError:  # the interpreter is shutting down and takes no more work
            self._publish_window(window)

    @property
    def backlog(self) -> int:
        """Number of windows that are not published yet."""
        self._pending = [future for future in self._pending if not future.done()]
        return len(self._pending)

    @property
    def progress(self) -> tuple[int, int]:
        """Raw bytes compressed so far and submitted in all."""
        return self._done, self._todo

    def join(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds for everything that was submitted; whether it is done."""
        return not wait(self._pending, timeout).not_done

    def close(self) -> None:
        """Wait for everything that was submitted and end the thread. The writer can be used again."""
        if self._executor is not None:
            self.join()
            self._executor.shutdown()
            self._executor = None
            self._pending = []

    def take_errors(self) -> list[PublishError]:
        """The errors since the last call. Each is told once."""
        with self._lock:
            errors, self._errors = self._errors, []
        return errors

    def _publish_window(self, window: RawWindow) -> None:
        mender = Mender()
        # The execution trace first: it has the names that Kineto could not write.
        order = sorted(window.files, key=lambda file: file.kind != "chakra")
        published = {file.kind: self._publish(window, file, mender) for file in order}
        for file in window.files:
            trace = published[file.kind]
            if trace is not None:
                self._on_published(trace)
        if all(published.values()):
            shutil.rmtree(window.folder, ignore_errors=True)

    def _publish(self, window: RawWindow, file: RawTrace, mender: Mender) -> PublishedTrace | None:
        try:
            check_complete(file)
            size = storage.publish(file.target, window.folder, lambda part: self._compress(file, part, mender))
            os.remove(file.path)
        except Exception as error:  # a thread has nobody above it: whatever it is, it is told by the owner
            with self._lock:
                self._errors.append(PublishError(window, file, describe_error(error)))
            return None
        return PublishedTrace(file.kind, window.first_step, window.last_step, file.target, size, window.partial)

    def _compress(self, raw: RawTrace, destination: str, mender: Mender) -> None:
        expected = 0
        if raw.kind == "chakra":
            mender.reparent(true_parents(raw.path))
        with (
            open(raw.path, "rb", buffering=0) as source,
            open(destination, "xb") as sink,
            _open_gzip(sink) as compressed,
        ):
            for part, consumed in mender.read(source, raw.kind, PIECE):
                compressed.write(part)
                expected += len(part)
                self._done += consumed
        with open(destination, "rb") as written:
            written.seek(-4, os.SEEK_END)
            (length,) = struct.unpack("<I", written.read(4))
        if length != expected % (1 << 32):
            raise OSError(f"the compressed file holds {length} of {expected} bytes (modulo 2^32)")


def check_complete(file: RawTrace) -> None:
    """Look at the last bytes of a raw file.

    torch reports neither a full disk nor a missing folder: a file that is missing, empty or cut is the only sign.

    Raises:
        ValueError: The file is missing or not complete, with the reason.
    """
    try:
        with open(file.path, "rb", buffering=0) as raw:
            size = raw.seek(0, os.SEEK_END)
            raw.seek(max(0, size - _TAIL))
            tail = raw.read(_TAIL).rstrip()
    except FileNotFoundError:
        raise ValueError(f"torch wrote no file {file.path} (is the disk full, or the folder gone?)") from None
    if not tail.endswith(b"}") or _LAST_KEY[file.kind] not in tail:
        raise ValueError(f"torch wrote only part of {file.path}, {size} bytes (is the disk full?)")


def describe_error(error: BaseException) -> str:
    """An error in one line that names its kind unless its text does."""
    text = str(error).strip().splitlines()
    if isinstance(error, (OSError, ValueError)) and text:
        return text[0]
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _open_gzip(sink: IO[bytes]) -> Any:
    try:
        # isal level 2 takes a tenth of the time of the standard library's level 6; benchmarks/flush has the figures
        from isal import igzip
    except ImportError:
        return gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=sink, mtime=0)
    return igzip.IGzipFile(  # type: ignore[no-untyped-call]  # its base class is typed, its constructor is not
        filename="", mode="wb", compresslevel=2, fileobj=sink, mtime=0
    )
