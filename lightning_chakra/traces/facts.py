"""What the two traces of one rank contain, as far as a check needs it. Judges nothing: see ``rules``."""

import sys
from dataclasses import dataclass, field
from typing import Any

from lightning_chakra.traces.captures import TraceFile
from lightning_chakra.traces.errors import TraceError
from lightning_chakra.traces.reading import ChakraHead, Event, KinetoHead, Node, TraceReader
from lightning_chakra.traces.words import BACKEND_RANGE, DEVICE_EVENTS, OPERATORS, STEP_MARK

_EXAMPLES = 3


@dataclass
class KinetoFacts:
    """What is in a Kineto trace.

    Attributes:
        name: The file, below the folder that was asked for.
        error: Why it cannot be read; ``None``: it can, and the rest is complete.
        rank: The rank in its content.
        world_size: Number of ranks of the job, from its content.
        distributed: Whether it has ``distributedInfo`` with a rank.
        compact_rank: Whether the rank is written so that HolisticTraceAnalysis does not find it.
        about: The ``lightning_chakra`` entry.
        steps: Numbers of its ``ProfilerStep`` marks, in the order of time.
        events: Number of events.
        operators: Number of operators and user ranges that should have a node in the execution trace; not those that
            another thread was in when the window ended.
        with_id: How many of them have a nonzero ``Record function id``.
        devices: Number of GPUs of the host.
        device_events: Number of kernels and copies.
    """

    name: str
    error: str | None = None
    rank: int | None = None
    world_size: int | None = None
    distributed: bool = False
    compact_rank: bool = False
    about: dict[str, Any] | None = None
    steps: list[int] = field(default_factory=list)
    events: int = 0
    operators: int = 0
    with_id: int = 0
    devices: int = 0
    device_events: int = 0


@dataclass
class ChakraFacts:
    """What is in an execution trace.

    Attributes:
        name: The file, below the folder that was asked for.
        error: Why it cannot be read; ``None``: it can, and the rest is complete.
        schema: Version of its format.
        finished: Whether its observer was unregistered.
        steps: Numbers of its ``ProfilerStep`` nodes, ascending.
        nodes: Number of nodes.
        repeated_ids: How many nodes have the id of another.
        orphans: How many parents are not there.
        repeated: A few of the ids that repeat.
        orphaned: A few nodes without their parent.
        mended: How many nodes got their parent when the file was published.
    """

    name: str
    error: str | None = None
    schema: str = ""
    finished: bool = True
    steps: list[int] = field(default_factory=list)
    nodes: int = 0
    repeated_ids: int = 0
    orphans: int = 0
    repeated: list[int] = field(default_factory=list)
    orphaned: list[int] = field(default_factory=list)
    mended: int = 0


@dataclass
class RankFacts:
    """What is in the traces of one rank.

    Attributes:
        rank: The rank in the names.
        kineto: The Kineto trace.
        chakra: The execution trace.
        linked: How many operators have a node with the same id and name.
        unlinked: A few names of operators that have not.
        abandoned: How many operators have none since an exception left them; only known of a mended execution trace.
    """

    rank: int | None
    kineto: KinetoFacts | None = None
    chakra: ChakraFacts | None = None
    linked: int = 0
    unlinked: list[str] = field(default_factory=list)
    abandoned: int = 0

    @property
    def linkable(self) -> bool:
        """Whether both traces are there and can be read."""
        return self.kineto is not None and self.chakra is not None and not self.kineto.error and not self.chakra.error


def read_facts(pair: tuple[TraceFile | None, TraceFile | None]) -> RankFacts:
    """Read the traces of one rank. What cannot be read is a fact, too."""
    kineto, chakra = pair
    facts = RankFacts(rank=next((f.rank for f in pair if f is not None), None))
    node_names: dict[int, str] = {}
    if chakra is not None:
        facts.chakra = ChakraFacts(chakra.name)
        try:
            _read_chakra(chakra.path, facts.chakra, node_names)
        except TraceError as error:
            facts.chakra.error = str(error)
    if kineto is not None:
        facts.kineto = KinetoFacts(kineto.name)
        try:
            _read_kineto(kineto.path, facts.kineto, facts, node_names)
        except TraceError as error:
            facts.kineto.error = str(error)
    return facts


