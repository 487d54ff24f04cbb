"""Giving a cut execution trace its end.

torch writes each node when its operator ends, and the end of the list only when the observer is unregistered. What a
killed process leaves is therefore whole up to some node, without the operators that were still running: their children
are there and name a parent that is not. Nor is the node of the process, which torch writes last.

A Kineto trace cannot be mended like this: torch writes it in one go after the window, operators first and kernels last,
so that a cut one lacks whole kinds of events of the entire window and would tell lies about what the device did.
"""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lightning_chakra.traces.errors import TraceError
from lightning_chakra.traces.reading import Node, TraceReader

UNFINISHED = "[lightning_chakra|unfinished]"
"""Name of the nodes that stand for the operators that were running when the process ended."""

_ROOT = 1
_PROCESS = "[pytorch|profiler|execution_trace|process]"
_THREAD = "[pytorch|profiler|execution_trace|thread]"
_NODE_END = b"\n      }"
_HEAD = re.compile(rb'\{\s*"schema"\s*:\s*"[^"]*"[^{}\[\]]*?"start_ts"\s*:\s*(\d+)\s*,\s*"nodes"\s*:\s*\[')
_PIECE = 1 << 20


@dataclass(frozen=True)
class Mended:
    """What became of a cut execution trace.

    Attributes:
        nodes: Number of nodes that were kept.
        unfinished: Number of running operators that got a node named :data:`UNFINISHED`.
        cut_bytes: Bytes of the last node that were given up.
    """

    nodes: int
    unfinished: int
    cut_bytes: int


def mend_execution_trace(source: str, destination: str) -> Mended:
    """Copy a cut execution trace up to its last whole node and close it.

    The nodes are copied as torch wrote them. Added are the node of the process, a node for each running operator that
    has children in the trace (below the node of its thread: where exactly it was called from is not known), a
    ``finish_ts`` that equals ``start_ts`` (when the process ended is not known), and the mark
    ``"lightning_chakra": {"partial": true}``, which mlc-chakra 1.0.0 and et_replay pass over.

    Args:
        source: The cut file. It is left as it is.
        destination: The mended file.

    Raises:
        ValueError: It cannot be mended, and why.
        OSError: A file cannot be read or written.
    """
    with open(source, "rb") as file:
        head = _HEAD.search(file.read(_PIECE))
        size = file.seek(0, os.SEEK_END)
        end = _last_node_end(file, size)
        if head is None or end is None or end < head.end():
            raise ValueError(f"it holds no whole node ({size} bytes)")
        file.seek(0)
        with open(destination, "wb") as copy:
            _copy(file, copy, end)
    start_ts = int(head[1])
    _append(destination, end, [], start_ts)
    try:
        added, nodes = _missing_nodes(destination)
    except TraceError as error:
        raise ValueError(f"up to its last whole node it is not a readable trace: {error}") from None
    _append(destination, end, added, start_ts)
    return Mended(nodes, sum(node["name"] == UNFINISHED for node in added), size - end)


def _last_node_end(file: Any, size: int) -> int | None:
    """Where the last whole node ends, searched for from the end of the file."""
    position, seam = size, b""
    while position > 0:
        start = max(0, position - _PIECE)
        file.seek(start)
        text = file.read(position - start) + seam
        if (found := text.rfind(_NODE_END)) >= 0:
            return int(start + found + len(_NODE_END))
        position, seam = start, text[: len(_NODE_END) - 1]
    return None


def _copy(source: Any, destination: Any, length: int) -> None:
    while length > 0 and (piece := source.read(min(_PIECE, length))):
        destination.write(piece)
        length -= len(piece)


def _missing_nodes(path: str) -> tuple[list[dict[str, Any]], int]:
    """The nodes that the trace refers to and does not have, children before their parents as torch writes them."""
    ids: set[int] = set()
    parents: dict[int, Any] = {}  # with the thread of a child
    threads: dict[Any, int] = {}
    count = 0
    for nodes in TraceReader(path, "chakra", Node):
        for node in nodes:
            count += 1
            ids.add(node.id)
            if node.name == _THREAD:
                threads[node.attr("tid")] = node.id
            if node.parent_id is not None and node.parent_id not in parents:
                parents[node.parent_id] = node.attr("tid")
    missing = sorted(set(parents) - ids, reverse=True)  # the root too: each thread names it
    return [
        _node(_PROCESS, _ROOT, _ROOT, 0)
        if id_ == _ROOT
        else _node(UNFINISHED, id_, threads.get(parents[id_], _ROOT), parents[id_])
        for id_ in missing
    ], count


def _node(name: str, id_: int, parent: int, thread: Any) -> dict[str, Any]:
    """A node without inputs and outputs, as torch writes that of a thread."""
    attributes: Iterable[tuple[str, str, Any]] = (
        ("rf_id", "uint64", 0),
        ("fw_parent", "uint64", 0),
        ("seq_id", "int64", -1),
        ("scope", "uint64", 7),
        ("tid", "uint64", thread or 0),
        ("fw_tid", "uint64", 0),
        ("op_schema", "string", ""),
        ("kernel_backend", "string", ""),
        ("kernel_file", "string", ""),
        ("tensor_range", "string", ""),
    )
    nothing: dict[str, list[Any]] = {"values": [], "shapes": [], "types": [], "strides": []}
    return {
        "id": id_,
        "name": name,
        "ctrl_deps": parent,
        "inputs": nothing,
        "outputs": nothing,
        "attrs": [{"name": key, "type": kind, "value": value} for key, kind, value in attributes],
    }


def _rendered(node: dict[str, Any]) -> str:
    """A node as torch lays it out, by which the published file is mended further."""
    fields = {key: f"{json.dumps(key)}: {json.dumps(value)}" for key, value in node.items()}
    head = ", ".join(fields.pop(key) for key in ("id", "name", "ctrl_deps"))
    return ",\n      {\n        " + ",\n        ".join([head, *fields.values()]) + "\n      }"


def _append(path: str, end: int, nodes: Iterable[dict[str, Any]], start_ts: int) -> None:
    with open(path, "r+b") as file:
        file.truncate(end)
        file.seek(end)
        for node in nodes:
            file.write(_rendered(node).encode())
        mark = f'\n  ],\n  "finish_ts": {start_ts},\n  "lightning_chakra": {{"partial": true}}\n}}\n'
        file.write(mark.encode())
