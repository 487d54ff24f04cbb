"""Which ranks a question is about."""

from collections.abc import Collection, Sequence

from lightning_chakra.recording.ranks import named_ranks, parse_ranks
from lightning_chakra.traces.errors import CaptureError


def wanted_ranks(ranks: int | str | Sequence[int], have: Collection[int]) -> list[int]:
    """The ranks that ``ranks`` names, as ``profile_ranks`` does, ascending; all that there are if it names none.

    Raises:
        CaptureError: It cannot be read, or there are no traces of one of them.
    """
    try:
        wanted = sorted(set().union(*parse_ranks(ranks))) or sorted(have)
    except ValueError as error:
        raise CaptureError(str(error).replace("profile_ranks", "ranks")) from None
    if missing := [rank for rank in wanted if rank not in have]:
        raise CaptureError(
            f"there are no traces of {named_ranks(missing)}, only of {named_ranks(sorted(have)) if have else 'none'}"
        )
    return wanted
