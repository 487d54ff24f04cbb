"""Chakra traces for ASTRA-sim: PREFIX.N.et of each rank N, through mlc-chakra's own linker and converter.

Each rank is first checked: whether its two traces are of one window, so that they can be linked. mlc-chakra itself
says "successful" when almost nothing was.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from jsonargparse import ArgumentParser, Namespace

from lightning_chakra import storage
from lightning_chakra.cli.captures import TraceFile, find_captures
from lightning_chakra.cli.errors import EXIT_OK, EXIT_WRONG, CommandError, missing_extra
from lightning_chakra.cli.facts import RankFacts, read_facts
from lightning_chakra.cli.jobs import add_jobs_argument, map_ranks
from lightning_chakra.cli.mlc_chakra import CONVERTER_FORMATS, ET_REPLAY, explain, lost_dependencies
from lightning_chakra.cli.output import check_target, publish
from lightning_chakra.cli.reading import TraceError, open_trace
from lightning_chakra.cli.selection import add_ranks_argument, wanted_ranks

SUMMARY = "PREFIX.N.et for ASTRA-sim, through mlc-chakra"

_ENOUGH = 0.5
"""The share of operators that has to link. A pair of one window has all but the few at its edges."""

_COPY = 1 << 20


@dataclass(frozen=True)
class _Task:
    rank: int
    kineto: TraceFile
    chakra: TraceFile
    target: str
    overwrite: bool
    keep: str | None


@dataclass
class Converted:
    """What became of one rank.

    Attributes:
        rank: Global rank.
        output: The file; ``None`` if there is none, for the reason in ``error``.
        bytes: Its size.
        linked: Share of operators that have a node in the execution trace; ``None`` if that was not reached.
        error: Why the rank was not converted.
        warnings: What the file lacks.
    """

    rank: int
    output: str | None = None
    bytes: int = 0
    linked: float | None = None
    error: str | None = None
    warnings: list[str] = field(default_factory=list)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("path", metavar="DIR", help="one window: a folder with traces, a local path or an fsspec URL")
    parser.add_argument("--output", required=True, metavar="PREFIX", help="write PREFIX.N.et for each rank N")
    add_ranks_argument(parser)
    parser.add_argument(
        "--keep-linked", metavar="FOLDER", help="also keep the linked JSON traces, as FOLDER/rank-N.json"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist (local ones only)")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    add_jobs_argument(parser)


def run(args: Namespace) -> int:
    """Convert, print what became of each rank, and return 0 if all are there and whole, else 1."""
    _require_mlc_chakra()
    tasks = _tasks(args)
    for task in tasks:
        check_target(task.target, f"{args.output}.{task.rank}.et", overwrite=args.overwrite)
    results = map_ranks(_convert, tasks, args.jobs)
    if args.json:
        print(json.dumps([asdict(result) for result in results], indent=1))  # noqa: T201 - the command's output
    else:
        for result in results:
            _print(result)
    return EXIT_OK if all(result.error is None and not result.warnings for result in results) else EXIT_WRONG


def _require_mlc_chakra() -> None:
    if not _importable("chakra.src.converter.converter"):
        raise missing_extra("mlc-chakra", "convert", "convert")
    if not _importable("et_replay"):
        raise CommandError(f"mlc-chakra's linker needs et_replay, which is not on PyPI: {ET_REPLAY}")


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # a parent package is missing
        return False


def _tasks(args: Namespace) -> list[_Task]:
    captures = [capture for capture in find_captures(args.path) if capture.chakra]
    if not captures:
        raise CommandError(f"there are no execution traces in {args.path}; they are written with collect_chakra=True")
    if len(captures) > 1:
        names = ", ".join(capture.name for capture in captures)
        raise CommandError(f"there are several windows in {args.path}: name one of {names}")
    pairs: dict[int, tuple[TraceFile | None, TraceFile | None]] = {}
    for kineto, chakra in captures[0].pairs():
        rank = next((file.rank for file in (kineto, chakra) if file is not None and file.rank is not None), 0)
        if rank in pairs:
            raise CommandError(f"{args.path} has several traces of rank {rank}")
        pairs[rank] = (kineto, chakra)
    tasks = []
    for rank in wanted_ranks(args.ranks, pairs):
        kineto, chakra = pairs[rank]
        if kineto is None or chakra is None:
            raise CommandError(f"rank {rank} has only one of the two traces; both are needed (or say --ranks)")
        target = storage.absolute(f"{args.output}.{rank}.et")
        tasks.append(_Task(rank, kineto, chakra, target, args.overwrite, args.keep_linked))
    return tasks


def _convert(task: _Task) -> Converted:
    """Check, link and convert one rank."""
    result = Converted(task.rank)
    facts = read_facts((task.kineto, task.chakra))
    if (reason := _why_not(facts)) is not None:
        result.error = reason
        return result
    assert facts.kineto is not None
    result.linked = facts.linked / facts.kineto.operators
    if not facts.kineto.device_events:
        result.warnings.append("no device events: the operators of the host only, and no communication")
    with tempfile.TemporaryDirectory(prefix="lightning-chakra-convert-") as folder:
        try:
            _run_tools(task, folder, result, device=facts.kineto.device_events > 0)
        except CommandError as error:
            result.error = str(error)
        except (OSError, TraceError) as error:
            result.error = f"{type(error).__name__}: {error}"
    return result


def _why_not(facts: RankFacts) -> str | None:
    """Why the two traces cannot be linked; ``None``: they can."""
    kineto, chakra = facts.kineto, facts.chakra
    assert kineto is not None
    assert chakra is not None
    for trace in (kineto, chakra):
        if trace.error:
            return f"{trace.name}: {trace.error}"
    if chakra.schema not in CONVERTER_FORMATS:
        return f"{chakra.name} has the format {chakra.schema!r}; mlc-chakra reads {', '.join(CONVERTER_FORMATS)}"
    if not kineto.steps:
        return f"{kineto.name} has no ProfilerStep marks, which mlc-chakra's linker goes by"
    if not kineto.with_id:
        return f"no operator of {kineto.name} has a number that links it: no ExecutionTraceObserver ran in the window"
    if facts.linked < _ENOUGH * kineto.operators:
        return (
            f"only {facts.linked} of {kineto.operators} operators are in both {kineto.name} and {chakra.name}: "
            "they are not of one window"
        )
    return None


def _run_tools(task: _Task, folder: str, result: Converted, *, device: bool) -> None:
    host = os.path.join(folder, "host.json")
    trace = os.path.join(folder, f"rank-{task.rank}.json")
    linked, converted = os.path.join(folder, "linked.json"), os.path.join(folder, "converted.et")
    _unzip(task.chakra.path, host)  # the linker opens it a second time as plain text
    _unzip(task.kineto.path, trace)  # the folder must hold no other trace: HTA looks around
    log = _run(
        "chakra.src.trace_link.trace_link",
        [
            "--rank",
            str(task.rank),
            "--chakra-host-trace",
            host,
            "--chakra-device-trace",
            trace,
            "--output-file",
            linked,
        ],
        folder,
        device=device,
    )
    if (reason := lost_dependencies(log)) is not None:
        result.warnings.append(reason)
    if task.keep is not None:
        os.makedirs(task.keep, exist_ok=True)
        kept = storage.absolute(os.path.join(task.keep, f"rank-{task.rank}.json"))
        publish(kept, folder, lambda part: _copy(linked, part), overwrite=task.overwrite)
    log_file = os.path.join(folder, "converter.log")
    arguments = ["--log-filename", log_file, "PyTorch", "--input", linked, "--output", converted]
    _run("chakra.src.converter.converter", arguments, folder, device=device)
    if not os.path.isfile(converted) or not os.path.getsize(converted):
        raise CommandError("mlc-chakra's converter wrote nothing")
    result.bytes = publish(task.target, folder, lambda part: _copy(converted, part), overwrite=task.overwrite)
    result.output = task.target


def _run(module: str, arguments: Sequence[str], folder: str, *, device: bool) -> str:
    """Run one of mlc-chakra's programs in a process of its own and return what it said."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    said = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        raise CommandError(explain(module, done.returncode, said, device=device))
    return said


def _unzip(path: str, destination: str) -> None:
    with open_trace(path) as source, open(destination, "wb") as sink:
        shutil.copyfileobj(source, sink, _COPY)


def _copy(source: str, part: str) -> None:
    with open(source, "rb") as raw, open(part, "xb") as sink:
        shutil.copyfileobj(raw, sink, _COPY)


def _print(result: Converted) -> None:
    if result.error is not None:
        print(f"rank {result.rank}: NOT converted: {result.error}")  # noqa: T201 - the command's output
        return
    share = "" if result.linked is None else f", {result.linked:.1%} of the operators linked"
    print(f"{result.output}: {result.bytes / 1e6:.3g} MB{share}")  # noqa: T201
    for warning in result.warnings:
        print(f"rank {result.rank}: WARNING: {warning}")  # noqa: T201
