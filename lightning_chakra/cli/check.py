"""Is this capture good? Looks at every trace below DIR and lists what is wrong with it and what that means."""

import dataclasses
import json
import sys
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lightning_chakra.cli.captures import Capture, find_captures
from lightning_chakra.cli.errors import EXIT_OK, EXIT_WRONG
from lightning_chakra.cli.facts import RankFacts, read_facts
from lightning_chakra.cli.jobs import add_jobs_argument, map_ranks
from lightning_chakra.cli.rules import Problem, judge, numbers

SUMMARY = "is this capture good? lists what is wrong and what it means"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("path", metavar="DIR", help="folder with traces, a local path or an fsspec URL")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    add_jobs_argument(parser)


def run(args: Namespace) -> int:
    """Check, print, and return 0 if there is neither an error nor a warning, else 1."""
    captures = find_captures(args.path)
    tasks = [(index, pair) for index, capture in enumerate(captures) for pair in capture.pairs()]
    facts = map_ranks(read_facts, [pair for _, pair in tasks], args.jobs)
    reports = []
    for index, capture in enumerate(captures):
        ranks = [fact for (owner, _), fact in zip(tasks, facts, strict=True) if owner == index]
        reports.append((capture, ranks, judge(capture, ranks)))
    if args.json:
        json.dump(_as_json(args.path, reports), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        _print(reports)
    return EXIT_OK if all(_is_good(problems) for _, _, problems in reports) else EXIT_WRONG


Report = tuple[Capture, list[RankFacts], list[Problem]]


def _is_good(problems: list[Problem]) -> bool:
    return all(problem.severity == "note" for problem in problems)


def _as_json(path: str, reports: list[Report]) -> dict[str, Any]:
    return {
        "path": path,
        "good": all(_is_good(problems) for _, _, problems in reports),
        "captures": [
            {
                "name": capture.name,
                "foreign": capture.foreign,
                "good": _is_good(problems),
                "ranks": [dataclasses.asdict(rank) for rank in ranks],
                "problems": [dataclasses.asdict(problem) for problem in problems],
            }
            for capture, ranks, problems in reports
        ],
    }


def _print(reports: list[Report]) -> None:
    from rich.text import Text

    from lightning_chakra.cli.tables import console, table

    colors = {"error": "bold red", "warning": "yellow", "note": "dim"}
    out = console()
    for capture, ranks, problems in reports:
        out.print(Text.assemble(_verdict(problems), _headline(capture, ranks)))
        alike: dict[tuple[str, str, str], list[str]] = {}
        for p in problems:
            alike.setdefault((p.severity, p.what, p.meaning), []).append(p.file)
        rows = [(Text(s, colors[s]), _few(files), what, meaning) for (s, what, meaning), files in alike.items()]
        if rows:
            out.print(table("", ("", "file", "what", "meaning"), rows, text_columns=4))


def _verdict(problems: list[Problem]) -> tuple[str, str]:
    """A word about a capture, and its style."""
    severities = {problem.severity for problem in problems}
    if "error" in severities:
        return "BAD  ", "bold red"
    return ("warn ", "yellow") if "warning" in severities else ("good ", "green")


def _few(files: list[str]) -> str:
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


def _headline(capture: Capture, ranks: list[RankFacts]) -> str:
    kinetos = [rank.kineto for rank in ranks if rank.kineto is not None]
    chakras = [rank.chakra for rank in ranks if rank.chakra is not None]
    have = sorted({k.rank if k.rank is not None else 0 for k in kinetos if not k.error} | set(capture.ranks))
    world = max((k.world_size or 0 for k in kinetos), default=0)
    steps = [step for k in kinetos for step in k.steps] + [step for c in chakras for step in c.steps]
    parts = [
        f"{capture.name}: rank {numbers(have)}" + (f" of {world}" if world else ""),
        f"{'step' if len(set(steps)) == 1 else 'steps'} {numbers(steps)}",
        f"{len(kinetos)} Kineto and {len(chakras)} execution traces",
    ]
    linkable = [rank for rank in ranks if rank.linkable and rank.kineto is not None]
    operators = sum(rank.kineto.operators for rank in linkable if rank.kineto is not None)
    if operators:
        linked = sum(rank.linked for rank in linkable)
        parts.append(f"{linked / operators:.1%} of {operators} operators link")
    return ", ".join(parts)
