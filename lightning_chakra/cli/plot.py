"""The steps of each rank and the operators, drawn.

Altair writes PNG without a browser and HTML that needs no network, both through vl-convert (the extra ``plot``).
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from lightning_chakra.cli.errors import CommandError, missing_extra

if TYPE_CHECKING:
    from lightning_chakra.analysis.summary import Summary

_PARTS = ("compute", "exposed communication", "copies", "idle")
_HOST_PARTS = ("step", "validation", "between steps")
_COLORS = {
    "compute": "#4c78a8",
    "exposed communication": "#e45756",
    "copies": "#f2cf5b",
    "idle": "#d9d9d9",
    "step": "#4c78a8",
    "validation": "#b279a2",
    "between steps": "#d9d9d9",
}


def check(path: str) -> None:
    """See that ``path`` can be drawn to, before the traces are read.

    Raises:
        CommandError: Neither PNG nor HTML, no such folder, or the extra is missing.
    """
    if not path.endswith((".png", ".html")):
        raise CommandError(f"--plot {path}: the name must end in .png or .html")
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise CommandError(f"--plot {path}: no such folder")
    try:
        importlib.import_module("altair")
        importlib.import_module("vl_convert")
    except ImportError:
        raise missing_extra("altair", "plot", "--plot") from None


def draw(windows: "list[Summary]", path: str, count: int) -> None:
    """Draw all windows into one file.

    Args:
        windows: What to draw.
        path: ``*.png`` or ``*.html``.
        count: Number of operators.

    Raises:
        CommandError: There is nothing to draw, or the file cannot be written.
    """
    altair: Any = importlib.import_module("altair")
    charts = [chart for window in windows for chart in _charts(altair, window, count)]
    if not charts:
        raise CommandError("nothing to draw: neither steps nor operators in the traces")
    whole = altair.vconcat(*charts).resolve_scale(color="independent")
    try:
        if path.endswith(".png"):
            whole.save(path, format="png", scale_factor=2)
        else:
            whole.save(path, format="html", inline=True)
    except OSError as error:
        raise CommandError(f"--plot {path}: {error}") from error


def steps_data(window: "Summary") -> list[dict[str, Any]]:
    """One record per rank, step and part of its time, ms."""
    records = []
    for rank in window.ranks:
        for step in rank.steps:
            if step.device is not None:
                split = step.device
                values = dict(zip(_PARTS, (split.compute, split.communication, split.copies, split.idle), strict=True))
            else:
                between = 0.0 if step.period_us is None else step.period_us - step.mark_us - step.validation_us
                values = dict(zip(_HOST_PARTS, (step.mark_us, step.validation_us, max(0.0, between)), strict=True))
            records += [
                {"rank": rank.label, "step": step.number, "part": part, "order": order, "ms": value / 1000}
                for order, (part, value) in enumerate(values.items())
            ]
    return records


def _charts(altair: Any, window: "Summary", count: int) -> list[Any]:
    from lightning_chakra.analysis.summary import top

    where = "" if window.name == "." else f", {window.name}"
    charts = []
    if records := steps_data(window):
        parts = [part for part in _COLORS if any(record["part"] == part for record in records)]
        color = altair.Scale(domain=parts, range=[_COLORS[part] for part in parts])
        charts.append(
            altair.Chart(altair.Data(values=records), title=f"Time per rank and step{where}")
            .mark_bar()
            .encode(
                x=altair.X("ms:Q", title="ms", stack=True),
                y=altair.Y("rank:N", title="rank", sort=[rank.label for rank in window.ranks]),
                row=altair.Row("step:O", title="step"),
                color=altair.Color("part:N", title=None, scale=color),
                order="order:Q",
                tooltip=["rank:N", "step:O", "part:N", altair.Tooltip("ms:Q", format=".3f")],
            )
            .properties(width=700, height=altair.Step(18))
        )
    for title, operators in (("Kernels and copies", window.kernels), ("Operators, self time", window.host)):
        if best := top(operators, count):
            values = [{"name": name, "calls": o.calls, "ms": o.self_us / 1000} for name, o in best]
            charts.append(
                altair.Chart(altair.Data(values=values), title=f"{title}, all ranks{where}")
                .mark_bar(color="#4c78a8")
                .encode(
                    x=altair.X("ms:Q", title="ms"),
                    y=altair.Y("name:N", title=None, sort="-x", axis=altair.Axis(labelLimit=350)),
                    tooltip=["name:N", "calls:Q", altair.Tooltip("ms:Q", format=".3f")],
                )
                .properties(width=700, height=altair.Step(18))
            )
    return charts
