"""Where traces lie: the folders and names below ``dirpath``. Pure."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kineto", "chakra"]

FOLDERS: dict[Kind, str] = {"kineto": "pytorch_profile", "chakra": "chakra"}
"""The folder of each kind of trace."""

_OCCUPIED = re.compile(r"pytorch_profile|chakra|step-\d{8,}")


@dataclass(frozen=True)
class PublishedTrace:
    """One complete trace file under its final name.

    Attributes:
        kind: ``"kineto"`` or ``"chakra"`` (the execution trace).
        first_step: Number of the first recorded step, as in its ``ProfilerStep#N`` mark.
        last_step: Number of the last recorded step.
        path: Local path or fsspec URL.
        bytes: Size of the file.
        partial: Whether the window was cut short.
    """

    kind: Kind
    first_step: int
    last_step: int
    path: str
    bytes: int
    partial: bool = False


@dataclass(frozen=True)
class RawTrace:
    """One uncompressed scratch file and the final name it is meant for."""

    kind: Kind
    path: str
    target: str


@dataclass(frozen=True)
class RawWindow:
    """What one rank recorded in one window, not yet published.

    Attributes:
        first_step: Number of the first recorded step.
        last_step: Number of the last recorded step.
        partial: Whether the window was cut short.
        folder: The scratch folder that holds the raw files and nothing else.
        files: One raw file per kind.
    """

    first_step: int
    last_step: int
    partial: bool
    folder: str
    files: tuple[RawTrace, ...]


def is_url(path: str) -> bool:
    """Whether ``path`` is an fsspec URL rather than a local path."""
    return "://" in path


def is_utf8(path: str) -> bool:
    """Whether ``path`` is text; torch refuses any other name of a file that it shall write."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def join(root: str, *parts: str) -> str:
    """Join path parts below a local path or a URL."""
    if is_url(root):
        return root + ("" if root.endswith("/") else "/") + "/".join(parts)
    return os.path.join(root, *parts)


@dataclass(frozen=True)
class TraceLayout:
    """The final names of one run's traces.

    Args:
        root: The folder of this run, a local path or an fsspec URL.
        folder_per_window: Whether each window has a folder of its own, named by its first step.
    """

    root: str
    folder_per_window: bool

    def path(self, kind: Kind, rank: int, first_step: int) -> str:
        """The final name of the trace of ``rank`` for the window that begins with ``first_step``."""
        window = (window_folder(first_step),) if self.folder_per_window else ()
        return join(self.root, *window, FOLDERS[kind], f"rank-{rank}.json.gz")


def window_folder(first_step: int) -> str:
    """The name of a window's folder."""
    return f"step-{first_step:08d}"


def is_occupied(entries: Iterable[str]) -> bool:
    """Whether the names in a folder show that an earlier run left traces there."""
    return any(_OCCUPIED.fullmatch(entry) for entry in entries)


def run_folder(dirpath: str, index: int) -> str:
    """The folder of the ``index``-th run in ``dirpath``: ``dirpath`` itself, then ``run-1``, ``run-2``, ..."""
    return dirpath if index == 0 else join(dirpath, f"run-{index}")
