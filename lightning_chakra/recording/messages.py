"""The two ways to speak to the user: an information line on the log, and a warning that can never become an error."""

import logging
import sys
import warnings

log = logging.getLogger("lightning_chakra")


class ChakraProfilerWarning(UserWarning):
    """Something about the profiling did not work; the training goes on."""


def info(message: str) -> None:
    """Show one line of information."""
    _show_by_default()
    log.info(message)


def warn(message: str) -> None:
    """Warn once. Under ``-W error`` the text goes to the log: a profiler's trouble must not end a training."""
    try:
        warnings.warn(message, ChakraProfilerWarning, stacklevel=2)
    except ChakraProfilerWarning:
        _show_by_default()
        log.warning(message)


def _show_by_default() -> None:
    """Show information lines unless the application has set up logging itself; Lightning does the same for its own."""
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    if not log.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        log.addHandler(handler)
        log.propagate = False
