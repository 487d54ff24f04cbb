"""What happened in a window: its ranks put together."""

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lightning_chakra.analysis.activity import Collective, Operator, RankActivity, Step
from lightning_chakra.analysis.collecting import read_activity
from lightning_chakra.analysis.results import Record, Result
from lightning_chakra.analysis.rules import numbers
from lightning_chakra.traces.captures import Capture
from lightning_chakra.traces.errors import CaptureError
from lightning_chakra.traces.jobs import map_ranks
from lightning_chakra.traces.selection import wanted_ranks


@dataclass(frozen=True)
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


@dataclass(frozen=True, repr=False)
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
    ranks: tuple[RankActivity, ...]
    spread: tuple[Spread, ...] = ()
    waited_for: str | None = None
    ranges: dict[str, Operator] = field(default_factory=dict)
    host: dict[str, Operator] = field(default_factory=dict)
    kernels: dict[str, Operator] = field(default_factory=dict)
    collectives: tuple[Collective, ...] = ()

    @property
    def read(self) -> tuple[RankActivity, ...]:
        """The ranks whose files could be read."""
        return tuple(rank for rank in self.ranks if rank.error is None)

    @property
    def title(self) -> str:
        """The window by its folder and its steps; by its steps alone if it is the only one of its folder."""
        marked = {step.number for rank in self.read for step in rank.steps}
        steps = f"{'step' if len(marked) == 1 else 'steps'} {numbers(list(marked))}" if marked else "no marked steps"
        return steps if self.name == "." else f"{self.name}: {steps}"

    def headline(self) -> str:
        """See :meth:`Result.headline`."""
        unread = f", {len(self.ranks) - len(self.read)} unreadable" if len(self.read) < len(self.ranks) else ""
        return f"{self.title}, {len(self.read)} {'rank' if len(self.read) == 1 else 'ranks'}{unread}"

    def tables(self) -> dict[str, list[Record]]:
        """See :meth:`Result.tables`: ``steps``, ``kernels``, ``operators``, ``ranges``, ``collectives``, ``gaps``."""
        return {
            "steps": [_step_record(rank, step) for rank in self.read for step in rank.steps],
            **{
                table: [{"name": name, **dataclasses.asdict(operator)} for name, operator in top(operators, None)]
                for table, operators in (
                    ("kernels", self.kernels),
                    ("operators", self.host),
                    ("ranges", self.ranges),
                )
            },
            "collectives": [dataclasses.asdict(collective) for collective in self.collectives],
            "gaps": [{"rank": rank.label, **dataclasses.asdict(gap)} for rank in self.read for gap in rank.gaps],
        }

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
    read = [rank for rank in ranks if rank.error is None]
    exposed = {rank.label: rank.device.communication for rank in read if rank.device is not None}
    waited_for = min(exposed, key=exposed.__getitem__) if len(exposed) > 1 and max(exposed.values()) > 0 else None
    return Summary(
        capture.name,
        tuple(ranks),
        tuple(_spreads(read)),
        waited_for,
        _together([rank.ranges for rank in read]),
        _together([rank.host for rank in read]),
        _together([rank.kernels for rank in read]),
        tuple(_collectives(read)),
    )


def _spreads(read: Sequence[RankActivity]) -> Iterator[Spread]:
    with_steps = {rank.label: rank.steps for rank in read if rank.steps}
    if len(with_steps) < 2:
        return
    yield _spread(
        None, {label: statistics.fmean(step.mark_us for step in steps) for label, steps in with_steps.items()}
    )
    for number in sorted({step.number for steps in with_steps.values() for step in steps}):
        marks = {label: step.mark_us for label, steps in with_steps.items() for step in steps if step.number == number}
        if len(marks) > 1:
            yield _spread(number, marks)


def _together(of_ranks: Sequence[dict[str, Operator]]) -> dict[str, Operator]:
    whole: dict[str, Operator] = {}
    for operators in of_ranks:
        for name, operator in operators.items():
            together = whole.setdefault(name, Operator())
            together.calls += operator.calls
            together.self_us += operator.self_us
            together.total_us += operator.total_us
    return whole


def _collectives(read: Sequence[RankActivity]) -> list[Collective]:
    collectives: dict[tuple[str, str, int | None, str], Collective] = {}
    for own in (collective for rank in read for collective in rank.collectives):
        key = (own.name, own.group, own.group_size, own.dtype)
        collective = collectives.setdefault(key, Collective(*key))
        collective.calls += own.calls
        collective.time_us += own.time_us
        collective.in_bytes = _sum(collective.in_bytes, own.in_bytes)
        collective.out_bytes = _sum(collective.out_bytes, own.out_bytes)
    return sorted(collectives.values(), key=lambda collective: -collective.time_us)


def _step_record(rank: RankActivity, step: Step) -> Record:
    record: Record = {
        "rank": rank.label,
        "step": step.number,
        "mark_us": step.mark_us,
        "period_us": step.period_us,
        "validation_us": step.validation_us,
    }
    if step.device is not None:
        record.update({f"{part}_us": value for part, value in dataclasses.asdict(step.device).items()})
    return record


def top(operators: dict[str, Operator], count: int | None) -> list[tuple[str, Operator]]:
    """The operators with the most self time."""
    return sorted(operators.items(), key=lambda item: (-item[1].self_us, item[0]))[:count]


def _spread(step: int | None, marks: dict[str, float]) -> Spread:
    slowest, fastest = max(marks, key=marks.__getitem__), min(marks, key=marks.__getitem__)
    return Spread(step, slowest, marks[slowest], fastest, marks[fastest], statistics.median(marks.values()))


def _sum(first: int | None, second: int | None) -> int | None:
    return second if first is None else first if second is None else first + second
