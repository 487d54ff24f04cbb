"""``lightning-chakra``: from a folder of traces to an answer. One file per command.

A command is a module with ``SUMMARY`` (one line of help), ``add_arguments(parser)`` and ``run(args) -> int`` (the exit
code). Neither torch nor lightning is imported, and what a single command needs is imported in its ``run``: the command
line has to answer at once.
"""

import importlib
import os
import sys
from argparse import ArgumentError
from collections.abc import Sequence
from types import ModuleType

from jsonargparse import ArgumentParser

from lightning_chakra._version import __version__
from lightning_chakra.cli.errors import EXIT_USAGE, EXIT_WRONG, CommandError
from lightning_chakra.traces.errors import CaptureError, ResultError

COMMANDS = ("check", "summary", "merge", "convert", "recover")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments without the program's name; ``None``: those of the process.

    Returns:
        0 only if all is well, 1 if something is wrong with the traces or the disk, 2 if the command was used wrongly;
        130 after Ctrl-C and 141 if the reader of the output went away, as shells have it.
    """
    parser, commands = _build_parser()
    try:
        args = parser.parse_args(None if argv is None else list(argv))
        return int(commands[args.command].run(args[args.command]))
    except ArgumentError as error:
        return _fail(f"{_one_line(error)} (see lightning-chakra [COMMAND] --help)", EXIT_USAGE)
    except CommandError as error:
        return _fail(_one_line(error), error.exit_code)
    except CaptureError as error:
        return _fail(_one_line(error), EXIT_USAGE)
    except ResultError as error:
        return _fail(_one_line(error), EXIT_WRONG)
    except BrokenPipeError:  # the reader of our output, `head` for instance, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # what a shell gives for a program that SIGPIPE ended
    except OSError as error:  # a folder that must not be read, a full disk
        return _fail(_one_line(error), EXIT_WRONG)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _build_parser() -> tuple[ArgumentParser, dict[str, ModuleType]]:
    parser = ArgumentParser(
        prog="lightning-chakra",
        description="Check, summarize, merge and convert Kineto and execution traces of a distributed training.",
        exit_on_error=False,
    )
    parser.add_argument("--version", action="version", version=f"lightning-chakra {__version__}")
    subcommands = parser.add_subcommands(dest="command")
    modules = {}
    for name in COMMANDS:
        module = importlib.import_module(f"{__name__}.{name}")
        subparser = ArgumentParser(description=module.__doc__, exit_on_error=False)
        module.add_arguments(subparser)
        subcommands.add_subcommand(name, subparser, help=module.SUMMARY)
        modules[name] = module
    return parser, modules


def _fail(message: str, code: int) -> int:
    print(f"lightning-chakra: error: {message}", file=sys.stderr)  # noqa: T201 - the command line's voice
    return code


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
