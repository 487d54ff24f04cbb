"""The synchronizing collectives of several ranks, matched, and who waited in them. Pure: no clock is compared.

All members of such a collective leave it at the same moment. So a member's waiting is what its own call took longer
than the shortest call of that instance, and the member with the shortest call came last.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from lightning_chakra.traces.intervals import Interval, union

Matching = Literal["seq", "order"]
Series: TypeAlias = tuple[Hashable, ...]
"""What identifies a series of collectives on all its members, such as process group and operation."""


class Call(NamedTuple):
    """One member's part in one collective.

    Attributes:
        start: By the clock of its rank, µs.
        duration: µs.
        seq: Number within the process group; ``None``: not recorded.
    """

    start: float
    duration: float
    seq: int | None = None


@dataclass(frozen=True)
class Matched:
    """Collectives of several ranks put together.

    Attributes:
        instances: Each instance's calls by rank; at least two members.
        matched_by: ``"seq"``: all by number; ``"order"``: some by their place in the series.
        unmatched: What could not be matched and why, a line each.
    """

    instances: tuple[dict[int, Call], ...]
    matched_by: Matching
    unmatched: tuple[str, ...]


def match(ranks: Mapping[int, Mapping[Series, Sequence[Call]]]) -> Matched:
    """Find which calls of different ranks are one collective.

    By number where every call of a series has one. Else the n-th call of a member is the n-th of the others, which only
    holds if all have equally many: a series in which they differ is told and left out.

    Args:
        ranks: The calls of each series, by rank.
    """
    members: dict[Series, dict[int, Sequence[Call]]] = {}
    for rank, series_of_rank in ranks.items():
        for series, calls in series_of_rank.items():
            members.setdefault(series, {})[rank] = sorted(calls)
    instances: list[dict[int, Call]] = []
    unmatched: list[str] = []
    by_order = False
    for series, calls_of in members.items():
        name = " ".join(map(str, series))
        if len(calls_of) < 2:
            unmatched.append(f"{name}: only rank {next(iter(calls_of))} recorded it")
            continue
        if all(call.seq is not None for calls in calls_of.values() for call in calls):
            instances += _by_seq(calls_of)
            continue
        counts = {rank: len(calls) for rank, calls in calls_of.items()}
        if len(set(counts.values())) > 1:
            least, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
            unmatched.append(
                f"{name}: rank {least} recorded {counts[least]} calls, rank {most} {counts[most]}, without numbers"
            )
            continue
        by_order = True
        instances += [dict(zip(calls_of, row, strict=True)) for row in zip(*calls_of.values(), strict=True)]
    return Matched(tuple(instances), "order" if by_order else "seq", tuple(unmatched))


def waits(instances: Sequence[Mapping[int, Call]]) -> dict[int, list[Interval]]:
    """When each rank waited, by its own clock: the first part of each call.

    Calls in flight at the same time wait for the same late rank: the union counts that time once.
    """
    found: dict[int, list[Interval]] = {}
    for calls in instances:
        shortest = min(call.duration for call in calls.values())
        for rank, call in calls.items():
            found.setdefault(rank, []).append((call.start, call.start + call.duration - shortest))
    return {rank: union(intervals) for rank, intervals in found.items()}


def _by_seq(calls_of: Mapping[int, Sequence[Call]]) -> list[dict[int, Call]]:
    numbered: dict[int, dict[int, Call]] = {}
    for rank, calls in calls_of.items():
        for call in calls:
            if call.seq is None:
                raise ValueError(f"a call of rank {rank} has no number")
            instance = numbered.setdefault(call.seq, {})
            if (known := instance.get(rank)) is None:
                instance[rank] = call
            else:  # kernels of one coalesced collective share its number
                end = max(known.start + known.duration, call.start + call.duration)
                instance[rank] = Call(known.start, end - known.start, call.seq)
    return [calls for calls in numbered.values() if len(calls) > 1]
