"""The timeline of ``merge``: look through each trace, then write the events of all of them under new numbers.

A trace is read twice, a few megabytes at a time. What is kept of it in between is small: names, step starts, ends of
collectives, the slices that do not nest and the identities of its flows.
"""

import json
from array import array
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any, cast

import msgspec

from lightning_chakra._version import __version__
from lightning_chakra.traces.captures import TraceFile
from lightning_chakra.traces.clocks import Alignment, Group
from lightning_chakra.traces.errors import ResultError, TraceError
from lightning_chakra.traces.nesting import ROUNDING_NS, Fix, nest
from lightning_chakra.traces.reading import TraceReader
from lightning_chakra.traces.words import DEVICE_COLLECTIVE, STEP_MARK, SYNCHRONIZING

_METADATA = {"process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index"}
_LANES = 1000
"""Sort index left for the additional rows of a thread."""

Track = tuple[Hashable, Hashable]
"""Process and thread, as in the trace."""


class _Event(msgspec.Struct, gc=False, omit_defaults=True):
    """An event as it is copied: everything that the format knows, ``args`` in the text of the trace."""

    ph: str | msgspec.UnsetType = msgspec.UNSET
    cat: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    pid: int | str | msgspec.UnsetType = msgspec.UNSET
    tid: int | str | msgspec.UnsetType = msgspec.UNSET
    ts: float | msgspec.UnsetType = msgspec.UNSET
    dur: float | msgspec.UnsetType = msgspec.UNSET
    id: int | str | msgspec.UnsetType = msgspec.UNSET
    bp: str | msgspec.UnsetType = msgspec.UNSET
    s: str | msgspec.UnsetType = msgspec.UNSET
    cname: str | msgspec.UnsetType = msgspec.UNSET
    args: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    @property
    def track(self) -> Track:
        """The process and thread it belongs to."""
        return (_known(self.pid, ""), _known(self.tid, ""))

    @property
    def ts_ns(self) -> int:
        """Start in ns, exact."""
        return _ns(_known(self.ts, 0.0))

    @property
    def dur_ns(self) -> int:
        """Duration in ns, exact."""
        return max(0, _ns(_known(self.dur, 0.0)))


class _Head(msgspec.Struct):
    host_name: str | None = None
    base_time_ns: int | None = msgspec.field(default=None, name="baseTimeNanoseconds")
    distributed: dict[str, Any] | None = msgspec.field(default=None, name="distributedInfo")
    lightning_chakra: dict[str, Any] | None = None


class _Args(msgspec.Struct):
    name: Any = None
    labels: Any = None
    sort_index: Any = None
    collective: Any = msgspec.field(default=None, name="Collective name")
    group: Any = msgspec.field(default=None, name="Process Group Name")
    members: Any = msgspec.field(default=None, name="Process Group Ranks")
    number: Any = msgspec.field(default=None, name="Seq")


