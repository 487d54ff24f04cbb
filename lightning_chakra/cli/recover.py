"""Finish what a killed process left behind."""

from jsonargparse import ArgumentParser, Namespace

from lightning_chakra.cli.errors import CommandError

SUMMARY = "Finish what a killed process left behind"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("path", metavar="DIR", help="folder with traces, a local path or an fsspec URL")


def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    raise CommandError("this command is not there yet")
