"""What is wrong with a capture, judged by the facts about its files, and what that means for whoever uses it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from lightning_chakra.traces.captures import Capture
from lightning_chakra.traces.facts import ChakraFacts, KinetoFacts, RankFacts

Severity = Literal["error", "warning", "note"]

READABLE_SCHEMAS = frozenset(
    {
        "1.0.1",
        "1.0.2-chakra.0.0.4",
        "1.0.3-chakra.0.0.4",
        "1.0.4-chakra.0.0.4",
        "1.1.0-chakra.0.0.4",
        "1.1.1-chakra.0.0.4",
    }
)
"""The formats that et_replay's loader reads (facebookresearch/param, et_replay/execution_trace.py); mlc-chakra's linker
reads with that loader."""

_SAME_ON_ALL_RANKS = ("version", "world_size", "profiled_ranks", "first_step", "step_unit", "schedule", "options")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, or worth knowing.

    Attributes:
        severity: ``"error"``: the capture or a file of it is unusable or contradicts itself; ``"warning"``: a part of
            it or a reader of it does not work; ``"note"``: nothing is wrong.
        file: The file or folder.
        what: What is wrong.
        meaning: What follows from it, and what to do.
    """

    severity: Severity
    file: str
    what: str
    meaning: str


def judge(capture: Capture, ranks: list[RankFacts]) -> list[Problem]:
    """All problems of a capture, the worst first."""
    problems = [
        *_strangers(capture),
        *(problem for rank in ranks for problem in _unreadable(rank)),
        *_missing(capture, ranks),
        *_rank_numbers(capture, ranks),
        *(problem for rank in ranks for problem in _contents(capture, rank)),
        *_steps(capture, ranks),
        *_windows(ranks),
        *(problem for rank in ranks for problem in _links(rank)),
    ]
    return sorted(problems, key=lambda problem: ("error", "warning", "note").index(problem.severity))


def numbers(values: list[int]) -> str:
    """Numbers as a short text: ``0-3, 8``."""
    spans: list[list[int]] = []
    for value in sorted(set(values)):
        if spans and value == spans[-1][1] + 1:
            spans[-1][1] = value
        else:
            spans.append([value, value])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans) or "none"


def _readable(ranks: list[RankFacts]) -> list[KinetoFacts]:
    return [rank.kineto for rank in ranks if rank.kineto is not None and not rank.kineto.error]


def _about(ranks: list[RankFacts]) -> dict[str, Any] | None:
    return next((kineto.about for kineto in _readable(ranks) if kineto.about is not None), None)


def _strangers(capture: Capture) -> Iterator[Problem]:
    for name in capture.strangers:
        if name.endswith(".part"):
            yield Problem(
                "warning",
                name,
                "half-written file",
                "left by a process that ended while it published, or still being written; once no training runs, "
                "delete it and let `lightning-chakra recover` look for its raw file",
            )
        elif name.endswith((".json", ".gz")):
            what = "neither a Kineto trace nor an execution trace" if capture.foreign else "not a trace of this package"
            yield Problem(
                "note" if capture.foreign else "error",
                name,
                what,
                "HolisticTraceAnalysis opens every .json and .gz file of a folder: move it elsewhere",
            )
        elif not capture.foreign:
            yield Problem(
                "warning", name, "not a trace of this package", "nothing but traces belongs there: move it elsewhere"
            )


def _unreadable(rank: RankFacts) -> Iterator[Problem]:
    for facts in (rank.kineto, rank.chakra):
        if facts is None or not facts.error:
            continue
        meaning = "no reader can open it"
        if "cut" in facts.error or "whole gzip" in facts.error:
            meaning += "; copy it again, or record it again if that is all there is"
        elif "strict JSON" in facts.error:
            meaning += "; a name given to record_function, torch does not escape those, or a NaN is the usual reason"
        yield Problem("error", facts.name, facts.error, meaning)


