"""What happened? Steps, device time, slowest rank, operators, collectives and gaps of every window below DIR."""

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from lightning_chakra.cli.arguments import add_jobs_argument, add_ranks_argument
from lightning_chakra.cli.errors import EXIT_OK, EXIT_WRONG, CommandError

if TYPE_CHECKING:
    from lightning_chakra.analysis.activity import Collective, RankActivity, Split, Step
    from lightning_chakra.analysis.summary import Summary

SUMMARY = "what happened? steps, slowest rank, operators, collectives, gaps"

_MOST_ROWS = 32
"""Rows of the table of steps; of more, the slowest are shown."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("path", metavar="DIR", help="folder with traces, a local path or an fsspec URL")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="operators, collectives and gaps to list")
    parser.add_argument("--plot", metavar="FILE", help="draw the steps and the operators, FILE.png or FILE.html")
    add_ranks_argument(parser)
    add_jobs_argument(parser)


def run(args: Namespace) -> int:
    """Summarize, print, and return 0 if every file could be read, else 1."""
    from lightning_chakra.analysis.summary import Summary, summarize_all
    from lightning_chakra.cli import plot
    from lightning_chakra.traces.captures import find_captures

    if args.top < 1:
        raise CommandError("--top: at least 1")
    if args.plot is not None:
        plot.check(args.plot)
    windows = summarize_all(find_captures(args.path), ranks=args.ranks, jobs=args.jobs)
    if args.json:
        content = {
            "schema": Summary.SCHEMA,
            "path": args.path,
            "windows": [window.to_dict(args.top) for window in windows],
        }
        json.dump(content, sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        for window in windows:
            _print(window, args.top)
    if args.plot is not None:
        plot.draw(windows, args.plot, args.top)
    return EXIT_OK if all(rank.error is None for window in windows for rank in window.ranks) else EXIT_WRONG


def _print(window: "Summary", count: int) -> None:
    from rich.text import Text

    from lightning_chakra.analysis.summary import top
    from lightning_chakra.cli.tables import console, table

    out = console()
    read = window.read
    out.print(Text(f"{window.name}: {len(read)} {'rank' if len(read) == 1 else 'ranks'}", "bold"))
    for rank in window.ranks:
        if rank.error is not None:
            out.print(Text(f"{rank.name}: {rank.error} (lightning-chakra check says more)", "bold red"))
    rows = [(rank, step) for rank in read for step in rank.steps]
    devices = any(rank.device is not None for rank in read)
    title = "Steps, ms"
    if len(rows) > _MOST_ROWS:
        rows = sorted(rows, key=lambda row: -row[1].mark_us)[:_MOST_ROWS]
        title += f" (the {_MOST_ROWS} longest of {sum(len(rank.steps) for rank in read)})"
    columns = ["rank", "step", "mark", "to next mark", "validation"]
    columns += ["compute", "exposed comm.", "copies", "idle", "device"] if devices else []
    if rows:
        out.print(table(title, columns, [_step_row(rank, step, devices) for rank, step in rows]))
    elif read:
        out.print(Text("no ProfilerStep marks: the trace as a whole\n"))
    if devices:
        whole = [(rank.label, *_split_row(rank.device)) for rank in read if rank.device is not None]
        columns = ["rank", "compute", "exposed comm.", "copies", "idle", "device"]
        out.print(table("Device, first to last event, ms", columns, whole[:_MOST_ROWS]))
    for line in _spread_lines(window):
        out.print(Text(line))
    for title, operators in (
        ("User ranges (time in them outside operators), all ranks", window.ranges),
        ("Operators and runtime calls, all ranks", window.host),
        ("Kernels and copies, all ranks", window.kernels),
    ):
        whole_us = sum(operator.self_us for operator in operators.values())
        if whole_us:
            out.print(
                table(
                    title,
                    ["name", "calls", "self ms", "share", "mean µs"],
                    [
                        (
                            _short(name),
                            o.calls,
                            _ms(o.self_us),
                            f"{o.self_us / whole_us:.1%}",
                            f"{o.self_us / o.calls:.1f}",
                        )
                        for name, o in top(operators, count)
                    ],
                )
            )
    if window.collectives:
        columns = ["collective", "process group", "type", "ranks", "calls", "bytes in", "bytes out", "ms", "mean µs"]
        out.print(table("Collectives, all ranks", columns, list(map(_collective_row, window.collectives[:count])), 3))
    gaps = sorted(((rank, gap) for rank in read for gap in rank.gaps), key=lambda pair: -pair[1].length_us)[:count]
    if gaps:
        columns = ["rank", "nothing ran on", "after", "before", "step", "at ms", "ms"]
        out.print(
            table(
                "Longest gaps",
                columns,
                [
                    (
                        rank.label,
                        gap.where,
                        _short(gap.before, 50),
                        _short(gap.after, 50),
                        "" if gap.step is None else gap.step,
                        _ms(gap.start_us),
                        _ms(gap.length_us),
                    )
                    for rank, gap in gaps
                ],
                4,
            )
        )


def _step_row(rank: "RankActivity", step: "Step", devices: bool) -> list[object]:
    row: list[object] = [rank.label, step.number, _ms(step.mark_us)]
    row += [
        "" if step.period_us is None else _ms(step.period_us),
        _ms(step.validation_us) if step.validation_us else "",
    ]
    if devices:
        row += _split_row(step.device) if step.device is not None else [""] * 5
    return row


def _split_row(split: "Split") -> list[object]:
    parts = (split.compute, split.communication, split.copies, split.idle)
    row: list[object] = [f"{_ms(part)} {part / split.span if split.span else 0:4.0%}" for part in parts]
    return [*row, _ms(split.span)]


def _collective_row(collective: "Collective") -> list[object]:
    return [
        collective.name,
        collective.group or "not recorded",
        collective.dtype or "not recorded",
        collective.group_size or "",
        collective.calls,
        *("" if size is None else f"{size:,}" for size in (collective.in_bytes, collective.out_bytes)),
        _ms(collective.time_us),
        f"{collective.time_us / collective.calls:.1f}",
    ]


def _spread_lines(window: "Summary") -> Iterable[str]:
    for spread in window.spread[:_MOST_ROWS]:
        where = "all steps" if spread.step is None else f"step {spread.step}"
        over = spread.slowest_us / spread.fastest_us - 1 if spread.fastest_us else 0.0
        yield (
            f"{where}: rank {spread.slowest} is the slowest with {_ms(spread.slowest_us)} ms, "
            f"{_ms(spread.slowest_us - spread.fastest_us)} ms ({over:.1%}) more than rank {spread.fastest}; "
            f"the median is {_ms(spread.median_us)} ms"
        )
    if window.waited_for is not None:
        exposed = {rank.label: rank.device.communication for rank in window.ranks if rank.device is not None}
        most = max(exposed, key=exposed.__getitem__)
        yield (
            f"rank {window.waited_for} has least exposed communication, {_ms(exposed[window.waited_for])} ms, "
            f"rank {most} most, {_ms(exposed[most])} ms: with equal work, the first is the one that others wait for"
        )


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1000:.3f}"


def _short(name: str, width: int = 90) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"
