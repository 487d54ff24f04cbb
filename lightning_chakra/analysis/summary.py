"""What happened in a window: its ranks put together."""

import dataclasses
import statistics
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lightning_chakra.analysis.activity import Collective, Operator, RankActivity
from lightning_chakra.analysis.collecting import read_activity
from lightning_chakra.analysis.results import Result
from lightning_chakra.traces.captures import Capture
from lightning_chakra.traces.errors import CaptureError
from lightning_chakra.traces.jobs import map_ranks
from lightning_chakra.traces.selection import wanted_ranks


@dataclass
class Spread:
    """How far apart the ranks are in one step, or over all (mean of their steps).

    Attributes:
        step: The step; ``None``: over all steps.
        slowest: Label of the slowest rank.
        slowest_us: Length of its mark, µs.
        fastest: Label of the fastest rank.
        fastest_us: Length of its mark, µs.
        median_us: Median over the ranks, µs.
    """

    step: int | None
    slowest: str
    slowest_us: float
    fastest: str
    fastest_us: float
    median_us: float


@dataclass
class Summary(Result):
    """What happened in one window.

    Attributes:
        name: The window below the folder that was asked for.
        ranks: Its ranks.
        spread: How far apart the ranks are, over all steps and in each; empty with fewer than two ranks.
        waited_for: The rank that spent least time in exposed communication, hence the one that others waited for;
            ``None``: no communication, or one rank.
        ranges: User ranges of all ranks together.
        host: Operators and runtime calls of all ranks together.
        kernels: Kernels and copies of all ranks together.
        collectives: Collectives of all ranks together.
    """

    SCHEMA: ClassVar[str] = "lightning-chakra/summary/1"

    name: str
    ranks: list[RankActivity]
    spread: list[Spread] = field(default_factory=list)
    waited_for: str | None = None
    ranges: dict[str, Operator] = field(default_factory=dict)
    host: dict[str, Operator] = field(default_factory=dict)
    kernels: dict[str, Operator] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)

    def to_dict(self, most: int | None = None) -> dict[str, Any]:
        """See :meth:`Result.to_dict`; at most ``most`` ranges, operators and kernels, by self time."""

        def operators(of: dict[str, Operator]) -> list[dict[str, Any]]:
            return [{"name": name, **dataclasses.asdict(operator)} for name, operator in top(of, most)]

        content = super().to_dict()
        for owner, record in zip((self, *self.ranks), (content, *content["ranks"]), strict=True):
            record.update({key: operators(getattr(owner, key)) for key in ("ranges", "host", "kernels")})
        return content


def summarize(
    capture: Capture, *, ranks: "int | str | Sequence[int]" = "", jobs: int = 0, executor: Executor | None = None
) -> Summary:
    """What happened in one window.

    Args:
        capture: One of :func:`lightning_chakra.analysis.captures`.
        ranks: Which ranks, as ``profile_ranks``; empty means all.
        jobs: Processes at a time; 0: one per CPU, at most 8.
        executor: What reads the ranks instead of processes of this machine.

    Raises:
        CaptureError: There are no Kineto traces, or none of one of the ranks.
    """
    return summarize_all([capture], ranks=ranks, jobs=jobs, executor=executor)[0]


def summarize_all(
    captures: Sequence[Capture],
    *,
    ranks: "int | str | Sequence[int]" = "",
    jobs: int = 0,
    executor: Executor | None = None,
) -> list[Summary]:
    """The same for several windows, their ranks all at the same time; windows without such ranks are left out."""
    tasks = [(index, trace) for index, capture in enumerate(captures) for trace in capture.kineto]
    if not tasks:
        raise CaptureError("there are no Kineto traces: only those have times")
    named = bool(ranks.strip() if isinstance(ranks, str) else ranks != [])
    if named:
        wanted = wanted_ranks(ranks, {trace.rank for _, trace in tasks if trace.rank is not None})
        tasks = [(index, trace) for index, trace in tasks if trace.rank in wanted]
    activities = map_ranks(read_activity, [trace for _, trace in tasks], jobs, executor)
    summaries = []
    for index, capture in enumerate(captures):
        mine = [activity for (owner, _), activity in zip(tasks, activities, strict=True) if owner == index]
        if mine or not named:
            summaries.append(put_together(capture, mine))
    return summaries


def put_together(capture: Capture, ranks: list[RankActivity]) -> Summary:
    """Put the ranks of a window together."""
    window = Summary(capture.name, ranks)
    read = [rank for rank in ranks if rank.error is None]
    with_steps = {rank.label: rank.steps for rank in read if rank.steps}
    if len(with_steps) > 1:
        means = {label: statistics.fmean(step.mark_us for step in steps) for label, steps in with_steps.items()}
        window.spread.append(_spread(None, means))
        for number in sorted({step.number for steps in with_steps.values() for step in steps}):
            marks = {
                label: step.mark_us for label, steps in with_steps.items() for step in steps if step.number == number
            }
            if len(marks) > 1:
                window.spread.append(_spread(number, marks))
    exposed = {rank.label: rank.device.communication for rank in read if rank.device is not None}
    if len(exposed) > 1 and max(exposed.values()) > 0:
        window.waited_for = min(exposed, key=exposed.__getitem__)
    collectives: dict[tuple[str, str, int | None, str], Collective] = {}
    for rank in read:
        for mine, all_of_them in (
            (rank.ranges, window.ranges),
            (rank.host, window.host),
            (rank.kernels, window.kernels),
        ):
            for name, operator in mine.items():
                together = all_of_them.setdefault(name, Operator())
                together.calls += operator.calls
                together.self_us += operator.self_us
                together.total_us += operator.total_us
        for own in rank.collectives:
            key = (own.name, own.group, own.group_size, own.dtype)
            collective = collectives.setdefault(key, Collective(*key))
            collective.calls += own.calls
            collective.time_us += own.time_us
            collective.in_bytes = _sum(collective.in_bytes, own.in_bytes)
            collective.out_bytes = _sum(collective.out_bytes, own.out_bytes)
    window.collectives = sorted(collectives.values(), key=lambda collective: -collective.time_us)
    return window


def top(operators: dict[str, Operator], count: int | None) -> list[tuple[str, Operator]]:
    """The operators with the most self time."""
    return sorted(operators.items(), key=lambda item: (-item[1].self_us, item[0]))[:count]


def _spread(step: int | None, marks: dict[str, float]) -> Spread:
    slowest, fastest = max(marks, key=marks.__getitem__), min(marks, key=marks.__getitem__)
    return Spread(step, slowest, marks[slowest], fastest, marks[fastest], statistics.median(marks.values()))


def _sum(first: int | None, second: int | None) -> int | None:
    return second if first is None else first if second is None else first + second
