"""Publishing what a killed process left in its scratch folder."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from lightning_chakra.recording import storage
from lightning_chakra.recording.layout import FOLDERS, PublishedTrace, RawTrace, RawWindow, is_url, join
from lightning_chakra.recording.leftovers import describe_leftover
from lightning_chakra.recording.scratch import holds_raw_files, is_abandoned, is_ours, owner_rank, read_window
from lightning_chakra.recording.writer import TraceWriter, check_complete, describe_error
from lightning_chakra.traces.errors import CaptureError
from lightning_chakra.traces.reading import PIECE, open_trace
from lightning_chakra.transform.mending import mend_execution_trace

_STEP = re.compile(r"step-\d{8,}")


@dataclass(frozen=True)
class Outcome:
    """What became of one raw file.

    Attributes:
        status: ``"recovered"``, ``"published"`` (the dead process had done so itself), ``"kept"`` (it could not be
            published there; the raw file is as it was) or ``"lost"`` (nothing can recover it).
        target: The final name.
        bytes: Size under the final name; ``None`` if it is not there.
        partial: Whether the trace was mended and lacks the end of its window.
        note: What there is to say about it.
    """

    status: Literal["recovered", "published", "kept", "lost"]
    target: str
    bytes: int | None = None
    partial: bool = False
    note: str = ""


@dataclass(frozen=True)
class _Found:
    """A window's folder, and the number of the process that made it."""

    folder: str
    pid: int | None


@dataclass(frozen=True)
class Leftover:
    """A scratch folder of a dead process.

    Attributes:
        folder: The scratch folder.
        rank: The global rank that made it.
        ours: Whether it belongs to the user who asks.
        holds: Its raw files, their sizes and which are not complete.
    """

    folder: str
    rank: int
    ours: bool
    holds: str


def list_leftovers(path: str) -> list[Leftover]:
    """What :func:`recover` would take up, of all users; nothing is touched.

    Raises:
        CaptureError: There is no such folder.
    """
    root = _folder(path)
    folders = filter(is_abandoned, [root]) if _is_scratch(root) else _dead(root)
    return [Leftover(folder, owner_rank(folder), is_ours(folder), describe_leftover(folder)) for folder in folders]


def left_to_others(path: str) -> list[str]:
    """The scratch folders of other users that :func:`recover` leaves alone.

    Raises:
        CaptureError: There is no such folder.
    """
    root = _folder(path)
    return [] if _is_scratch(root) else [folder for folder in _dead(root) if not is_ours(folder)]


def recover(
    path: str,
    *,
    dirpath: str | None = None,
    force: bool = False,
    discard: bool = False,
    all_users: bool = False,
) -> list[Outcome]:
    """Publish what is complete of what dead processes left.

    Args:
        path: A scratch folder, the folder it lies in, or a window in it.
        dirpath: Publish below this folder or URL instead of where it was meant.
        force: Take the owners for dead.
        discard: Remove what cannot be recovered.
        all_users: Take up the folders of other users, too, where ``path`` holds many.

    Raises:
        CaptureError: There is no such folder, or it belongs to a process that runs.
    """
    found = list(_find(path, force=force, all_users=all_users))
    return [outcome for window in found for outcome in _recover(window, dirpath, discard=discard)]


def _folder(path: str) -> str:
    root = os.path.abspath(os.path.expanduser(path))
    if not os.path.isdir(root):
        raise CaptureError(
            f"{path} is a file: name a scratch folder (lightning-chakra-*), or the folder it lies in"
            if os.path.exists(root)
            else f"no such folder: {path}"
        )
    return root


def _find(path: str, *, force: bool, all_users: bool) -> Iterator[_Found]:
    root = _folder(path)
    if os.path.isfile(os.path.join(root, "window.json")):
        scratch = os.path.dirname(root)
        if os.path.isfile(os.path.join(scratch, "owner.json")):
            _refuse_the_living(scratch, force=force)
        yield _Found(root, _owner(scratch).get("pid"))
    elif _is_scratch(root):
        _refuse_the_living(root, force=force)
        yield from _windows(root)
    else:
        for scratch in _dead(root, force=force):
            if all_users or is_ours(scratch):
                yield from _windows(scratch)
                _remove_empty(scratch)


def _is_scratch(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, "owner.json"))


def _dead(root: str, *, force: bool = False) -> Iterator[str]:
    """The scratch folders in a folder whose processes are gone, or are taken for it."""
    for name in sorted(os.listdir(root)):
        folder = os.path.join(root, name)
        if is_abandoned(folder) or (force and _is_scratch(folder)):
            yield folder


def _windows(scratch: str) -> Iterator[_Found]:
    pid = _owner(scratch).get("pid")
    for name in sorted(filter(_STEP.fullmatch, os.listdir(scratch))):
        yield _Found(os.path.join(scratch, name), pid)


def _owner(scratch: str) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError), open(os.path.join(scratch, "owner.json"), encoding="utf-8") as file:
        owner = json.load(file)
        return owner if isinstance(owner, dict) else {}
    return {}


def _refuse_the_living(scratch: str, *, force: bool) -> None:
    if force or is_abandoned(scratch) or not any(map(_STEP.fullmatch, os.listdir(scratch))):
        return
    owner = _owner(scratch)
    raise CaptureError(
        f"{scratch} belongs to process {owner.get('pid')} on {owner.get('host_name')}, which runs or cannot be seen "
        "from here; if it is gone, say --force"
    )


