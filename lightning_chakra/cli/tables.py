"""Tables for the terminal."""

import sys
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDTH_OF_FILES = 160
"""Characters per line where the output is not a terminal."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # for main to handle; rich would exit with 1, which says that the traces are bad


def console() -> Console:
    """Standard output. Nothing in what is printed is taken for markup: names of operators have brackets."""
    return _Console(
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=False,
        width=None if sys.stdout.isatty() else _WIDTH_OF_FILES,
    )


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], text_columns: int = 1) -> Table:
    """A table whose first ``text_columns`` columns are text and the others numbers."""
    result = Table(title=Text(title, "bold"), box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for index, name in enumerate(columns):
        is_text = index < text_columns
        result.add_column(Text(name), justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for row in rows:
        result.add_row(*(cell if isinstance(cell, Text) else Text(_printable(str(cell))) for cell in row))
    return result


def _printable(text: str) -> str:
    """Names may hold anything: a newline would break the row, an escape would reach the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