@dataclass
class Scan:
    """What has to be known about a trace before the first event of the timeline is written.

    Attributes:
        rank: Global rank.
        host: Name of its host.
        base_ns: Added to the times of the trace, it gives the time since 1970, ns.
        first_ns: Earliest time, ns since 1970.
        names: Name, labels and sort index of each process.
        threads: Name and sort index of each thread.
        tracks: The threads that have events, with the number of additional rows that overlapping slices need.
        fixes: New place of slices that do not nest, by their number in the trace.
        moved: Where the slices at this time went, for the flows that begin or end at them.
        one_ended: By category the numbers of the flows with one end: many, so 8 bytes each.
        flows: How many whole flows there are of each other identity, where it is not one.
        steps: Start of each step, ns since 1970.
        collectives: Sequence number and end of each collective, ns since 1970.
        incomplete: Number of slices without time, process or thread.
    """

    rank: int
    host: str | None = None
    base_ns: int = 0
    first_ns: int | None = None
    names: dict[Hashable, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    threads: dict[Track, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    tracks: dict[Track, int] = field(default_factory=dict)
    fixes: dict[int, Fix] = field(default_factory=dict)
    moved: dict[tuple[Track, int], Fix] = field(default_factory=dict)
    one_ended: dict[Hashable, "array[int]"] = field(default_factory=dict)
    flows: dict[tuple[Hashable, Hashable], int] = field(default_factory=dict)
    steps: dict[Hashable, int] = field(default_factory=dict)
    collectives: dict[Group, list[tuple[int | None, int]]] = field(default_factory=lambda: defaultdict(list))
    incomplete: int = 0


def scan_trace(task: tuple[str, TraceFile]) -> Scan:
    """Read a trace for the first time.

    Args:
        task: The name of its window, and the file.

    Raises:
        ResultError: The trace cannot be read.
    """
    window, file = task
    scan = Scan(rank=-1)
    decode = msgspec.json.Decoder(_Args).decode
    slices: dict[Track, tuple[array[int], array[int], array[int]]] = {}
    ends: Counter[tuple[str, Hashable, Hashable]] = Counter()
    first: int | None = None
    reader = TraceReader(file.path, "kineto", _Event)
    number = -1
    whole_us = True
    try:
        for events in reader:
            for event in events:
                number += 1
                track = event.track
                if event.ph == "M":
                    if event.name in _METADATA and event.args is not msgspec.UNSET:
                        _note_name(scan, event, decode(event.args))
                    continue
                scan.tracks.setdefault(track, 0)
                start = event.ts_ns
                first = start if first is None else min(first, start)
                if event.ph in ("s", "f"):
                    ends[event.ph, _known(event.cat, ""), _known(event.id, "")] += 1
                elif event.ph == "X":
                    scan.incomplete += msgspec.UNSET in (event.ts, event.dur, event.pid, event.tid)
                    whole_us = whole_us and start % 1000 == 0
                    kept = slices.setdefault(track, (array("q"), array("q"), array("q")))
                    for column, value in zip(kept, (start, event.dur_ns, number), strict=True):
                        column.append(value)
                    _note_moment(scan, event, decode, window)
        head = reader.head(_Head)
    except TraceError as error:
        raise ResultError(f"{file.name}: {error}") from None
    except msgspec.ValidationError as error:
        raise ResultError(f"{file.name}: an event is not as it should be: {error}") from None
    scan.base_ns = head.base_time_ns or 0
    scan.host = head.host_name
    scan.rank = _rank(head, file)
    scan.first_ns = None if first is None else first + scan.base_ns
    scan.steps = {step: start + scan.base_ns for step, start in scan.steps.items()}
    scan.collectives = {
        group: [(number, end + scan.base_ns) for number, end in sorted(moments, key=lambda moment: moment[1])]
        for group, moments in scan.collectives.items()
    }
    scan.names, scan.threads = dict(scan.names), dict(scan.threads)
    _note_flows(scan, ends)
    for track, (starts, durations, numbers) in slices.items():
        # A trace with nanoseconds has nothing to round off but the last digit of start and duration.
        for position, fix in nest(starts, durations, ROUNDING_NS if whole_us else 2).items():
            scan.fixes[numbers[position]] = fix
            scan.tracks[track] = max(scan.tracks[track], fix.lane)
            if fix.lane or fix.start != starts[position]:
                scan.moved[track, starts[position]] = fix
    return scan


def _note_flows(scan: Scan, ends: Mapping[tuple[str, Hashable, Hashable], int]) -> None:
    for cat, id_ in dict.fromkeys((cat, id_) for _, cat, id_ in ends):
        whole = min(ends["s", cat, id_], ends["f", cat, id_])
        if whole == 0 and isinstance(id_, int):
            scan.one_ended.setdefault(cat, array("q")).append(id_)
        elif whole != 1:
            scan.flows[cat, id_] = whole


def _note_name(scan: Scan, event: _Event, args: _Args) -> None:
    process, _ = track = event.track
    value = {"name": args.name, "labels": args.labels, "sort_index": args.sort_index}
    name = cast(str, event.name)
    kind = name.partition("_")[2]
    (scan.names[process] if name.startswith("process") else scan.threads[track])[kind] = value[kind]


def _note_moment(scan: Scan, event: _Event, decode: Any, window: str) -> None:
    """Keep the start of a step or the end of a collective."""
    name = _known(event.name, "")
    if name.startswith("ProfilerStep"):
        if event.cat != "gpu_user_annotation" and (match := STEP_MARK.match(name)):
            scan.steps.setdefault((window, int(match[1])), event.ts_ns)
        return
    device = event.cat == "kernel" and DEVICE_COLLECTIVE.match(name) is not None
    if not device and not name.startswith("gloo:"):
        return
    args = decode(event.args) if event.args is not msgspec.UNSET else _Args()
    operation = args.collective if isinstance(args.collective, str) else name.partition("(")[0]
    if not SYNCHRONIZING.search(operation):
        return
    group = (window, str(args.group), str(args.members), operation)
    number = args.number if isinstance(args.number, int) else None
    scan.collectives[group].append((number, event.ts_ns + event.dur_ns))


def _rank(head: _Head, file: TraceFile) -> int:
    for entry in (head.lightning_chakra, head.distributed):
        if entry is not None and isinstance(entry.get("rank"), int):
            return int(entry["rank"])
    return file.rank if file.rank is not None else 0


def write_timeline(stream: IO[bytes], files: Sequence[TraceFile], scans: Sequence[Scan], alignment: Alignment) -> None:
    """Write the JSON of the timeline.

    Args:
        stream: Where to, in pieces.
        files: The traces, by rank.
        scans: What was seen in each of them.
        alignment: What their clocks are off by.

    Raises:
        ResultError: A trace cannot be read any more, or is another one now.
    """
    firsts = [s.first_ns + alignment.offsets[s.rank] for s in scans if s.first_ns is not None]
    origin = min(firsts, default=0)
    numbers = _Numbers(scans)
    about = {
        "version": __version__,
        "ranks": sorted({scan.rank for scan in scans}),
        "alignment": {**asdict(alignment), "offsets": {str(k): v for k, v in alignment.offsets.items()}},
    }
    top = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": origin, "lightning_chakra_merge": about}
    stream.write(json.dumps(top)[:-1].encode() + b', "traceEvents": [\n')
    encoder = msgspec.json.Encoder()
    stream.write(encoder.encode(_metadata(scans, numbers))[1:-1])
    for file, scan in zip(files, scans, strict=True):
        shift = scan.base_ns + alignment.offsets[scan.rank] - origin
        for events in _events(file, scan, numbers, shift):
            stream.write(b",\n" + encoder.encode(events)[1:-1])
    stream.write(b"\n]}\n")


class _Numbers:
    """Processes, threads and flows of all ranks, numbered so that no two are the same.

    The numbers of the traces would meet: the first GPU of every host is process 0, and process ids repeat on hosts.
    Readers also take the thread with its process' number for the main thread, so threads continue the numbers of the
    processes; the original ones stand in the names.
    """

    def __init__(self, scans: Sequence[Scan]) -> None:
        self.processes: dict[tuple[int, Hashable], int] = {}
        self.threads: dict[tuple[int, Track, int], int] = {}
        self._flows = 0
        for scan in scans:
            for process, _ in scan.tracks:
                self.processes.setdefault((scan.rank, _process(process)), len(self.processes) + 1)
        for scan in scans:
            for track, lanes in scan.tracks.items():
                for lane in range(lanes + 1):
                    self.threads.setdefault((scan.rank, track, lane), len(self.processes) + len(self.threads) + 1)

    def next_flow(self) -> int:
        """The next free number of a flow."""
        self._flows += 1
        return self._flows


def _process(process: Hashable) -> Hashable:
    """Kineto gives its own notes three processes with names for numbers; they become one."""
    return "profiler" if isinstance(process, str) and not process.isdecimal() else process


def _metadata(scans: Sequence[Scan], numbers: _Numbers) -> list[dict[str, Any]]:
    """The names and the order of all processes and threads."""
    events: list[dict[str, Any]] = []

    def add(kind: str, pid: int, tid: int, **args: Any) -> None:
        events.append({"ph": "M", "name": kind, "ts": 0, "pid": pid, "tid": tid, "args": args})

    names: dict[tuple[int, Hashable], dict[str, Any]] = {}
    threads: dict[tuple[int, Track], dict[str, Any]] = {}
    hosts: dict[int, str | None] = {}
    for scan in scans:
        hosts[scan.rank] = scan.host
        names.update({(scan.rank, process): known for process, known in scan.names.items()})
        threads.update({(scan.rank, track): known for track, known in scan.threads.items()})
    order = sorted(numbers.processes, key=lambda key: (key[0], *_sort_index(names.get(key, {}), key[1])))
    for index, (rank, process) in enumerate(order):
        pid = numbers.processes[rank, process]
        known = names.get((rank, process), {})
        label = str(known.get("labels") or "")
        if process == "profiler":
            title = "profiler"
        elif label.startswith("GPU"):
            title = label
        else:
            title = f"{label or 'process'} ({known.get('name') or 'process'} {process})"
        add("process_name", pid, 0, name=f"rank {rank}: {title}")
        add("process_labels", pid, 0, labels=hosts[rank] or label)
        add("process_sort_index", pid, 0, sort_index=index)
    for (rank, track, lane), tid in numbers.threads.items():
        known = threads.get((rank, track), {})
        pid = numbers.processes[rank, _process(track[0])]
        name = str(known.get("name") or (f"thread {track[1]}" if track[1] != "" else "marks"))
        add("thread_name", pid, tid, name=f"{name} (overlapping {lane})" if lane else name)
        sort_index = known.get("sort_index")
        if isinstance(sort_index, int) or lane:
            add(
                "thread_sort_index", pid, tid, sort_index=(sort_index if isinstance(sort_index, int) else _LANES) + lane
            )
    return events


def _sort_index(known: Mapping[str, Any], process: Hashable) -> tuple[bool, int, str]:
    index = known.get("sort_index")
    return (process == "profiler", index if isinstance(index, int) else 0, str(process))


def _events(file: TraceFile, scan: Scan, numbers: _Numbers, shift: int) -> Iterator[list[_Event]]:
    """Read a trace for the second time and renumber and move its events."""
    seen: Counter[tuple[str, Hashable, Hashable]] = Counter()
    flows: dict[tuple[Hashable, Hashable, int], int] = {}
    one_ended = {cat: set(ids) for cat, ids in scan.one_ended.items()}
    number = -1
    try:
        for events in TraceReader(file.path, "kineto", _Event):
            kept = []
            for event in events:
                number += 1
                if event.ph == "M" and event.name in _METADATA:
                    continue
                track, start, lane = event.track, event.ts_ns, 0
                if event.ph == "X":
                    if (fix := scan.fixes.get(number)) is not None:
                        start, lane = fix.start, fix.lane
                        event.dur = fix.duration / 1000
                    elif event.dur is msgspec.UNSET:
                        event.dur = 0.0
                elif event.ph in ("s", "f"):
                    cat, id_ = _known(event.cat, ""), _known(event.id, "")
                    index = seen[event.ph, cat, id_]
                    seen[event.ph, cat, id_] += 1
                    # an arrow with one end: the other is not in the trace
                    if id_ in one_ended.get(cat, ()) or index >= scan.flows.get((cat, id_), 1):
                        continue
                    if (fix := scan.moved.get((track, start))) is not None:
                        start, lane = fix.start, fix.lane
                    if (cat, id_, index) not in flows:
                        flows[cat, id_, index] = numbers.next_flow()
                    event.id = flows[cat, id_, index]
                elif event.id is not msgspec.UNSET:
                    event.id = f"{scan.rank}.{event.id}"
                if event.ph in ("i", "I") and event.s == "g":
                    event.s = "p"  # a mark of one rank, not of all
                event.pid = numbers.processes[scan.rank, _process(track[0])]
                event.tid = numbers.threads[scan.rank, track, lane]
                event.ts = max(0, start + shift) / 1000
                kept.append(event)
            if kept:
                yield kept
    except (TraceError, KeyError) as error:
        raise ResultError(f"{file.name} changed while it was read: {error}") from None


def _known(value: Any, default: Any) -> Any:
    return default if value is msgspec.UNSET else value


def _ns(us: float) -> int:
    """Microseconds as a float in ns; the product alone would lose digits of times since 1970."""
    whole = int(us)
    return whole * 1000 + round((us - whole) * 1000)
