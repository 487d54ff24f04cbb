"""Putting a complete file under its final name, on a local file system or behind an fsspec URL."""

import contextlib
import errno
import os
import uuid
from collections.abc import Callable
from typing import Any

from lightning_chakra.recording.layout import is_url

# A rename on these is a copy and a delete; an upload there appears whole or not at all, so nothing has to be renamed.
_OBJECT_STORES = {"abfs", "abfss", "adl", "az", "gcs", "gs", "memory", "oci", "oss", "s3", "s3a"}

_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES}


def absolute(path: str) -> str:
    """``path`` independent of the working directory; a ``file://`` URL becomes the local path it means."""
    if path.startswith("file://"):
        path = path[len("file://") :]
    return path if is_url(path) else os.path.abspath(os.path.expanduser(path))


class FolderError(ValueError):
    """An output folder that nothing could be written to."""


def check(path: str) -> None:
    """Find out whether ``path`` can be a place to write to, without touching it.

    Raises:
        FolderError: It is a URL of an unknown protocol, or the package for its protocol is not installed.
    """
    if not is_url(path):
        return
    try:
        import fsspec

        fsspec.get_filesystem_class(path.split("://", 1)[0])
    except (ImportError, ValueError) as error:  # fsspec names the package to install
        raise FolderError(f"cannot write to {path}: {error}") from error


def entries(folder: str) -> list[str]:
    """The names in ``folder``; none if it does not exist."""
    if is_url(folder):
        fs, path = _filesystem(folder)
        fs.invalidate_cache()  # another process may have written since
        if not fs.exists(path):
            return []
        return [str(name).rstrip("/").rsplit("/", 1)[-1] for name in fs.ls(path, detail=False)]
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.listdir(folder)
    return []


def publish(target: str, scratch_folder: str, produce: Callable[[str], None]) -> int:
    """Let ``produce`` write a file and put it under ``target``, complete or not at all.

    Args:
        target: The final name, a local path or an fsspec URL.
        scratch_folder: Where the file is made when ``target`` is a URL; a local one is made beside its final name.
        produce: Writes the whole file to the path it is given.

    Returns:
        Size of the published file in bytes.

    Raises:
        FileExistsError: ``target`` exists. It is left as it is.
        OSError: The file could not be written or moved. Nothing is left behind.
    """
    if is_url(target):
        return _upload(target, scratch_folder, produce)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    # Not ".json" or ".gz" at the end: readers such as HolisticTraceAnalysis open every such file of the folder.
    # Not by process id: in a container the next run often has the same one, and this one may have been killed here.
    part = f"{target}.{uuid.uuid4().hex[:8]}.part"
    try:
        produce(part)
        size = _sync(part)
        _rename_new(part, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(part)
    return size


def _sync(path: str) -> int:
    """Force ``path`` to the disk, so that a machine that stops cannot leave an empty file under the final name."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if os.name == "posix":
            os.fsync(fd)
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def _rename_new(part: str, target: str) -> None:
    """Rename without overwriting: a hard link fails where ``os.replace`` would silently win."""
    try:
        os.link(part, target)
    except FileExistsError:
        raise FileExistsError(errno.EEXIST, "exists already and is not overwritten", target) from None
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_HARD_LINKS:
            raise
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "exists already and is not overwritten", target) from None
        os.replace(part, target)


def _upload(target: str, scratch_folder: str, produce: Callable[[str], None]) -> int:
    part = os.path.join(scratch_folder, f"upload-{os.getpid()}.part")
    try:
        produce(part)
        size = os.path.getsize(part)
        fs, path = _filesystem(target)
        if fs.exists(path):
            raise FileExistsError(errno.EEXIST, "exists already and is not overwritten", target)
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        if protocols & _OBJECT_STORES:
            fs.put_file(part, path)
        else:
            fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            fs.put_file(part, path + ".part")
            fs.mv(path + ".part", path)
        fs.invalidate_cache()
        arrived = fs.info(path)["size"]
        if arrived != size:
            fs.rm_file(path)
            raise OSError(errno.EIO, f"only {arrived} of {size} bytes arrived", target)
        return size
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(part)


def _filesystem(url: str) -> tuple[Any, str]:
    import fsspec  # only needed for URLs

    fs, path = fsspec.core.url_to_fs(url)
    return fs, str(path)
