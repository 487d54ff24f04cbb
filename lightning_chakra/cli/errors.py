"""What a command says when it cannot go on: one line and an exit code."""

EXIT_OK = 0
EXIT_WRONG = 1
"""Something is wrong with the traces."""
EXIT_USAGE = 2
"""The command was used wrongly: no such folder, no traces there, an extra is missing."""


class CommandError(Exception):
    """Ends a command with one line on standard error.

    Args:
        message: What is wrong and what to do about it.
        exit_code: ``EXIT_USAGE`` or ``EXIT_WRONG``.
    """

    def __init__(self, message: str, exit_code: int = EXIT_USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def missing_extra(package: str, extra: str, purpose: str) -> CommandError:
    """The error for a package that belongs to an extra that is not installed."""
    return CommandError(f"{purpose} needs {package}: pip install 'lightning-chakra[{extra}]'")
