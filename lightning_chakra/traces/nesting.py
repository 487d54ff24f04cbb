"""Slices that nest: what Perfetto demands of the slices of one thread, and what Kineto does not always give. Pure.

Perfetto drops a slice that begins inside another one and ends after it (its statistic
``slice_drop_overlapping_complete_event``). Kineto writes such pairs for two reasons: times rounded to the microsecond
(or converted from another clock), where a few hundred nanoseconds are cut off; and slices that really run at the same
time on what it calls one thread, such as annotations of a GPU stream, which need a row of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ROUNDING_NS = 2000
"""An overlap up to this is taken for rounding: start and end are off by up to 1 µs each in traces with whole µs."""


@dataclass(frozen=True)
class Fix:
    """The new place of one slice.

    Attributes:
        start: ns.
        duration: ns.
        lane: 0 for the row of the thread itself, 1, 2, ... for additional rows.
    """

    start: int
    duration: int
    lane: int


def nest(starts: Sequence[int], durations: Sequence[int], rounding: int = ROUNDING_NS) -> dict[int, Fix]:
    """Find the slices of one thread that do not nest, and where to put them.

    Args:
        starts: Start of each slice, ns, in the order of the file.
        durations: Duration of each slice, ns.
        rounding: The longest overlap that is cut off, ns. A slice with a longer one gets another lane.

    Returns:
        The slices to change, by position. Slices that start together also nest in the order of the file, parents first:
        a child that comes before its parent starts one nanosecond later.
    """
    fixes: dict[int, Fix] = {}
    # Per lane the open slices, outermost first: [start, end, position]
    lanes: list[list[list[int]]] = [[]]
    order = sorted(range(len(starts)), key=lambda i: (starts[i] << 64) - durations[i])
    for position in order:
        for lane, stack in enumerate(lanes):
            if _place(stack, position, starts[position], durations[position], lane, rounding, fixes):
                break
        else:
            lanes.append([])
            _place(lanes[-1], position, starts[position], durations[position], len(lanes) - 1, rounding, fixes)
    return fixes


def _place(
    stack: list[list[int]], position: int, start: int, duration: int, lane: int, rounding: int, fixes: dict[int, Fix]
) -> bool:
    """Put a slice on the stack of a lane, if it fits there; cut what sticks out by rounding."""
    end = start + duration
    kept = len(stack)
    while kept and (stack[kept - 1][1] <= start or stack[kept - 1][1] < min(end, start + rounding + 1)):
        kept -= 1
    if kept and end - stack[kept - 1][1] > rounding:
        return False
    for open_start, open_end, open_position in stack[kept:]:
        if open_end > start:  # it goes over into this one by rounding only: they follow each other
            fixes[open_position] = Fix(open_start, max(0, start - open_start), lane)
    del stack[kept:]
    new = Fix(start, duration, lane)
    if stack:
        parent_start, parent_end, parent_position = stack[-1]
        late = int(position < parent_position and start <= parent_start)
        begin = min(max(start, parent_start + late), parent_end)
        new = Fix(begin, max(0, min(end, parent_end) - begin), lane)
    if new != Fix(start, duration, 0):
        fixes[position] = new
    stack.append([new.start, new.start + new.duration, position])
    return True
