"""One time for all ranks: how far the clocks of their hosts are apart. Pure.

Ranks of one host share its clock. Between hosts, the ends of a collective in which every member waits for all others
(all-reduce, all-gather, ...) are the same moment up to some microseconds; where there are none, the starts of the steps
stand in.
"""

import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Method = Literal["auto", "clock", "collectives", "steps"]
Group: TypeAlias = tuple[Hashable, ...]
"""What identifies a series of collectives: window, process group, its ranks, the operation."""


@dataclass(frozen=True)
class RankTimes:
    """The moments of one rank that others may share, by its own clock.

    Attributes:
        rank: Global rank.
        host: Name of its host; ``None`` where the trace does not tell.
        steps: Start of each step, ns.
        collectives: For each series its collectives in their order: sequence number (``None`` if unknown) and end, ns.
    """

    rank: int
    host: str | None
    steps: Mapping[Hashable, int] = field(default_factory=dict)
    collectives: Mapping[Group, Sequence[tuple[int | None, int]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Alignment:
    """How the clocks were brought together.

    Attributes:
        offsets: What to add to the times of each rank, ns.
        hosts: Number of clocks; a rank whose host is unknown counts as a host of its own.
        nameless: Number of ranks whose host is unknown.
        method: ``"clock"`` (one host), ``"collectives"``, ``"steps"``, both joined by ``+`` or ``"none"``.
        unaligned: Ranks that share nothing with the others; their clocks were left as they are.
        judged_by: What the residuals are measured on: ``"collectives"``, ``"steps"`` or ``"nothing"``.
        moments: How many shared moments that were.
        residual_us: Median over these moments of the spread between the ranks after the alignment, µs.
        residual_max_us: The largest such spread, µs.
    """

    offsets: dict[int, int]
    hosts: int
    nameless: int
    method: str
    unaligned: tuple[int, ...]
    judged_by: str
    moments: int
    residual_us: float | None
    residual_max_us: float | None


def align(ranks: Sequence[RankTimes], method: Method = "auto") -> Alignment:
    """Find the offset of each rank's clock.

    Args:
        ranks: All ranks. The host of the first one keeps its time.
        method: ``"auto"``: by the clock within a host; between hosts by collectives, else by steps. ``"clock"``: trust
            all clocks. ``"collectives"`` and ``"steps"``: by these, and even between the ranks of one host.
    """
    collectives = _shared(_collective_moments(ranks))
    steps = _shared({step: {r.rank: r.steps[step] for r in ranks if step in r.steps} for step in _steps(ranks)})
    units = _units(ranks, per_rank=method in ("collectives", "steps"))
    offsets = dict.fromkeys(units[0], 0)
    used = []
    if method == "clock" or len(units) == 1:
        offsets = {r.rank: 0 for r in ranks}
        used.append("clock")
    for name, moments in (("collectives", collectives), ("steps", steps)):
        if len(offsets) < len(ranks) and method in ("auto", name) and _spread_offsets(offsets, units, moments):
            used.append(name)
    unaligned = tuple(r.rank for r in ranks if r.rank not in offsets)
    offsets.update(dict.fromkeys(unaligned, 0))
    judged_by, moments = ("collectives", collectives) if collectives else ("steps", steps) if steps else ("nothing", {})
    spreads = [_spread(times, offsets) / 1000 for times in moments.values()]
    return Alignment(
        offsets,
        len(_units(ranks, per_rank=False)),
        sum(rank.host is None for rank in ranks),
        "+".join(used) or "none",
        unaligned,
        judged_by,
        len(spreads),
        statistics.median(spreads) if spreads else None,
        max(spreads, default=None),
    )


def _units(ranks: Sequence[RankTimes], *, per_rank: bool) -> list[list[int]]:
    """The ranks by clock, in the order of the ranks."""
    units: dict[Hashable, list[int]] = defaultdict(list)
    for rank in ranks:
        units[rank.host if rank.host is not None and not per_rank else (rank.rank,)].append(rank.rank)
    return list(units.values())


def _steps(ranks: Sequence[RankTimes]) -> list[Hashable]:
    return list(dict.fromkeys(step for rank in ranks for step in rank.steps))


def _collective_moments(ranks: Sequence[RankTimes]) -> dict[Hashable, dict[int, int]]:
    """The ends of each single collective by rank.

    Without sequence numbers the n-th collective of a series is the n-th on all ranks only if all have equally many;
    where they differ, some are missing at either end, and the series tells nothing.
    """
    series: dict[Group, dict[int, Sequence[tuple[int | None, int]]]] = defaultdict(dict)
    for rank in ranks:
        for group, ends in rank.collectives.items():
            series[group][rank.rank] = ends
    moments: dict[Hashable, dict[int, int]] = defaultdict(dict)
    for group, members in series.items():
        numbered = all(number is not None for ends in members.values() for number, _ in ends)
        if not numbered and len({len(ends) for ends in members.values()}) > 1:
            continue
        for member, ends in members.items():
            for index, (number, end) in enumerate(ends):
                # Kernels of one coalesced collective share its number; the last one ends it.
                key = (group, number if numbered else index)
                moments[key][member] = max(end, moments[key].get(member, end))
    return moments


def _shared(moments: Mapping[Hashable, dict[int, int]]) -> dict[Hashable, dict[int, int]]:
    return {key: times for key, times in moments.items() if len(times) > 1}


def _spread_offsets(
    offsets: dict[int, int], units: Sequence[list[int]], moments: Mapping[Hashable, dict[int, int]]
) -> bool:
    """Align the units that share moments with an aligned one, then those that share moments with these, and so on."""
    found = False
    while True:
        shares: list[tuple[int, list[int], int]] = []
        for unit in units:
            if unit[0] not in offsets and (differences := _differences(offsets, unit, moments.values())):
                shares.append((len(differences), unit, statistics.median_low(differences)))
        if not shares:
            return found
        _, unit, offset = max(shares, key=lambda share: share[0])
        offsets.update(dict.fromkeys(unit, offset))
        found = True


def _differences(offsets: Mapping[int, int], unit: list[int], moments: Iterable[dict[int, int]]) -> list[int]:
    differences = []
    for times in moments:
        known = [time + offsets[rank] for rank, time in times.items() if rank in offsets]
        own = [times[rank] for rank in unit if rank in times]
        if known and own:
            differences.append(statistics.median_low(known) - statistics.median_low(own))
    return differences


def _spread(times: Mapping[int, int], offsets: Mapping[int, int]) -> int:
    moved = [time + offsets[rank] for rank, time in times.items()]
    return max(moved) - min(moved)
