"""What all answers have in common: one line, tables of plain values, a versioned dictionary."""

import dataclasses
import html
import importlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from lightning_chakra.traces.errors import CaptureError

if TYPE_CHECKING:
    import pandas

Record: TypeAlias = dict[str, Any]
"""A row of a table: plain values by column, units in the names."""

_MOST_ROWS = 60
"""Rows that a notebook shows of a table."""


class Result:
    """The answer to a question about one capture.

    Its subclasses are frozen dataclasses with ``repr=False``, for theirs would be as long as the answer. They say
    :meth:`headline` and :meth:`tables`; all the rest follows.

    Attributes:
        SCHEMA: Name and version of what :meth:`to_dict` gives. A field that is added leaves the version as it is; one
            that is removed, renamed or changed in meaning raises it.
    """

    SCHEMA: ClassVar[str]

    def headline(self) -> str:
        """The answer in one line, without the name of its kind."""
        raise NotImplementedError

    def tables(self) -> dict[str, list[Record]]:
        """The answer as tables by name, the most important first; a table may be empty."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The answer in plain values, as ``--json`` prints it for each window."""
        assert dataclasses.is_dataclass(self)
        return {"schema": self.SCHEMA, **dataclasses.asdict(self)}

    def to_pandas(self, table: str | None = None) -> "pandas.DataFrame":
        """One of :meth:`tables` as a data frame.

        Args:
            table: Its name; ``None``: the first.

        Raises:
            ModuleNotFoundError: pandas is not installed.
            ValueError: There is no table of that name.
        """
        try:
            frames: Any = importlib.import_module("pandas")
        except ImportError:
            raise ModuleNotFoundError("to_pandas() needs pandas: pip install pandas", name="pandas") from None
        tables = self.tables()
        name = next(iter(tables)) if table is None else table
        if name not in tables:
            raise CaptureError(f"to_pandas({table!r}): the tables of a {type(self).__name__} are {', '.join(tables)}")
        frame: pandas.DataFrame = frames.DataFrame.from_records(tables[name])
        return frame

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.headline()}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        tables = "".join(html_table(rows, name) for name, rows in self.tables().items() if rows)
        return f"<div><p><b>{html.escape(self.headline())}</b></p>{tables}</div>"


def html_table(rows: Sequence[Record], caption: str = "") -> str:
    """A table for a notebook, of the first rows if they are many.

    Args:
        rows: Its rows; the columns are those of the first.
        caption: What stands above it.
    """
    if len(rows) > _MOST_ROWS:
        caption = f"{caption} ({_MOST_ROWS} of {len(rows)})".lstrip()
    columns = list(rows[0]) if rows else []
    lines = [f"<caption>{html.escape(caption)}</caption>"] if caption else []
    lines.append(_html_row("th", columns))
    lines += [_html_row("td", (row.get(column) for column in columns)) for row in rows[:_MOST_ROWS]]
    return f"<table>{''.join(lines)}</table>"


def _html_row(tag: str, cells: Iterable[object]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(_cell(cell))}</{tag}>' for cell in cells)}</tr>"


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,.1f}" if isinstance(value, float) else str(value)
