"""Which ranks to profile: parsing and resolving ``profile_ranks``. Pure."""

import re
from collections.abc import Collection, Sequence

_ITEM = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?", re.ASCII)
_RULE = 'a list of global ranks such as [0, 8], or a string such as "0,8-15" or "0-255:8" (every 8th)'


def parse_ranks(profile_ranks: int | str | Collection[int]) -> tuple[range, ...]:
    """Read ``profile_ranks`` into ranges of global ranks; empty means all ranks.

    The string form is the one of ``taskset --cpu-list``: comma-separated ranks and ranges, a range with an optional
    stride.

    Raises:
        TypeError: The value is neither a list, tuple, set or range of integers nor a string.
        ValueError: A rank is negative, or the string is malformed.
    """
    if isinstance(profile_ranks, str):
        return (
            tuple(_parse_item(item.strip(), profile_ranks) for item in profile_ranks.split(","))
            if (profile_ranks.strip())
            else ()
        )
    ranks = [profile_ranks] if isinstance(profile_ranks, int) else profile_ranks
    known = isinstance(ranks, (list, tuple, range, set, frozenset))
    if not known or any(isinstance(r, bool) or not isinstance(r, int) for r in ranks):
        raise TypeError(f"`profile_ranks={profile_ranks!r}` must be {_RULE}; empty means all ranks.")
    if isinstance(ranks, (set, frozenset)):
        ranks = sorted(ranks)
    for rank in ranks:
        if rank < 0:
            raise ValueError(f"`profile_ranks={profile_ranks!r}`: rank {rank} is negative; global ranks count from 0.")
    return tuple(range(rank, rank + 1) for rank in ranks)


def _parse_item(item: str, whole: str) -> range:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise ValueError(f"`profile_ranks={whole!r}`: cannot read {item!r}. It must be {_RULE}; empty means all ranks.")
    first = int(match[1])
    last = int(match[2] or match[1])
    stride = int(match[3] or 1)
    if last < first:
        raise ValueError(f"`profile_ranks={whole!r}`: the range {item!r} ends before it begins.")
    if stride == 0:
        raise ValueError(f"`profile_ranks={whole!r}`: the stride of {item!r} must be at least 1.")
    return range(first, last + 1, stride)


def resolve_ranks(ranges: Sequence[range], world_size: int) -> tuple[int, ...]:
    """The profiled global ranks, sorted and without duplicates; all of them when ``ranges`` is empty.

    Raises:
        ValueError: A rank is not below ``world_size``.
    """
    if not ranges:
        return tuple(range(world_size))
    largest = max(r[-1] for r in ranges)
    if largest >= world_size:
        raise ValueError(
            f"`profile_ranks` names rank {largest}, but this training has world_size={world_size}: "
            f"its global ranks are 0 to {world_size - 1}."
        )
    return tuple(sorted(set().union(*ranges)))


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks in the string form of ``profile_ranks``: runs of even distance are written as ranges."""
    parts: list[str] = []
    rest = list(ranks)
    while rest:
        stride = rest[1] - rest[0] if len(rest) > 1 else 1
        length = 1
        while length < len(rest) and rest[length] - rest[length - 1] == stride:
            length += 1
        if length < 3:
            length = 1
            parts.append(str(rest[0]))
        else:
            parts.append(f"{rest[0]}-{rest[length - 1]}" + (f":{stride}" if stride > 1 else ""))
        rest = rest[length:]
    return ",".join(parts)


def named_ranks(ranks: Sequence[int]) -> str:
    """``rank 0`` or ``ranks 0-2``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + format_ranks(ranks)
