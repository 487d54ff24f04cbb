"""One timeline of all ranks for Perfetto.

Each rank gets named and sorted processes of its own, its flows keep to themselves, and the clocks of several hosts are
brought together. How well is printed: the spread of moments that the ranks share.
"""

import contextlib
import gzip
import importlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from typing import IO, cast

from jsonargparse import ArgumentParser, Namespace

from lightning_chakra import storage
from lightning_chakra.cli.captures import Capture, TraceFile, find_captures
from lightning_chakra.cli.clocks import Alignment, Method, RankTimes, align
from lightning_chakra.cli.errors import EXIT_OK, EXIT_WRONG, CommandError
from lightning_chakra.cli.jobs import add_jobs_argument, map_ranks
from lightning_chakra.cli.output import check_target, publish
from lightning_chakra.cli.selection import add_ranks_argument, wanted_ranks
from lightning_chakra.cli.timeline import Scan, scan_trace, write_timeline
from lightning_chakra.layout import FOLDERS
from lightning_chakra.ranks import format_ranks, named_ranks

SUMMARY = "one timeline of all ranks for Perfetto"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("path", metavar="DIR", help="folder with traces, a local path or an fsspec URL")
    parser.add_argument("--output", required=True, metavar="FILE.json.gz", help="the timeline, a local path or a URL")
    add_ranks_argument(parser)
    parser.add_argument(
        "--align",
        default="auto",
        choices=("auto", "clock", "collectives", "steps"),
        help="what brings the clocks together; auto: collectives between hosts, step starts where there are none",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace FILE.json.gz if it exists (local files only)")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    add_jobs_argument(parser)


def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    captures = find_captures(args.path)
    files = _choose(captures, args.ranks)
    output = _check_output(args.output, captures, overwrite=args.overwrite)
    scans = map_ranks(scan_trace, files, args.jobs)
    _refuse_twins(files, scans)
    alignment = _align(scans, args.align)

    def produce(part: str) -> None:
        with open(part, "xb") as sink, _gzip(sink) as stream:
            write_timeline(stream, [file for _, file in files], scans, alignment)

    with tempfile.TemporaryDirectory(prefix="lightning-chakra-merge-") as scratch:
        written = publish(output, scratch, produce, overwrite=args.overwrite)
    return _report(output, written, scans, alignment, as_json=args.json)


_RUN = re.compile(r"run-\d+(/|$)")


def _choose(captures: Sequence[Capture], ranks: str) -> list[tuple[str, TraceFile]]:
    """The Kineto traces to merge with their windows' names, by rank."""
    runs = sorted({re.sub(r"(^|/)step-\d+$", "", c.name) or "." for c in captures})
    if len(runs) > 1:
        beside = [FOLDERS["kineto"] if c.name == "." else c.name for c in captures if not _RUN.match(c.name)]
        names = ", ".join(beside + [run for run in runs if run != "."])
        raise CommandError(f"these are several runs, each with a timeline of its own: name one of the folders {names}")
    files = [(c.name, f) for c in captures for f in c.kineto]
    if not files:
        raise CommandError("there are no Kineto traces here; merge draws these, not execution traces")
    wanted = wanted_ranks(ranks, {f.rank for _, f in files if f.rank is not None})
    if not ranks.strip():
        return sorted(files, key=lambda item: (item[1].rank is None, item[1].rank or 0))
    return sorted((item for item in files if item[1].rank in wanted), key=lambda item: item[1].rank or 0)


def _check_output(path: str, captures: Sequence[Capture], *, overwrite: bool) -> str:
    """The absolute output path; refuse before the work rather than after it."""
    output = storage.absolute(path)
    folder, _, name = output.replace(os.sep, "/").rpartition("/")
    if not name.endswith(".json.gz"):
        raise CommandError(f"--output {path}: the name has to end in .json.gz")
    if any(folder == f"{c.root.rstrip('/')}/{kind}" for c in captures for kind in FOLDERS.values()) or any(
        c.foreign and folder == c.root.rstrip("/") for c in captures
    ):
        raise CommandError(f"--output {path}: readers would take the timeline for a trace of one more rank there")
    check_target(output, f"--output {path}", overwrite=overwrite)
    return output


def _refuse_twins(files: Sequence[tuple[str, TraceFile]], scans: Sequence[Scan]) -> None:
    """Two traces of one rank and window cannot be told apart in the timeline: one of them is foreign."""
    seen: dict[tuple[str, int], TraceFile] = {}
    for (window, file), scan in zip(files, scans, strict=True):
        if (twin := seen.setdefault((window, scan.rank), file)) is not file:
            raise CommandError(f"{twin.name} and {file.name} both say that they are rank {scan.rank}", EXIT_WRONG)


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


def _report(output: str, size: int, scans: Sequence[Scan], alignment: Alignment, *, as_json: bool) -> int:
    ranks = sorted({scan.rank for scan in scans})
    dropped = sum(scan.incomplete for scan in scans)
    moved = sum(1 for scan in scans for fix in scan.fixes.values() if fix.lane)
    if as_json:
        content = {
            "output": output,
            "bytes": size,
            "ranks": ranks,
            "alignment": {**asdict(alignment), "offsets_ns": alignment.offsets},
            "overlapping_slices": moved,
            "incomplete_slices": dropped,
        }
        del content["alignment"]["offsets"]  # type: ignore[attr-defined]
        print(json.dumps(content, indent=2))  # noqa: T201 - the command's output
    else:
        print(f"{output}: {size / 1e6:.3g} MB, {named_ranks(ranks)}")  # noqa: T201
        print(_describe(alignment))  # noqa: T201
        if moved:
            print(f"{moved} slices run at the same time as others of their thread: they have rows of their own")  # noqa: T201
        if dropped:
            print(f"{dropped} slices had no duration, process or thread in their trace; they are drawn without")  # noqa: T201
    return EXIT_WRONG if alignment.unaligned else EXIT_OK


def _describe(alignment: Alignment) -> str:
    clocks = f"{alignment.hosts} hosts" if not alignment.nameless else f"{alignment.hosts} clocks (no host names)"
    how = {
        "clock": "as they are" if alignment.hosts > 1 else "as they are, all ranks are on one host",
        "collectives": f"{clocks} aligned by the ends of shared collectives",
        "steps": f"{clocks} aligned by the starts of the steps",
        "collectives+steps": f"{clocks} aligned by the ends of shared collectives, some by the starts of the steps",
    }.get(alignment.method, f"{clocks}, not aligned: the ranks share neither collectives nor steps")
    if alignment.residual_us is not None and alignment.residual_max_us is not None:
        moments = "collectives end" if alignment.judged_by == "collectives" else "steps start"
        how += (
            f"; {alignment.moments} shared {moments} within {alignment.residual_us:.1f} µs of each other (median), "
            f"{alignment.residual_max_us:.1f} µs at most"
        )
    if alignment.unaligned:
        how += f"; ranks {format_ranks(alignment.unaligned)} share nothing with the others and are NOT aligned"
    return f"clocks: {how}"
