"""Which ranks a command is about: ``--ranks``."""

from collections.abc import Collection

from jsonargparse import ArgumentParser

from lightning_chakra.cli.errors import CommandError
from lightning_chakra.ranks import named_ranks, parse_ranks


def add_ranks_argument(parser: ArgumentParser) -> None:
    """Declare ``--ranks``."""
    parser.add_argument("--ranks", default="", metavar="LIST", help='which ranks, such as "0,8-15"; default: all')


def wanted_ranks(ranks: str, have: Collection[int]) -> list[int]:
    """The ranks that ``--ranks`` names, ascending; all that there are if it names none.

    Raises:
        CommandError: It cannot be read, or there are no traces of one of them.
    """
    try:
        wanted = sorted(set().union(*parse_ranks(ranks))) or sorted(have)
    except ValueError as error:
        raise CommandError(str(error).replace("profile_ranks", "--ranks")) from None
    if missing := [rank for rank in wanted if rank not in have]:
        raise CommandError(
            f"there are no traces of {named_ranks(missing)}, only of {named_ranks(sorted(have)) if have else 'none'}"
        )
    return wanted