def _recover(found: _Found, dirpath: str | None, *, discard: bool) -> list[Outcome]:
    """Publish the files of one window, and remove its folder unless something of worth stays in it."""
    try:
        window = read_window(found.folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if not holds_raw_files(found.folder):  # the process died when it began the window
            shutil.rmtree(found.folder, ignore_errors=True)
            _remove_empty(os.path.dirname(found.folder))
            return []
        return [Outcome("lost", found.folder, note=f"what it was meant for is not readable: {error}")]
    if dirpath is not None:
        files = tuple(dataclasses.replace(f, target=_below(dirpath, f.target)) for f in window.files)
        window = dataclasses.replace(window, files=files)
    outcomes = []
    for file in window.files:
        try:
            outcomes.append(_recover_file(window, file, found.pid))
        except Exception as error:  # fsspec: whatever its backend raises; the other file may still be recovered
            outcomes.append(Outcome("kept", file.target, note=f"{describe_error(error)}; the raw file is {file.path}"))
    statuses = {file: outcome.status for file, outcome in zip(window.files, outcomes, strict=True)}
    lost = [file for file, status in statuses.items() if status == "lost"]
    rest = [path for file in lost for path in (file.path, f"{file.path}.tmp") if os.path.exists(path)]
    if "kept" not in statuses.values() and (discard or not rest):
        shutil.rmtree(found.folder, ignore_errors=True)
        _remove_empty(os.path.dirname(found.folder))
    return outcomes


def _recover_file(window: RawWindow, file: RawTrace, pid: int | None) -> Outcome:
    _remove_part(file.target, pid)
    size = _size(file.target)
    if not os.path.exists(file.path):
        if size is not None:
            return Outcome("published", file.target, size)
        return Outcome("lost", file.target, note=_why_missing(file))
    if size is not None:
        if _same(file):
            os.remove(file.path)
            return Outcome("published", file.target, size)
        note = f"another trace has that name, say --dirpath to publish elsewhere; the raw file is {file.path}"
        return Outcome("kept", file.target, size, note=note)
    with tempfile.TemporaryDirectory(dir=window.folder) as workshop:
        return _publish(dataclasses.replace(window, folder=workshop, files=(file,)), file, workshop)


def _publish(window: RawWindow, file: RawTrace, workshop: str) -> Outcome:
    note, partial, raw = "", False, file
    try:
        check_complete(file)
    except ValueError:
        if file.kind == "kineto":
            return Outcome("lost", file.target, note=_why_cut(file.path))
        raw = dataclasses.replace(file, path=os.path.join(workshop, os.path.basename(file.path)))
        try:
            mended = mend_execution_trace(file.path, raw.path)
        except (ValueError, OSError) as error:
            return Outcome("lost", file.target, note=f"{file.path}: {error}")
        partial = True
        note = f"mended: {mended.nodes} nodes kept, {mended.unfinished} operators were running"
    published: list[PublishedTrace] = []
    writer = TraceWriter(published.append)
    writer.submit(dataclasses.replace(window, partial=partial or window.partial, files=(raw,)))
    writer.close()
    if errors := writer.take_errors():
        return Outcome("kept", file.target, note=f"{errors[0].reason}; the raw file is {file.path}")
    with contextlib.suppress(FileNotFoundError):
        os.remove(file.path)
    return Outcome("recovered", file.target, published[0].bytes, partial, note)


def _why_missing(file: RawTrace) -> str:
    if os.path.exists(f"{file.path}.tmp"):
        return _why_cut(f"{file.path}.tmp")
    if file.kind == "kineto":
        return "the process ended before torch wrote it; until then it is only in the memory of the process"
    return f"there is no raw file {file.path}"


def _why_cut(path: str) -> str:
    return (
        f"{path} was cut while torch wrote it, operators first and kernels last: whole kinds of events are missing, "
        "which cannot be mended"
    )


def _below(dirpath: str, target: str) -> str:
    """The final name in the same layout below another folder."""
    parts = target.replace(os.sep, "/").split("/")
    assert parts[-2] in FOLDERS.values()
    return join(storage.absolute(dirpath), *parts[-3 if len(parts) > 2 and _STEP.fullmatch(parts[-3]) else -2 :])


def _size(target: str) -> int | None:
    """Size of the file in bytes; ``None`` if it does not exist."""
    if is_url(target):
        import fsspec  # only needed for URLs

        fs, path = fsspec.core.url_to_fs(target)
        return int(fs.info(path)["size"]) if fs.exists(path) else None
    try:
        return os.path.getsize(target)
    except FileNotFoundError:
        return None


def _same(file: RawTrace) -> bool:
    """Whether the published file holds what is in the raw one: the process was killed just before it removed that."""
    try:
        with open(file.path, "rb") as raw, open_trace(file.target) as published:
            while True:
                piece = raw.read(PIECE)
                if _read_exactly(published, len(piece) or 1) != piece:
                    return False
                if not piece:
                    return True
    except Exception:  # not whole gzip, not readable: whatever it is, it is not the same
        return False


def _read_exactly(stream: Any, length: int) -> bytes:
    read = b""
    while len(read) < length and (piece := stream.read(length - len(read))):
        read += piece
    return read


def _remove_part(target: str, pid: int | None) -> None:
    """Remove the half-written file of the dead process beside the final name."""
    if pid is not None and not is_url(target):
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"{target}.{pid}.part")


def _remove_empty(scratch: str) -> None:
    with contextlib.suppress(OSError):
        if os.listdir(scratch) == ["owner.json"]:
            shutil.rmtree(scratch)
