"""From arguments to a running session: what all ranks agree on before the first step. Knows no trainer."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_chakra._version import __version__
from lightning_chakra.recording import storage
from lightning_chakra.recording.barrier import FlushBarrier
from lightning_chakra.recording.layout import Kind, PublishedTrace, TraceLayout, is_occupied, is_url, run_folder
from lightning_chakra.recording.leftovers import describe_leftover
from lightning_chakra.recording.messages import warn
from lightning_chakra.recording.ranks import resolve_ranks
from lightning_chakra.recording.recorder import TraceRecorder
from lightning_chakra.recording.scratch import Scratch, leftovers, owner_rank
from lightning_chakra.recording.session import ProfilingSession, Recording
from lightning_chakra.recording.settings import Settings
from lightning_chakra.recording.writer import TraceWriter, describe_error

_GIB = 1 << 30
_UNREADABLE = 1 << 30  # in place of the number of a run, more than any folder holds


@dataclass(frozen=True)
class Place:
    """Where this process stands in its job.

    Attributes:
        global_rank: Its rank, from 0.
        world_size: Number of ranks of the job.
        local_rank: Its rank among those of this machine.
        ranks_here: Number of ranks on this machine.
        strategy: What the trace says of how the job is distributed, such as ``DDPStrategy``.
        make_barrier: Builds what the ranks meet at. A collective.
        all_agree: Whether it is true on all ranks. A collective.
    """

    global_rank: int
    world_size: int
    local_rank: int
    ranks_here: int
    strategy: str
    make_barrier: Callable[[], FlushBarrier]
    all_agree: Callable[[bool], bool]


@dataclass(frozen=True)
class Profiling:
    """What is alive during a training.

    Attributes:
        session: The session of this rank.
        dirpath: The output folder that was asked for.
        root: The folder of this run: ``dirpath``, or ``run-N`` below it.
        profiled: The global ranks that record.
        place: Where this process stands.
    """

    session: ProfilingSession
    dirpath: str
    root: str
    profiled: tuple[int, ...]
    place: Place


def open_profiling(
    settings: Settings, place: Place, dirpath: str, on_published: Callable[[PublishedTrace], None]
) -> Profiling | None:
    """Build the session of this rank; all ranks come here together.

    Args:
        settings: The same on all ranks.
        place: Where this process stands.
        dirpath: The output folder.
        on_published: Called on the writer's thread with each file that this rank published.

    Returns:
        ``None`` where nothing can be recorded; it was warned of then.

    Raises:
        ValueError: No training could use these settings here: a rank that does not exist, an unknown protocol, other
            arguments on another rank.
        RuntimeError: The ranks could not agree, and ``on_error="raise"``.
    """
    dirpath = storage.absolute(dirpath)
    storage.check(dirpath)
    barrier, dirpath, root = _meet_others(settings, place, dirpath)
    if barrier is None:
        return None
    try:
        _refuse_unlike_arguments(settings, barrier, place.global_rank)
        profiled = resolve_ranks(settings.ranks, place.world_size)
    except ValueError:  # on all ranks
        barrier.close()
        raise
    layout = TraceLayout(root, folder_per_window=settings.schedule.repeat != 1)
    _tell_leftovers(settings, place)
    recording = _recording(settings, place, layout, profiled, on_published) if place.global_rank in profiled else None
    session = ProfilingSession(
        rank=place.global_rank,
        schedule=settings.schedule,
        barrier=barrier,
        recording=recording,
        raise_errors=settings.on_error == "raise",
    )
    return Profiling(session, dirpath, root, profiled, place)


def _meet_others(settings: Settings, place: Place, dirpath: str) -> tuple[FlushBarrier | None, str, str]:
    """Build the barrier on every rank, agree on the folder and on that of this run; no barrier means no profiling.

    Whether it worked is itself agreed on: a rank that recorded while another one knows of no barrier would
    endanger the training.
    """
    barrier: FlushBarrier | None = None
    root, reason = dirpath, ""
    try:
        barrier = place.make_barrier()
        dirpath = _folder_of_rank_0(dirpath, barrier, place.global_rank)
        root = _free_run_folder(dirpath, barrier, place.global_rank)
    except Exception as error:
        reason = describe_error(error)
    if place.all_agree(not reason):
        return barrier, dirpath, root
    if barrier is not None:
        barrier.close()
    message = (
        f"rank {place.global_rank}: the ranks could not build the group on which they wait for each other "
        f"({reason or 'another rank has the reason'}). Nothing is recorded in this fit. If the machines have "
        "several networks, set GLOO_SOCKET_IFNAME to the interface that they share."
        if barrier is None
        else f"rank {place.global_rank}: the ranks could not agree on a folder below {dirpath} "
        f"({reason or 'another rank has the reason'}). Nothing is recorded in this fit."
    )
    if settings.on_error == "raise":
        raise RuntimeError(message)
    warn(message)
    return None, dirpath, root


def _folder_of_rank_0(dirpath: str, barrier: FlushBarrier, rank: int) -> str:
    """Where all ranks write. One that is computed on each, such as of a time stamp, would scatter a capture."""
    first = barrier.of_rank(0, dirpath)
    if barrier.maximum(int(first != dirpath)) and rank == 0:
        warn(
            f"`dirpath` is not the same on all ranks (of a time stamp that each takes for itself?): all of them write "
            f"to that of rank 0, {first}."
        )
    return first


def _refuse_unlike_arguments(settings: Settings, barrier: FlushBarrier, rank: int) -> None:
    """Ranks with unlike schedules would wait for each other at different steps.

    Raises:
        ValueError: A rank has other arguments than rank 0. It is raised on all of them.
    """
    mine = json.dumps(settings.describe(), sort_keys=True)
    first = barrier.of_rank(0, mine)
    unlike = barrier.maximum(rank if mine != first else 0)
    if unlike:
        ours, theirs = json.loads(first), json.loads(barrier.of_rank(unlike, mine))
        names = [name for name in ours if ours[name] != theirs.get(name)]
        raise ValueError(
            f"the profiler has other arguments on rank {unlike} than on rank 0: "
            f"{', '.join(f'{name}={theirs.get(name)!r} and not {ours[name]!r}' for name in names)}. Give all ranks the "
            "same; `profile_ranks` chooses who records."
        )


def _free_run_folder(dirpath: str, barrier: FlushBarrier, rank: int) -> str:
    """The first of ``dirpath``, ``run-1``, ``run-2``, ... that holds no traces on any rank.

    Raises:
        OSError: A rank cannot read the folder. It is raised on all of them.
    """
    index = 0
    while True:
        free = index
        fault: Exception | None = None
        try:
            # One look is enough where all ranks see the same store; a local folder may differ from machine to machine.
            if rank == 0 or not is_url(dirpath):
                while is_occupied(storage.entries(run_folder(dirpath, free))):
                    free += 1
        except Exception as error:  # the others wait below: they must hear of it
            free, fault = _UNREADABLE, error
        agreed = barrier.maximum(free)
        if agreed == _UNREADABLE:
            raise fault or OSError("another rank cannot read the folder")
        if agreed == index:
            return run_folder(dirpath, index)
        index = agreed


def _tell_leftovers(settings: Settings, place: Place) -> None:
    """Warn of what killed processes left in the scratch folder, on one rank of this machine each."""
    for folder in leftovers(_scratch_parent(settings)):
        if owner_rank(folder) % max(1, place.ranks_here) == place.local_rank:
            warn(
                f"rank {place.global_rank}: an earlier process ended before it published its traces; in {folder} "
                f"are {describe_leftover(folder)}. `lightning-chakra recover {folder}` publishes what is "
                "complete, removing the folder forgets it."
            )


def _scratch_parent(settings: Settings) -> str | None:
    return None if settings.scratch_dir is None else storage.absolute(str(settings.scratch_dir))


def _recording(
    settings: Settings,
    place: Place,
    layout: TraceLayout,
    profiled: Sequence[int],
    on_published: Callable[[PublishedTrace], None],
) -> Recording:
    kinds: tuple[Kind, ...] = ("kineto", "chakra") if settings.collect_chakra else ("kineto",)
    scratch = Scratch(_scratch_parent(settings), place.global_rank, layout, kinds)
    recorder = TraceRecorder(settings.options, scratch, _metadata(settings, place, profiled))
    published: list[PublishedTrace] = []

    def keep(trace: PublishedTrace) -> None:
        published.append(trace)
        on_published(trace)

    return Recording(recorder, TraceWriter(keep), scratch, _GIB * (4 if len(kinds) > 1 else 1), published)


def _metadata(settings: Settings, place: Place, profiled: Sequence[int]) -> dict[str, dict[str, Any]]:
    """What every trace says about itself."""
    rank, world_size = place.global_rank, place.world_size
    return {
        "lightning_chakra": {
            "version": __version__,
            "rank": rank,
            "world_size": world_size,
            "profiled_ranks": list(profiled),
            "step_unit": settings.step_unit,
            "strategy": place.strategy,
            "schedule": dataclasses.asdict(settings.schedule),
            "options": settings.describe_options(),
        },
        "distributedInfo": {"backend": "none", "rank": rank, "world_size": world_size},
    }
