"""Where a command puts its result: complete or not at all, and never over a file unless told to."""

import contextlib
import os
from collections.abc import Callable

from lightning_chakra.recording import storage
from lightning_chakra.recording.layout import is_url
from lightning_chakra.traces.errors import CaptureError, ResultError


def check_target(target: str, shown: str, *, overwrite: bool) -> None:
    """Refuse a target that exists, before the work rather than after it.

    Args:
        target: Absolute path or fsspec URL.
        shown: What the user called it.
        overwrite: Whether the user allows to replace it.

    Raises:
        CaptureError: It exists, or it is a URL that should be overwritten.
    """
    if overwrite and is_url(target):
        raise CaptureError("--overwrite is for local files: a store shows half of a file that is being replaced")
    folder, _, name = target.replace(os.sep, "/").rpartition("/")
    if name in storage.entries(folder or "/") and not overwrite:
        raise CaptureError(f"{shown} exists and is not overwritten; say --overwrite to replace it")


def publish(target: str, scratch: str, produce: Callable[[str], None], *, overwrite: bool) -> int:
    """Let ``produce`` write a file and put it under ``target``; its size in bytes.

    Args:
        target: Absolute path or fsspec URL.
        scratch: A folder for the file if ``target`` is a URL; a local one is made beside its final name.
        produce: Writes the whole file to the path it is given.
        overwrite: Whether a local file of that name is replaced.

    Raises:
        ResultError: The file could not be written. Nothing is left behind.
    """
    new = f"{target}.{os.getpid()}.new"
    try:
        if not overwrite or not os.path.lexists(target):
            return storage.publish(target, scratch, produce)
        try:
            size = storage.publish(new, scratch, produce)
            os.replace(new, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(new)
        return size
    except OSError as error:
        raise ResultError(f"cannot write {target}: {error}") from error
