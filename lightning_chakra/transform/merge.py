"""One timeline of all ranks: which traces, on which clock, into which file."""

import contextlib
import gzip
import importlib
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, cast

from lightning_chakra.recording import storage
from lightning_chakra.recording.layout import FOLDERS
from lightning_chakra.traces.captures import Capture, TraceFile, find_captures
from lightning_chakra.traces.clocks import Alignment, Method, RankTimes, align
from lightning_chakra.traces.errors import CaptureError, ResultError
from lightning_chakra.traces.jobs import map_ranks
from lightning_chakra.traces.selection import wanted_ranks
from lightning_chakra.transform.output import check_target, publish
from lightning_chakra.transform.timeline import Scan, scan_trace, write_timeline


@dataclass(frozen=True)
class Merged:
    """A timeline that was written.

    Attributes:
        output: The file.
        bytes: Its size.
        ranks: The ranks in it.
        alignment: How their clocks were brought together.
        overlapping_slices: Slices that run at the same time as others of their thread; they have rows of their own.
        incomplete_slices: Slices without duration, process or thread.
    """

    output: str
    bytes: int
    ranks: tuple[int, ...]
    alignment: Alignment
    overlapping_slices: int
    incomplete_slices: int


def merge(
    path: str, output: str, *, ranks: str = "", method: Method = "auto", overwrite: bool = False, jobs: int = 0
) -> Merged:
    """Write one timeline of the ranks of a capture.

    Args:
        path: Folder with traces, a local path or an fsspec URL.
        output: ``*.json.gz``, a local path or an fsspec URL.
        ranks: Which ranks, as ``profile_ranks``; empty means all.
        method: What brings the clocks together; see :func:`lightning_chakra.traces.clocks.align`.
        overwrite: Whether a local ``output`` that exists is replaced.
        jobs: Processes at a time; 0: one per CPU, at most 8.

    Raises:
        CaptureError: There is nothing to merge, or nowhere to write to.
        ResultError: A trace cannot be read, or the timeline cannot be written. Nothing is left behind.
    """
    captures = find_captures(path)
    files = _choose(captures, ranks)
    target = _check_output(output, captures, overwrite=overwrite)
    scans = map_ranks(scan_trace, files, jobs)
    _refuse_twins(files, scans)
    alignment = _align(scans, method)

    def produce(part: str) -> None:
        with open(part, "xb") as sink, _gzip(sink) as stream:
            write_timeline(stream, [file for _, file in files], scans, alignment)

    with tempfile.TemporaryDirectory(prefix="lightning-chakra-merge-") as scratch:
        size = publish(target, scratch, produce, overwrite=overwrite)
    return Merged(
        target,
        size,
        tuple(sorted({scan.rank for scan in scans})),
        alignment,
        sum(1 for scan in scans for fix in scan.fixes.values() if fix.lane),
        sum(scan.incomplete for scan in scans),
    )


_RUN = re.compile(r"run-\d+(/|$)")


def _choose(captures: Sequence[Capture], ranks: str) -> list[tuple[str, TraceFile]]:
    """The Kineto traces to merge with their windows' names, by rank."""
    runs = sorted({re.sub(r"(^|/)step-\d+$", "", c.name) or "." for c in captures})
    if len(runs) > 1:
        beside = [FOLDERS["kineto"] if c.name == "." else c.name for c in captures if not _RUN.match(c.name)]
        names = ", ".join(beside + [run for run in runs if run != "."])
        raise CaptureError(f"these are several runs, each with a timeline of its own: name one of the folders {names}")
    files = [(c.name, f) for c in captures for f in c.kineto]
    if not files:
        raise CaptureError("there are no Kineto traces here; merge draws these, not execution traces")
    wanted = wanted_ranks(ranks, {f.rank for _, f in files if f.rank is not None})
    if not ranks.strip():
        return sorted(files, key=lambda item: (item[1].rank is None, item[1].rank or 0))
    return sorted((item for item in files if item[1].rank in wanted), key=lambda item: item[1].rank or 0)


def _check_output(path: str, captures: Sequence[Capture], *, overwrite: bool) -> str:
    """The absolute output path; refuse before the work rather than after it."""
    output = storage.absolute(path)
    folder, _, name = output.replace(os.sep, "/").rpartition("/")
    if not name.endswith(".json.gz"):
        raise CaptureError(f"--output {path}: the name has to end in .json.gz")
    if any(folder == f"{c.root.rstrip('/')}/{kind}" for c in captures for kind in FOLDERS.values()) or any(
        c.foreign and folder == c.root.rstrip("/") for c in captures
    ):
        raise CaptureError(f"--output {path}: readers would take the timeline for a trace of one more rank there")
    check_target(output, f"--output {path}", overwrite=overwrite)
    return output


def _refuse_twins(files: Sequence[tuple[str, TraceFile]], scans: Sequence[Scan]) -> None:
    """Two traces of one rank and window cannot be told apart in the timeline: one of them is foreign."""
    seen: dict[tuple[str, int], TraceFile] = {}
    for (window, file), scan in zip(files, scans, strict=True):
        if (twin := seen.setdefault((window, scan.rank), file)) is not file:
            raise ResultError(f"{twin.name} and {file.name} both say that they are rank {scan.rank}")


def _align(scans: Sequence[Scan], method: Method) -> Alignment:
    by_rank: dict[int, RankTimes] = {}
    for scan in scans:
        known = by_rank.get(scan.rank, RankTimes(scan.rank, scan.host))
        by_rank[scan.rank] = RankTimes(
            scan.rank, known.host or scan.host, {**known.steps, **scan.steps}, {**known.collectives, **scan.collectives}
        )
    return align([by_rank[rank] for rank in sorted(by_rank)], method)


def _gzip(sink: IO[bytes]) -> IO[bytes]:
    with contextlib.suppress(ImportError):
        igzip = importlib.import_module("isal.igzip")
        return cast("IO[bytes]", igzip.IGzipFile(filename="", mode="wb", compresslevel=2, fileobj=sink, mtime=0))
    return cast("IO[bytes]", gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=sink, mtime=0))
