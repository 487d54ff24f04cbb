"""Is this capture good? Looks at every trace below DIR and lists what is wrong with it and what that means."""

import json
import sys
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from lightning_chakra.cli.arguments import add_jobs_argument
from lightning_chakra.cli.errors import EXIT_OK, EXIT_WRONG

if TYPE_CHECKING:
    from lightning_chakra.analysis.check import CheckResult

SUMMARY = "is this capture good? lists what is wrong and what it means"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("path", metavar="DIR", help="folder with traces, a local path or an fsspec URL")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    add_jobs_argument(parser)


def run(args: Namespace) -> int:
    """Check, print, and return 0 if there is neither an error nor a warning, else 1."""
    from lightning_chakra.analysis.check import CheckResult, check_all
    from lightning_chakra.traces.captures import find_captures

    results = check_all(find_captures(args.path), jobs=args.jobs)
    good = all(result.good for result in results)
    if args.json:
        content = {
            "schema": CheckResult.SCHEMA,
            "path": args.path,
            "good": good,
            "captures": [result.to_dict() for result in results],
        }
        json.dump(content, sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        _print(results)
    return EXIT_OK if good else EXIT_WRONG


def _print(results: "list[CheckResult]") -> None:
    from rich.text import Text

    from lightning_chakra.cli.tables import console, table

    colors = {"error": "bold red", "warning": "yellow", "note": "dim"}
    out = console()
    for result in results:
        out.print(Text.assemble(_verdict(result), _headline(result)))
        alike: dict[tuple[str, str, str], list[str]] = {}
        for p in result.problems:
            alike.setdefault((p.severity, p.what, p.meaning), []).append(p.file)
        rows = [(Text(s, colors[s]), _few(files), what, meaning) for (s, what, meaning), files in alike.items()]
        if rows:
            out.print(table("", ("", "file", "what", "meaning"), rows, text_columns=4))


def _verdict(result: "CheckResult") -> tuple[str, str]:
    """A word about a capture, and its style."""
    severities = {problem.severity for problem in result.problems}
    if "error" in severities:
        return "BAD  ", "bold red"
    return ("warn ", "yellow") if "warning" in severities else ("good ", "green")


def _few(files: list[str]) -> str:
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


def _headline(result: "CheckResult") -> str:
    from lightning_chakra.analysis.rules import numbers

    capture, ranks = result.capture, result.ranks
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
