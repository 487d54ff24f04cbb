"""Chakra traces for ASTRA-sim, through mlc-chakra's own linker and converter."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_chakra.recording import storage
from lightning_chakra.traces.captures import TraceFile, find_captures
from lightning_chakra.traces.errors import CaptureError, ResultError, TraceError
from lightning_chakra.traces.facts import RankFacts, read_facts
from lightning_chakra.traces.jobs import map_ranks
from lightning_chakra.traces.reading import open_trace
from lightning_chakra.traces.selection import wanted_ranks
from lightning_chakra.transform.mlc_chakra import CONVERTER_FORMATS, ET_REPLAY, explain, lost_dependencies
from lightning_chakra.transform.output import check_target, publish

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


def convert(
    path: str, output: str, *, ranks: str = "", overwrite: bool = False, keep_linked: str | None = None, jobs: int = 0
) -> list[Converted]:
    """Write ``output.N.et`` for each rank N of one window.

    Args:
        path: The window, a local path or an fsspec URL.
        output: Prefix of the files.
        ranks: Which ranks, as ``profile_ranks``; empty means all.
        overwrite: Whether local files that exist are replaced.
        keep_linked: A folder that keeps the linked JSON traces.
        jobs: Processes at a time; 0: one per CPU, at most 8.

    Raises:
        CaptureError: There is nothing to convert, nowhere to write to, or a package is missing.
    """
    _require_mlc_chakra()
    tasks = _tasks(path, output, ranks, overwrite=overwrite, keep_linked=keep_linked)
    for task in tasks:
        check_target(task.target, f"{output}.{task.rank}.et", overwrite=overwrite)
    return map_ranks(_convert, tasks, jobs)


def _require_mlc_chakra() -> None:
    if not _importable("chakra.src.converter.converter"):
        raise CaptureError("convert needs mlc-chakra: pip install 'lightning-chakra[convert]'")
    if not _importable("et_replay"):
        raise CaptureError(f"mlc-chakra's linker needs et_replay, which is not on PyPI: {ET_REPLAY}")


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # a parent package is missing
        return False


def _tasks(path: str, output: str, ranks: str, *, overwrite: bool, keep_linked: str | None) -> list[_Task]:
    captures = [capture for capture in find_captures(path) if capture.chakra]
    if not captures:
        raise CaptureError(f"there are no execution traces in {path}; they are written with collect_chakra=True")
    if len(captures) > 1:
        names = ", ".join(capture.name for capture in captures)
        raise CaptureError(f"there are several windows in {path}: name one of {names}")
    pairs: dict[int, tuple[TraceFile | None, TraceFile | None]] = {}
    for kineto, chakra in captures[0].pairs():
        rank = next((file.rank for file in (kineto, chakra) if file is not None and file.rank is not None), 0)
        if rank in pairs:
            raise CaptureError(f"{path} has several traces of rank {rank}")
        pairs[rank] = (kineto, chakra)
    tasks = []
    for rank in wanted_ranks(ranks, pairs):
        kineto, chakra = pairs[rank]
        if kineto is None or chakra is None:
            raise CaptureError(f"rank {rank} has only one of the two traces; both are needed (or say --ranks)")
        target = storage.absolute(f"{output}.{rank}.et")
        tasks.append(_Task(rank, kineto, chakra, target, overwrite, keep_linked))
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
        except (CaptureError, ResultError) as error:
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
        raise ResultError("mlc-chakra's converter wrote nothing")
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
        raise ResultError(explain(module, done.returncode, said, device=device))
    return said


def _unzip(path: str, destination: str) -> None:
    with open_trace(path) as source, open(destination, "wb") as sink:
        shutil.copyfileobj(source, sink, _COPY)


def _copy(source: str, part: str) -> None:
    with open(source, "rb") as raw, open(part, "xb") as sink:
        shutil.copyfileobj(raw, sink, _COPY)
