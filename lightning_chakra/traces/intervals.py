"""Arithmetic on intervals of time. Pure.

A set of moments is a list of ``(start, end)``, ascending and disjoint; :func:`union` makes one of any intervals.
"""

from bisect import bisect_right
from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The moments that lie in any of ``intervals``."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        elif end > start:
            merged.append((start, end))
    return merged


def subtract(moments: list[Interval], others: list[Interval]) -> list[Interval]:
    """The moments of the first set that are not in the second."""
    left = []
    first = 0  # of the others that may reach into what follows
    for start, end in moments:
        while first < len(others) and others[first][1] <= start:
            first += 1
        index, at = first, start
        while index < len(others) and others[index][0] < end:
            if others[index][0] > at:
                left.append((at, others[index][0]))
            at = max(at, others[index][1])
            index += 1
        if at < end:
            left.append((at, end))
    return left


def total(moments: list[Interval], start: float = float("-inf"), end: float = float("inf")) -> float:
    """How long the moments between ``start`` and ``end`` are together."""
    index = max(0, bisect_right(moments, (start, float("inf"))) - 1)
    result = 0.0
    while index < len(moments) and moments[index][0] < end:
        result += max(0.0, min(moments[index][1], end) - max(moments[index][0], start))
        index += 1
    return result
