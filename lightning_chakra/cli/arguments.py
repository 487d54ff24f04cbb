"""Arguments that several commands share."""

from jsonargparse import ArgumentParser


def add_jobs_argument(parser: ArgumentParser) -> None:
    """Declare ``--jobs``."""
    parser.add_argument(
        "--jobs",
        type=int,
        default=0,
        metavar="N",
        help="processes, each reads one rank at a time; 0: one per CPU, at most 8",
    )


def add_ranks_argument(parser: ArgumentParser) -> None:
    """Declare ``--ranks``."""
    parser.add_argument("--ranks", default="", metavar="LIST", help='which ranks, such as "0,8-15"; default: all')