def _missing(capture: Capture, ranks: list[RankFacts]) -> Iterator[Problem]:
    about = _about(ranks)
    have_kineto = [rank.rank for rank in ranks if rank.kineto is not None and rank.rank is not None]
    have_chakra = [rank.rank for rank in ranks if rank.chakra is not None and rank.rank is not None]
    if about is not None and not capture.foreign:
        expected = [rank for rank in about.get("profiled_ranks") or [] if isinstance(rank, int)]
        wants_chakra = bool((about.get("options") or {}).get("collect_chakra"))
        why = (
            "the rank died, its disk was full, or it is still writing; `lightning-chakra recover` may find its raw file"
        )
        if lost := sorted(set(expected) - set(have_kineto)):
            yield Problem("error", _folder(capture, "pytorch_profile"), f"no trace of rank {numbers(lost)}", why)
        if wants_chakra and (lost := sorted(set(expected) - set(have_chakra))):
            yield Problem("error", _folder(capture, "chakra"), f"no trace of rank {numbers(lost)}", why)
        if extra := sorted({*have_kineto, *have_chakra} - set(expected)):
            yield Problem(
                "error",
                capture.name,
                f"trace of rank {numbers(extra)}, which was not profiled",
                "files of different runs lie in this folder",
            )
        return
    if not capture.foreign:
        if lost := sorted(set(have_chakra) - set(have_kineto)):
            yield Problem(
                "error",
                _folder(capture, "pytorch_profile"),
                f"no trace of rank {numbers(lost)}, whose execution trace is there",
                "without the Kineto trace the nodes have no times",
            )
        if _readable(ranks):
            yield Problem(
                "note",
                capture.name,
                "the traces do not say which ranks were profiled",
                "whether a rank is missing cannot be told",
            )
    world = max((kineto.world_size or 0 for kineto in _readable(ranks)), default=0)
    there = {kineto.rank for kineto in _readable(ranks) if kineto.rank is not None}
    if world > len(there) > 0:
        lost = sorted(set(range(world)) - there)
        yield Problem(
            "note",
            capture.name,
            f"no Kineto trace of rank {numbers(lost)} of {world}",
            "fine if those were not profiled: the traces do not say",
        )


def _rank_numbers(capture: Capture, ranks: list[RankFacts]) -> Iterator[Problem]:
    kinetos = _readable(ranks)
    for rank in ranks:
        kineto = rank.kineto
        if kineto is None or kineto.error:
            continue
        named = rank.rank if not capture.foreign or "rank" in kineto.name or "worker" in kineto.name else None
        if named is not None and kineto.rank is not None and kineto.rank != named:
            yield Problem(
                "error",
                kineto.name,
                f"it is the trace of rank {kineto.rank}",
                "HolisticTraceAnalysis goes by the content, other readers by the name: rename the file",
            )
        if kineto.compact_rank:
            yield Problem(
                "warning",
                kineto.name,
                'no white space in "rank":N',
                "HolisticTraceAnalysis does not find the rank then: do not rewrite traces as compact JSON",
            )
        elif not kineto.distributed:
            alone = len(kinetos) == 1 and capture.foreign
            yield Problem(
                "note" if alone else "warning",
                kineto.name,
                "no rank in distributedInfo",
                "HolisticTraceAnalysis takes it for rank 0" + ("" if alone else ", as every other such file"),
            )
    counts = Counter(kineto.rank for kineto in kinetos if kineto.rank is not None)
    for number, count in sorted(counts.items()):
        if count > 1:
            names = [kineto.name for kineto in kinetos if kineto.rank == number]
            yield Problem(
                "error",
                names[0],
                f"{count} traces of rank {number} in one folder, such as {names[1]}",
                "HolisticTraceAnalysis keeps one of them: one folder per window and run",
            )


def _contents(capture: Capture, rank: RankFacts) -> Iterator[Problem]:
    if (kineto := rank.kineto) is not None and not kineto.error:
        if kineto.operators == 0:
            yield Problem("error", kineto.name, "no operators", "nothing was recorded: the window was empty")
        elif kineto.devices and not kineto.device_events:
            yield Problem(
                "warning",
                kineto.name,
                f"no device events, but a host with {kineto.devices} GPUs",
                "only the CPU was profiled, or another tool held the counters; HolisticTraceAnalysis needs kernels",
            )
    if (chakra := rank.chakra) is not None and not chakra.error:
        yield from _graph(chakra)
        if chakra.mended:
            yield Problem(
                "note",
                chakra.name,
                f"{chakra.mended} nodes mended",
                "torch loses count where an exception leaves an operator (activation checkpointing ends its "
                f"recomputation so): they got their true parents, and {rank.abandoned} operators have no node",
            )


def _graph(chakra: ChakraFacts) -> Iterator[Problem]:
    if chakra.repeated_ids:
        yield Problem(
            "error",
            chakra.name,
            f"{chakra.repeated_ids} nodes with the id of another (such as {numbers(chakra.repeated)})",
            "readers keep one node per id; forked processes that write into the same file cause this",
        )
    if chakra.orphans:
        yield Problem(
            "error",
            chakra.name,
            f"{chakra.orphans} parents that are not there (of node {numbers(chakra.orphaned)})",
            "the tree is broken: an exception left an operator while it was recorded, which torch then does not "
            "write, part of the file is lost, or it was filtered",
        )
    if chakra.nodes <= 1:
        yield Problem("error", chakra.name, "no operators", "its observer never ran: the window was empty")
    if not chakra.finished:
        yield Problem("warning", chakra.name, "no finish_ts", "its end was mended: the last nodes may be lost")
    if chakra.schema not in READABLE_SCHEMAS:
        yield Problem(
            "warning",
            chakra.name,
            f"schema {chakra.schema or 'not given'}",
            "et_replay and mlc-chakra do not read it (the newest they read is 1.1.1-chakra.0.0.4)",
        )


