"""Finish what a killed process left in its scratch folder: its raw files become published traces.

A raw file that is whole is compressed and published under the name it was meant for, byte by byte. An execution trace
that was cut gets its end, and a mark that it is partial. A Kineto trace that was cut, or that was still in the memory
of the process, is lost.
"""

import dataclasses
import json
import os
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from lightning_chakra.cli.errors import EXIT_OK, EXIT_WRONG

if TYPE_CHECKING:
    from lightning_chakra.transform.recover import Leftover, Outcome

SUMMARY = "publish what a killed process left in its scratch folder"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "path", metavar="PATH", help="a scratch folder (lightning-chakra-*), the folder it lies in, or a step-* in it"
    )
    parser.add_argument(
        "--dirpath", metavar="DIR", help="publish below this folder or URL instead of where it was meant"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="take the owner for dead: scratch folders of other hosts, or a process number that is in use again",
    )
    parser.add_argument("--list", action="store_true", help="only tell what dead processes left, of all users")
    parser.add_argument(
        "--all-users", action="store_true", help="in a folder of many, take up those of other users, too"
    )
    parser.add_argument("--discard", action="store_true", help="remove what cannot be recovered")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def run(args: Namespace) -> int:
    """Recover, print what became of each file, and return 0 if nothing was lost or kept, else 1."""
    from lightning_chakra.transform.recover import left_to_others, list_leftovers, recover

    if args.list:
        return _list(list_leftovers(args.path), as_json=args.json)
    others = [] if args.all_users else left_to_others(args.path)
    outcomes = recover(
        args.path, dirpath=args.dirpath, force=args.force, discard=args.discard, all_users=args.all_users
    )
    if others and not args.json:
        print(f"left alone: {len(others)} scratch folders of other users (--list tells them, --all-users takes them)")  # noqa: T201
    if args.json:
        print(json.dumps([dataclasses.asdict(outcome) for outcome in outcomes], indent=1))  # noqa: T201 - its output
    elif not outcomes:
        is_one = os.path.isfile(os.path.join(args.path, "owner.json"))
        why = "" if is_one else ": no scratch folder lightning-chakra-rank* with raw files is in it"
        print(f"nothing was left behind in {args.path}{why}")  # noqa: T201
    else:
        for outcome in outcomes:
            print(_describe(outcome))  # noqa: T201
    return EXIT_WRONG if any(outcome.status in ("kept", "lost") for outcome in outcomes) else EXIT_OK


def _list(leftovers: "list[Leftover]", *, as_json: bool) -> int:
    if as_json:
        print(json.dumps([dataclasses.asdict(left) for left in leftovers], indent=1))  # noqa: T201 - its output
    for left in [] if as_json else leftovers:
        whose = "" if left.ours else ", of another user"
        print(f"{left.folder} (rank {left.rank}{whose}): {left.holds}")  # noqa: T201
    if not leftovers and not as_json:
        print("nothing was left behind")  # noqa: T201
    return EXIT_OK


def _describe(outcome: "Outcome") -> str:
    size = "" if outcome.bytes is None else f" ({outcome.bytes / 1e6:.3g} MB)"
    status = {"recovered": "recovered", "published": "was published", "kept": "KEPT", "lost": "LOST"}[outcome.status]
    if outcome.partial:
        status = "recovered in part"
    return f"{status}: {outcome.target}{size}" + (f": {outcome.note}" if outcome.note else "")
