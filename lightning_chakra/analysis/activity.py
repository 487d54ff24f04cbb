"""What one rank did in a window: its steps, operators, kernels, collectives and gaps, as plain data."""

from dataclasses import dataclass, field


@dataclass
class Split:
    """What a device did in a span of time. The four parts add up to the span; all in µs.

    Attributes:
        compute: Any kernel ran that does not communicate.
        communication: Communication ran and no computation: it was exposed.
        copies: Copies ran and neither of the others.
        idle: Nothing ran.
    """

    compute: float
    communication: float
    copies: float
    idle: float

    @property
    def span(self) -> float:
        """The length of the span, µs."""
        return self.compute + self.communication + self.copies + self.idle


@dataclass
class Step:
    """One step of one rank.

    Attributes:
        number: The number in its ``ProfilerStep`` mark.
        mark_us: Length of the mark, µs: from the start of the step's first batch to the end of its last.
        period_us: Time to the start of the next mark, µs: the mark and what lies between two, such as waiting for data;
            ``None`` for the last step.
        validation_us: Time of validation before the next mark, µs.
        device: What the device did from the start of the mark to the start of the next, or to the last device event's
            end; ``None`` without device events.
    """

    number: int
    mark_us: float
    period_us: float | None
    validation_us: float = 0.0
    device: Split | None = None


@dataclass
class Operator:
    """All calls of one name.

    Attributes:
        calls: How many.
        self_us: Time in it and not in what it called, on the same thread, µs; of a kernel: its time.
        total_us: Time in it, µs. A name that calls itself counts the inner calls twice.
    """

    calls: int = 0
    self_us: float = 0.0
    total_us: float = 0.0


@dataclass
class Collective:
    """All calls of one collective in one process group with one element type.

    Attributes:
        name: Its name.
        group: The process group.
        group_size: Ranks in it.
        dtype: Element type.
        calls: How many.
        in_bytes: Bytes this rank handed over, all calls together; ``None``: not recorded.
        out_bytes: Bytes this rank received, all calls together; ``None``: not recorded.
        time_us: Time of its kernels (on the CPU: of the backend's work), µs. It includes waiting for other ranks.
    """

    name: str
    group: str
    group_size: int | None
    dtype: str
    calls: int = 0
    in_bytes: int | None = None
    out_bytes: int | None = None
    time_us: float = 0.0


@dataclass
class Gap:
    """A time in which nothing ran.

    Attributes:
        where: ``"device"``: no kernel and no copy; ``"host"``: no operator in any thread, in traces without devices.
        step: The step it starts in; ``None``: before the first.
        start_us: Its start after the first mark, or after the first event if there are no marks, µs.
        length_us: Its length, µs.
        before: What ran before it.
        after: What ran after it.
    """

    where: str
    step: int | None
    start_us: float
    length_us: float
    before: str
    after: str


@dataclass
class RankActivity:
    """What one rank did in a window.

    Attributes:
        name: The file, below the folder that was asked for.
        rank: The rank in its content, else in its name.
        error: Why the file cannot be read; ``None``: it can.
        steps: Its steps in the order of time.
        device: The device from its first event to its last.
        ranges: User ranges by name, such as ``Optimizer.step#Adam.step``, without the marks of the steps.
        host: Operators and runtime calls by name.
        kernels: Kernels and copies by name; ``total_us`` is ``self_us``.
        collectives: Collectives.
        gaps: The longest gaps.
    """

    name: str
    rank: int | None
    error: str | None = None
    steps: list[Step] = field(default_factory=list)
    device: Split | None = None
    ranges: dict[str, Operator] = field(default_factory=dict)
    host: dict[str, Operator] = field(default_factory=dict)
    kernels: dict[str, Operator] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)

    @property
    def label(self) -> str:
        """What it is called in tables."""
        return self.name if self.rank is None else str(self.rank)