def _steps(capture: Capture, ranks: list[RankFacts]) -> Iterator[Problem]:
    marked: dict[str, list[int]] = {}
    for rank in ranks:
        for facts in (rank.kineto, rank.chakra):
            if facts is None or facts.error or (isinstance(facts, ChakraFacts) and facts.nodes <= 1):
                continue
            if not facts.steps:
                yield _no_steps(capture, facts)
            else:
                marked[facts.name] = sorted(facts.steps)
        if rank.linkable and rank.kineto is not None and rank.chakra is not None:
            steps, others = sorted(rank.kineto.steps), sorted(rank.chakra.steps)
            if steps and others and steps != others:
                yield Problem(
                    "error",
                    rank.chakra.name,
                    f"steps {numbers(others)}, but {numbers(steps)} in {rank.kineto.name}",
                    "the two are not of the same window and cannot be linked",
                )
                marked.pop(rank.chakra.name)
        if rank.kineto is not None and not rank.kineto.error and rank.kineto.about and rank.kineto.steps:
            yield from _announced(rank.kineto, rank.kineto.about)
    if not marked:
        return
    (usual, _), *others_ = Counter(tuple(steps) for steps in marked.values()).most_common()
    for steps_, _ in others_:
        names = [name for name, steps in marked.items() if tuple(steps) == steps_]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield Problem(
            "error",
            names[0] + more,
            f"steps {numbers(list(steps_))}, other ranks {numbers(list(usual))}",
            "the ranks did not record the same steps: they cannot be compared",
        )


def _no_steps(capture: Capture, facts: KinetoFacts | ChakraFacts) -> Problem:
    return Problem(
        "warning" if capture.foreign else "error",
        facts.name,
        "no ProfilerStep marks",
        "chakra_trace_link and analyses by step (HolisticTraceAnalysis, summary) need them: "
        "give torch.profiler a schedule and call its step()",
    )


def _announced(kineto: KinetoFacts, about: dict[str, Any]) -> Iterator[Problem]:
    first, last = about.get("first_step"), about.get("last_step")
    if about.get("partial") or not isinstance(first, int) or not isinstance(last, int):
        return
    steps = [step for step in sorted(kineto.steps) if first <= step <= last]
    if len(steps) < len(kineto.steps):
        yield Problem(
            "error",
            kineto.name,
            f"steps {numbers(kineto.steps)}, but it announces {first}-{last}",
            "the others are marks of another profiler, whose step() makes them, or ranges of that name: readers take "
            "them for steps",
        )
        return
    active = (about.get("schedule") or {}).get("active")
    # with several optimizers the trainer's global step moves by more than one
    whole = len(steps) == active if isinstance(active, int) else steps == list(range(first, last + 1))
    if not steps or (steps[0], steps[-1]) != (first, last) or not whole:
        yield Problem(
            "error",
            kineto.name,
            f"steps {numbers(kineto.steps)}, but it announces {first}-{last}",
            "part of the window is lost",
        )


def _windows(ranks: list[RankFacts]) -> Iterator[Problem]:
    described = [(kineto, kineto.about) for kineto in _readable(ranks) if kineto.about is not None]
    for kineto, about in described:
        if about.get("partial"):
            active = (about.get("schedule") or {}).get("active")
            wanted = f" of {active}" if isinstance(active, int) else ""
            yield Problem(
                "warning",
                kineto.name,
                f"partial: {len(kineto.steps)}{wanted} steps, the last one perhaps cut",
                "training ended or failed inside the window",
            )
    for key in _SAME_ON_ALL_RANKS:
        values = [about.get(key) for _, about in described]
        different = [i for i, value in enumerate(values) if value != values[0]]
        if different:
            yield Problem(
                "error",
                described[different[0]][0].name,
                f"{key} {values[different[0]]}, but {values[0]} in {described[0][0].name}",
                "files of different runs lie in this folder",
            )


def _links(rank: RankFacts) -> Iterator[Problem]:
    if not rank.linkable or rank.kineto is None or rank.chakra is None or rank.kineto.operators == 0:
        return
    kineto, share = rank.kineto, rank.linked / rank.kineto.operators
    if kineto.with_id == 0:
        yield Problem(
            "error",
            kineto.name,
            "no operator has a number that links it with its execution trace",
            "the observer did not run in the same window, or torch is too old to write the number: "
            "chakra_trace_link cannot match the two",
        )
    elif share < 1:
        yield Problem(
            "error" if share < 0.5 else "warning",
            kineto.name,
            f"{share:.1%} of {kineto.operators} operators link with {rank.chakra.name}"
            f" (not {', '.join(rank.unlinked)})",
            "the two are of different runs or windows" if share < 0.5 else "those operators get no times",
        )


def _folder(capture: Capture, folder: str) -> str:
    return folder if capture.name == "." else f"{capture.name}/{folder}"
