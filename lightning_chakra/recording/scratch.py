"""The scratch folder: where raw files live until they are published, and how a later process recognises them.

```
<scratch_dir>/lightning-chakra-rank0-k3x9/
    owner.json                              who made it
    step-00000020/window.json               which raw file is meant for which final name
    step-00000020/pytorch_profile/rank-0.json
    step-00000020/chakra/rank-0.json
```
"""

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from typing import Any

from lightning_chakra.recording.layout import FOLDERS, Kind, RawTrace, RawWindow, TraceLayout, is_utf8, window_folder

_PREFIX = "lightning-chakra-"


class Scratch:
    """One rank's scratch folder for one fit. The folder appears with the first window and vanishes with the last.

    Args:
        parent: The folder to make it in; ``None``: the system's temporary folder.
        rank: Global rank.
        layout: Where the files will be published.
        kinds: The kinds of trace that are collected.
    """

    def __init__(self, parent: str | None, rank: int, layout: TraceLayout, kinds: tuple[Kind, ...]) -> None:
        self._parent = parent
        self._rank = rank
        self._layout = layout
        self._kinds = kinds
        self._folder: str | None = None

    def open_window(self, first_step: int) -> RawWindow:
        """Make the folders of a window and note there what they are for.

        Raises:
            OSError: The folders could not be made. Nothing of them is left.
        """
        try:
            return self._open_window(first_step)
        except OSError as error:
            if self._folder is not None:
                shutil.rmtree(os.path.join(self._folder, window_folder(first_step)), ignore_errors=True)
                self.close()
            if error.filename is None:  # a full disk is reported without a name
                raise OSError(error.errno, error.strerror, self.where()) from error
            raise

    def _open_window(self, first_step: int) -> RawWindow:
        if not is_utf8(self.where()):
            reason = "torch can write no file below a folder whose name is not UTF-8; set `scratch_dir` or TMPDIR"
            raise OSError(errno.EILSEQ, reason, self.where())
        if self._folder is None:
            if self._parent is not None:
                os.makedirs(self._parent, exist_ok=True)
            self._folder = tempfile.mkdtemp(prefix=f"{_PREFIX}rank{self._rank}-", dir=self._parent)
            owner = {
                "format": 1,
                "pid": os.getpid(),
                "started": _start_time(os.getpid()),
                "host_name": socket.gethostname(),
                "rank": self._rank,
            }
            _write_json(os.path.join(self._folder, "owner.json"), owner)
        folder = os.path.join(self._folder, window_folder(first_step))
        files = tuple(
            RawTrace(
                kind,
                os.path.join(folder, FOLDERS[kind], f"rank-{self._rank}.json"),
                self._layout.path(kind, self._rank, first_step),
            )
            for kind in self._kinds
        )
        for file in files:
            os.makedirs(os.path.dirname(file.path), exist_ok=True)
        window = RawWindow(first_step, first_step, True, folder, files)
        describe_window(window)
        return window

    def free_bytes(self) -> int:
        """Free space where raw files go, in bytes."""
        folder = os.path.abspath(self.where())
        while not os.path.exists(folder):  # it appears with the first window
            folder = os.path.dirname(folder)
        return shutil.disk_usage(folder).free

    def where(self) -> str:
        """The folder that raw files go to, for messages."""
        return self._parent or tempfile.gettempdir()

    def close(self) -> None:
        """Remove the folder, unless a window that was not published is still in it."""
        if self._folder is None:
            return
        with contextlib.suppress(OSError):
            if set(os.listdir(self._folder)) <= {"owner.json"}:
                shutil.rmtree(self._folder)
        self._folder = None


def describe_window(window: RawWindow) -> None:
    """Write ``window.json``, from which :func:`read_window` makes the same :class:`RawWindow`."""
    files = [{**dataclasses.asdict(f), "path": os.path.relpath(f.path, window.folder)} for f in window.files]
    content = {
        "format": 1,
        "first_step": window.first_step,
        "last_step": window.last_step,
        "partial": window.partial,
        "files": files,
    }
    _write_json(os.path.join(window.folder, "window.json"), content)


def read_window(folder: str) -> RawWindow:
    """Read what a window's folder in the scratch folder is for.

    Raises:
        OSError: There is no readable ``window.json``.
        ValueError: It is not one of ours.
    """
    with open(os.path.join(folder, "window.json"), encoding="utf-8") as file:
        content = json.load(file)
    if content.get("format") != 1:
        raise ValueError(f"{folder}: window.json has format {content.get('format')!r}, this version reads format 1.")
    files = tuple(RawTrace(f["kind"], os.path.join(folder, f["path"]), f["target"]) for f in content["files"])
    return RawWindow(content["first_step"], content["last_step"], content["partial"], folder, files)


def leftovers(parent: str | None) -> Iterator[str]:
    """Scratch folders in ``parent`` whose process on this host is gone, with raw files that were never published."""
    root = parent or tempfile.gettempdir()
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(root)):
            folder = os.path.join(root, name)
            if name.startswith(_PREFIX) and is_abandoned(folder) and holds_raw_files(folder):
                yield folder


def holds_raw_files(folder: str) -> bool:
    """Whether there is more in a scratch folder, or in a window of one, than the descriptions of both."""
    return any(name not in ("owner.json", "window.json") for _, _, names in os.walk(folder) for name in names)


def owner_rank(folder: str) -> int:
    """The global rank that made a scratch folder; 0 if it does not say."""
    try:
        return int(_read_owner(folder)["rank"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def windows(folder: str) -> list[RawWindow]:
    """The windows in a scratch folder that have raw files, each with those that it has."""
    found = []
    for name in sorted(os.listdir(folder)):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            window = read_window(os.path.join(folder, name))
            files = tuple(file for file in window.files if os.path.isfile(file.path))
            if files:
                found.append(dataclasses.replace(window, files=files))
    return found


def is_abandoned(folder: str) -> bool:
    """Whether this is a scratch folder whose process on this host is gone."""
    try:
        owner = _read_owner(folder)
        here = owner["host_name"] == socket.gethostname()
        return here and not _is_alive(int(owner["pid"]), owner.get("started"))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def is_ours(folder: str) -> bool:
    """Whether a scratch folder belongs to the user of this process."""
    if not hasattr(os, "getuid"):  # Windows: the temporary folder is the user's own
        return True
    with contextlib.suppress(OSError):
        return os.stat(folder).st_uid == os.getuid()
    return False


def _read_owner(folder: str) -> dict[str, Any]:
    with open(os.path.join(folder, "owner.json"), encoding="utf-8") as file:
        owner = json.load(file)
    if not isinstance(owner, dict):
        raise ValueError(f"{folder}: owner.json holds no object")
    return owner


def _is_alive(pid: int, started: str | None) -> bool:
    """Whether the process that was given ``pid`` at the time ``started`` still runs.

    The number alone proves little: in a container the next run often gets the same one, and a killed process keeps its
    number for as long as its parent does not ask how it ended.
    """
    if os.name != "posix":  # os.kill(pid, 0) ends the process on Windows
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    now = _start_time(pid)
    return started is None or now is None or now == started


def _start_time(pid: int) -> str | None:
    """When ``pid`` started, as boot and clock ticks since; "ended" for a zombie, ``None`` where that is not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        with open(f"/proc/{pid}/stat", "rb") as status:
            fields = status.read().rpartition(b")")[2].split()  # the name before it may contain anything
        return "ended" if fields[0] in (b"Z", b"X") else f"{boot} {int(fields[19])}"
    except (OSError, ValueError, IndexError):
        return None


def _write_json(path: str, content: object) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
