"""From the events of one rank to what it did.

HolisticTraceAnalysis is not used for this, though its figures are the measure (a test compares them): it needs a GPU
trace and fails on one of a CPU, drops the last of several steps, gives one breakdown per rank and none per step, holds
the whole trace of every rank in a data frame, and reads local folders only.
"""

import sys
from typing import Any

import msgspec

from lightning_chakra.analysis.activity import Collective, Gap, Operator, RankActivity, Split, Step
from lightning_chakra.traces.captures import TraceFile
from lightning_chakra.traces.errors import TraceError
from lightning_chakra.traces.intervals import Interval, subtract, total, union
from lightning_chakra.traces.reading import KinetoHead, TraceReader
from lightning_chakra.traces.words import (
    COMMUNICATION,
    COPY,
    CPU_BACKEND_RANGE,
    DEVICE_EVENTS,
    KERNEL_COLLECTIVE,
    OPERATORS,
    RUNTIME,
    STEP_MARK,
    VALIDATION,
)

_GAPS = 5

_ITEM_BYTES = {
    **dict.fromkeys(("byte", "char", "bool", "unsigned char", "signed char", "int8", "uint8"), 1),
    **dict.fromkeys(("float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("half", "bfloat16", "short", "c10::half", "c10::bfloat16", "short int"), 2),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("double", "long", "long int", "complexfloat", "c10::complex<float>"), 8),
    **dict.fromkeys(("complexdouble", "c10::complex<double>"), 16),
}
"""Bytes per element, by the names that ``record_param_comms`` and ``Input type`` use, in lower case."""


class ActivityArgs(
    msgspec.Struct,
    gc=False,
    rename={
        "collective": "Collective name",
        "in_elements": "In msg nelems",
        "out_elements": "Out msg nelems",
        "group_size": "Group size",
        "group_name": "Process Group Name",
        "group_description": "Process Group Description",
        "dims": "Input Dims",
        "types": "Input type",
    },
):
    """The arguments of an event that a summary needs; those of collectives are the names of ``record_param_comms``."""

    collective: Any = None
    in_elements: Any = None
    out_elements: Any = None
    dtype: Any = None
    group_size: Any = None
    group_name: Any = None
    group_description: Any = None
    dims: msgspec.Raw = msgspec.Raw(b"[]")  # most are never looked at
    types: msgspec.Raw = msgspec.Raw(b"[]")


class Activity(msgspec.Struct, gc=False):
    """A Kineto event; see :class:`lightning_chakra.traces.reading.Event`."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = ""
    tid: int | str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: ActivityArgs | None = None


def read_activity(trace: TraceFile) -> RankActivity:
    """Read what one rank did. A file that cannot be read yields its error."""
    activity = RankActivity(trace.name, trace.rank)
    try:
        _Collector(activity).read(trace.path)
    except TraceError as error:
        return RankActivity(trace.name, trace.rank, str(error))
    return activity


class _Collector:
    """Gathers the events of one file and works out the activity."""

    def __init__(self, activity: RankActivity) -> None:
        self._activity = activity
        # Times count from the first event. A float holds µs since boot with 9 or 10 binary places only, and
        # each end that is worked out from those is off by half a nanosecond: it adds up over thousands of kernels.
        self._origin: float | None = None
        self._threads: dict[tuple[int | str, int | str], list[tuple[float, float, str, bool]]] = {}
        self._marks: list[tuple[float, float, int]] = []
        self._validation: list[Interval] = []
        self._compute: list[Interval] = []
        self._communication: list[Interval] = []
        self._copies: list[Interval] = []
        self._device: list[tuple[float, float, str]] = []
        self._busy: list[tuple[float, float, str]] = []  # outermost operators of all threads
        self._collectives: dict[str, dict[tuple[str, str, int | None, str], Collective]] = {}

    def read(self, path: str) -> None:
        reader = TraceReader(path, "kineto", Activity)
        for events in reader:
            for event in events:
                if event.ph == "X":
                    if self._origin is None:
                        self._origin = event.ts
                    event.ts -= self._origin
                    self._add(event)
        head = reader.head(KinetoHead)
        for source in (head.lightning_chakra, head.distributed):
            if source is not None and isinstance(source.get("rank"), int):
                self._activity.rank = source["rank"]
        self._marks.sort()
        for events_of_thread in self._threads.values():
            self._add_self_times(events_of_thread)
        self._threads.clear()
        self._finish()
        self._name_the_only_group(head.distributed or {})

    def _name_the_only_group(self, distributed: dict[str, Any]) -> None:
        groups = distributed.get("pg_config")
        if not isinstance(groups, list) or len(groups) != 1 or not isinstance(groups[0], dict):
            return
        for collective in self._activity.collectives:
            if not collective.group:
                collective.group = _group(groups[0].get("pg_name"), groups[0].get("pg_desc"))
                size = groups[0].get("pg_size")
                collective.group_size = size if isinstance(size, int) else None

    def _add(self, event: Activity) -> None:
        name = sys.intern(event.name)
        if event.cat in OPERATORS:
            if match := STEP_MARK.fullmatch(name):
                self._marks.append((event.ts, event.ts + event.dur, int(match[1])))
                return
            if name == VALIDATION:
                self._validation.append((event.ts, event.ts + event.dur))
            if event.args is not None and event.args.collective is not None:
                self._add_collective("operator", event, event.args)
            elif (match := CPU_BACKEND_RANGE.fullmatch(name)) is not None:
                self._add_backend_range(match[2], event)
                return
            self._threads.setdefault((event.pid, event.tid), []).append(
                (event.ts, -event.dur, name, event.cat == "cpu_op")
            )
        elif event.cat in RUNTIME:
            self._threads.setdefault((event.pid, event.tid), []).append((event.ts, -event.dur, name, True))
        elif event.cat in DEVICE_EVENTS:
            self._add_device_event(event, name)

    def _add_device_event(self, event: Activity, name: str) -> None:
        interval = (event.ts, event.ts + event.dur)
        if COMMUNICATION.match(name):
            self._communication.append(interval)
            if event.args is not None and event.args.collective is not None:
                self._add_collective("kernel", event, event.args)
            else:
                match = KERNEL_COLLECTIVE.match(name)
                self._count("bare kernel", (match[1] if match else name, "", None, ""), event.dur, None, None)
        elif event.cat != "kernel" or COPY.match(name):
            self._copies.append(interval)
        else:
            self._compute.append(interval)
        self._device.append((*interval, name))
        kernel = self._activity.kernels.setdefault(name, Operator())
        kernel.calls += 1
        kernel.self_us += event.dur
        kernel.total_us += event.dur

    def _add_collective(self, source: str, event: Activity, args: ActivityArgs) -> None:
        group = _group(args.group_name, args.group_description)
        dtype = str(args.dtype or "")
        item = _ITEM_BYTES.get(dtype.lower())
        sizes = [
            elements * item if isinstance(elements, int) and item is not None else None
            for elements in (args.in_elements, args.out_elements)
        ]
        ranks = args.group_size if isinstance(args.group_size, int) else None
        self._count(source, (str(args.collective), group, ranks, dtype), event.dur, sizes[0], sizes[1])

    def _add_backend_range(self, name: str, event: Activity) -> None:
        args = event.args or ActivityArgs()
        dims, types = msgspec.json.decode(args.dims), msgspec.json.decode(args.types)
        dtype = str(types[0]) if isinstance(types, list) and types else ""
        size: int | None = None
        if isinstance(dims, list) and dtype.lower() in _ITEM_BYTES and len(dims) == len(types):
            size = sum(_elements(dim) * _ITEM_BYTES.get(str(t).lower(), 0) for dim, t in zip(dims, types, strict=True))
        self._count("backend", (name, "", None, dtype), event.dur, size, None)

    def _count(
        self,
        source: str,
        key: tuple[str, str, int | None, str],
        time_us: float,
        in_bytes: int | None,
        out_bytes: int | None,
    ) -> None:
        collective = self._collectives.setdefault(source, {}).setdefault(key, Collective(*key))
        collective.calls += 1
        collective.time_us += time_us
        if in_bytes is not None:
            collective.in_bytes = (collective.in_bytes or 0) + in_bytes
        if out_bytes is not None:
            collective.out_bytes = (collective.out_bytes or 0) + out_bytes

    def _add_self_times(self, events: list[tuple[float, float, str, bool]]) -> None:
        events.sort()  # by start, the longer first: a caller comes before what it calls
        activity = self._activity
        # end, name, duration, time in callees, whether it is an operator, whether it is or is below one
        stack: list[tuple[float, str, float, list[float], bool, bool]] = []

        def close() -> None:
            _, name, duration, (inner,), is_work, _ = stack.pop()
            operator = (activity.host if is_work else activity.ranges).setdefault(name, Operator())
            operator.calls += 1
            operator.self_us += max(0.0, duration - inner)
            operator.total_us += duration

        for start, negative, name, is_work in events:
            duration = -negative
            while stack and stack[-1][0] <= start:
                close()
            below_work = bool(stack) and stack[-1][5]
            if stack:  # ends are rounded: a callee may stick out by 1 ns
                stack[-1][3][0] += min(duration, stack[-1][0] - start)
            if is_work and not below_work:
                self._busy.append((start, start + duration, name))
            stack.append((start + duration, name, duration, [0.0], is_work, is_work or below_work))
        while stack:
            close()

    def _finish(self) -> None:
        activity = self._activity
        compute, communication, copies = map(union, (self._compute, self._communication, self._copies))
        exposed = subtract(communication, compute)
        copying = subtract(subtract(copies, compute), communication)
        device_end = max((end for _, end, _ in self._device), default=0.0)

        def split(start: float, end: float) -> Split:
            parts = [total(moments, start, end) for moments in (compute, exposed, copying)]
            return Split(parts[0], parts[1], parts[2], max(0.0, end - start - sum(parts)))

        if self._device:
            activity.device = split(min(start for start, _, _ in self._device), device_end)
        validation = union(self._validation)
        for index, (start, end, number) in enumerate(self._marks):
            following = self._marks[index + 1][0] if index + 1 < len(self._marks) else None
            until = following if following is not None else max(end, device_end)
            step = Step(number, end - start, None if following is None else following - start)
            step.validation_us = total(validation, start, until if following is not None else float("inf"))
            step.device = split(start, until) if self._device else None
            activity.steps.append(step)
        self._find_gaps()
        # The best source there is: what is in a kernel is in its operator, too.
        for sources in (("kernel", "bare kernel"), ("operator",), ("backend",)):
            found = [c for source in sources for c in self._collectives.get(source, {}).values()]
            if found and (sources[0] in self._collectives or "operator" not in self._collectives):
                activity.collectives = sorted(found, key=lambda collective: -collective.time_us)
                break

    def _find_gaps(self) -> None:
        where, events = ("device", self._device) if self._device else ("host", self._busy)
        if not events:
            return
        events.sort()
        first = self._marks[0][0] if self._marks else events[0][0]
        last = max((end for _, end, _ in self._marks), default=float("inf"))
        gaps = []
        end, before = events[0][1], events[0][2]
        for start, this_end, name in events[1:]:
            if start > end and start > first and end < last:
                gaps.append((start - end, end, before, name))
            if this_end > end:
                end, before = this_end, name
        for length, at, before, after in sorted(gaps, reverse=True)[:_GAPS]:
            step = next((number for start, _, number in reversed(self._marks) if start <= at), None)
            self._activity.gaps.append(Gap(where, step, at - first, length, before, after))


def _group(name: object, description: object) -> str:
    return f"{name or ''} ({description})" if description and description != "undefined" else str(name or "")


def _elements(dims: Any) -> int:
    """The number of elements of a tensor, or of a list of tensors, from its dimensions."""
    if isinstance(dims, list) and dims and isinstance(dims[0], list):
        return sum(_elements(dim) for dim in dims)
    result = 1
    for dim in dims if isinstance(dims, list) else ():
        result *= dim if isinstance(dim, int) else 0
    return result
