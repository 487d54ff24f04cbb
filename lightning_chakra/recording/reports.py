"""What the user is told at the start and at the end of a recording. Pure."""

from collections.abc import Sequence

from lightning_chakra.recording.leftovers import format_size
from lightning_chakra.recording.ranks import named_ranks
from lightning_chakra.recording.session import Total
from lightning_chakra.recording.settings import Settings


def describe_start(
    settings: Settings, *, first: int, profiled: Sequence[int], world_size: int, root: str, moved_from: str, note: str
) -> str:
    """What will be recorded, and where to.

    Args:
        settings: What was asked for.
        first: Number of the first step of this training.
        profiled: The global ranks that record.
        world_size: Number of ranks.
        root: The folder of this run.
        moved_from: The folder that was asked for.
        note: What there is to say about the numbers of the steps.
    """
    what = "Kineto traces and Chakra execution traces"
    hint = ""
    if not settings.collect_chakra:
        what = "Kineto traces"
        hint = " (collect_chakra=True adds execution traces)"
    moved = f", since {moved_from} holds earlier traces" if root != moved_from else ""
    return (
        f"recording {settings.schedule.describe(first)}{note} on {named_ranks(profiled)} of {world_size}: "
        f"{what}{hint}, to {root}{moved}"
    )


def describe_end(total: Total, root: str) -> str:
    """What was written, and what to do with it."""
    partial = f", {total.partial} of them of a window cut short" if total.partial else ""
    lost = f"; {total.lost} could not be written, see the warnings" if total.lost else ""
    hint = (
        f". Open those in pytorch_profile with https://ui.perfetto.dev, or ask `lightning-chakra summary {root}`"
        if total.kineto
        else ""
    )
    return (
        f"wrote {total.files} {'trace' if total.files == 1 else 'traces'}{partial}, {format_size(total.bytes)}, to "
        f"{root}{lost}{hint}"
    )