def _read_chakra(path: str, facts: ChakraFacts, node_names: dict[int, str]) -> None:
    reader = TraceReader(path, "chakra", Node)
    ids: set[int] = set()
    parents: dict[int, int] = {}
    steps = set()
    for nodes in reader:
        for node in nodes:
            facts.nodes += 1
            if node.id in ids:
                facts.repeated_ids += 1
                _note(facts.repeated, node.id)
            ids.add(node.id)
            if node.parent_id is not None:
                parents.setdefault(node.parent_id, node.id)
            if (rf_id := node.record_function_id) != 0:
                node_names[rf_id] = sys.intern(node.name)
            if match := STEP_MARK.fullmatch(node.name):
                steps.add(int(match[1]))
    for parent, child in parents.items():
        if parent not in ids:
            facts.orphans += 1
            _note(facts.orphaned, child)
    head = reader.head(ChakraHead)
    facts.schema, facts.finished, facts.steps = head.schema, head.finish_ts is not None, sorted(steps)
    facts.mended = _number(head.lightning_chakra or {}, "mended_nodes") or 0


def _read_kineto(path: str, facts: KinetoFacts, rank: RankFacts, node_names: dict[int, str]) -> None:
    reader = TraceReader(path, "kineto", Event)
    steps = {}
    unlinked: list[Event] = []
    last_mark: Event | None = None
    for events in reader:
        facts.events += len(events)
        for event in events:
            if event.cat in OPERATORS:
                rf_id = event.args.rf_id if event.args is not None else 0
                if rf_id == 0 and BACKEND_RANGE.match(event.name):
                    continue
                facts.operators += 1
                facts.with_id += rf_id != 0
                if rf_id != 0 and node_names.get(rf_id) == event.name:
                    rank.linked += 1
                elif node_names:
                    unlinked.append(event)
                if match := STEP_MARK.fullmatch(event.name):
                    steps[int(match[1])] = event.ts
                    if last_mark is None or event.ts > last_mark.ts:
                        last_mark = event
            elif event.cat in DEVICE_EVENTS:
                facts.device_events += 1
    for event in unlinked:
        if last_mark is not None and _outlives(event, last_mark):
            facts.operators -= 1
            facts.with_id -= event.args is not None and event.args.rf_id != 0
        elif _is_abandoned(event, rank.chakra, node_names):
            facts.operators -= 1
            facts.with_id -= 1
            rank.abandoned += 1
        else:
            _note(rank.unlinked, event.name)
    head = reader.head(KinetoHead)
    facts.steps = sorted(steps, key=steps.__getitem__)
    facts.compact_rank = reader.compact_rank
    facts.about = head.lightning_chakra
    facts.devices = len(head.devices or ())
    for source in (head.distributed, head.lightning_chakra):
        if source is not None:
            facts.rank = _number(source, "rank") if facts.rank is None else facts.rank
            facts.world_size = _number(source, "world_size") if facts.world_size is None else facts.world_size
    facts.distributed = head.distributed is not None and _number(head.distributed, "rank") is not None


def _outlives(event: Event, last_mark: Event) -> bool:
    """Whether another thread was still in this operator when the window ended.

    An execution trace has an operator once it ends, so it has no node then: such as the last collective, whose waiter
    goes on a moment before the worker that did it.
    """
    ended = event.ts + event.dur >= last_mark.ts + last_mark.dur
    return ended and (event.pid, event.tid) != (last_mark.pid, last_mark.tid)


def _is_abandoned(event: Event, chakra: ChakraFacts | None, node_names: dict[int, str]) -> bool:
    """Whether torch wrote no node since an exception left the operator; the nodes below it had to be mended then."""
    rf_id = event.args.rf_id if event.args is not None else 0
    return chakra is not None and chakra.mended > 0 and rf_id != 0 and rf_id not in node_names


def _number(source: dict[str, Any], key: str) -> int | None:
    value = source.get(key)
    return value if isinstance(value, int) else None


def _note(examples: list[Any], example: Any) -> None:
    if len(examples) < _EXAMPLES and example not in examples:
        examples.append(example)
