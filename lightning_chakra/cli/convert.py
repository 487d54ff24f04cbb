"""Chakra traces for ASTRA-sim: PREFIX.N.et of each rank N, through mlc-chakra's own linker and converter.

Each rank is first checked: whether its two traces are of one window, so that they can be linked. mlc-chakra itself
says "successful" when almost nothing was.
"""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from lightning_chakra.cli.arguments import add_jobs_argument, add_ranks_argument
from lightning_chakra.cli.errors import EXIT_OK, EXIT_WRONG

if TYPE_CHECKING:
    from lightning_chakra.transform.convert import Converted

SUMMARY = "PREFIX.N.et for ASTRA-sim, through mlc-chakra"


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
    from lightning_chakra.transform.convert import convert

    results = convert(
        args.path,
        args.output,
        ranks=args.ranks,
        overwrite=args.overwrite,
        keep_linked=args.keep_linked,
        jobs=args.jobs,
    )
    if args.json:
        print(json.dumps([asdict(result) for result in results], indent=1))  # noqa: T201 - the command's output
    else:
        for result in results:
            _print(result)
    return EXIT_OK if all(result.error is None and not result.warnings for result in results) else EXIT_WRONG


def _print(result: "Converted") -> None:
    if result.error is not None:
        print(f"rank {result.rank}: NOT converted: {result.error}")  # noqa: T201 - the command's output
        return
    share = "" if result.linked is None else f", {result.linked:.1%} of the operators linked"
    print(f"{result.output}: {result.bytes / 1e6:.3g} MB{share}")  # noqa: T201
    for warning in result.warnings:
        print(f"rank {result.rank}: WARNING: {warning}")  # noqa: T201
