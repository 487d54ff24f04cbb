"""One timeline of all ranks for Perfetto.

Each rank gets named and sorted processes of its own, its flows keep to themselves, and the clocks of several hosts are
brought together. How well is printed: the spread of moments that the ranks share.
"""

import json
from dataclasses import asdict

from jsonargparse import ArgumentParser, Namespace

from lightning_chakra.cli.arguments import add_jobs_argument, add_ranks_argument
from lightning_chakra.cli.errors import EXIT_OK, EXIT_WRONG
from lightning_chakra.recording.ranks import format_ranks, named_ranks
from lightning_chakra.traces.clocks import Alignment

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
    """Merge, say how well, and return 0 if all clocks are aligned, else 1."""
    from lightning_chakra.transform.merge import merge

    merged = merge(
        args.path, args.output, ranks=args.ranks, method=args.align, overwrite=args.overwrite, jobs=args.jobs
    )
    alignment = merged.alignment
    if args.json:
        content = asdict(merged)
        content["alignment"]["offsets_ns"] = content["alignment"].pop("offsets")
        print(json.dumps(content, indent=2))  # noqa: T201 - the command's output
    else:
        print(f"{merged.output}: {merged.bytes / 1e6:.3g} MB, {named_ranks(merged.ranks)}")  # noqa: T201
        print(_describe(alignment))  # noqa: T201
        if merged.overlapping_slices:
            print(  # noqa: T201
                f"{merged.overlapping_slices} slices run at the same time as others of their thread: they have rows "
                "of their own"
            )
        if merged.incomplete_slices:
            print(  # noqa: T201
                f"{merged.incomplete_slices} slices had no duration, process or thread in their trace; they are drawn "
                "without"
            )
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
