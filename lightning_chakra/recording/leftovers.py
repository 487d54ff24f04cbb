"""What killed processes left in their scratch folders, in words."""

import os

from lightning_chakra.recording.scratch import windows
from lightning_chakra.recording.writer import check_complete


def describe_leftover(folder: str) -> str:
    """The raw files in a scratch folder, and which of them are complete."""
    found = []
    for window in windows(folder):
        for file in window.files:
            state = format_size(os.path.getsize(file.path))
            try:
                check_complete(file)
            except (ValueError, OSError):
                state += ", not complete"
            found.append(f"{os.path.relpath(file.path, folder)} ({state})")
    return ", ".join(found) or "no raw files"


def format_size(size: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
