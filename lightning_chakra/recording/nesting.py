"""Who called whom in an execution trace, where torch lost count.

torch's observer keeps a stack of open operators for each thread. An operator that is left by an exception (the
recomputation of non-reentrant activation checkpointing ends with one, or one that somebody catches), or whose tensors
the observer cannot describe (nested ones), is never taken off it and never written. What follows then names a parent
that is not in the file, or one that is over: the next step lies within the one before.

The file itself tells the truth: ids are given when operators begin, nodes are written when they end. On one thread, the
caller of an operator is the one that began last of those that began before it and end after it.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterator

import regex

from lightning_chakra.recording.mend import pieces

# One node up to its thread, as torch writes it. Names may hold anything, so they are skipped and not parsed.
_NODE = regex.compile(
    rb'\n        "id": (\d+), "name": "(.*?)", "ctrl_deps": (\d+),\n'
    rb'.*?\{"name": "tid", "type": "uint64", "value": (\d+)\}',
    regex.DOTALL,
)
_THREAD = b"[pytorch|profiler|execution_trace|thread]"
_APART = (_THREAD, b"[pytorch|profiler|execution_trace|process]", b"## process_group:init ##")
_PIECE = 1 << 20
_LARGEST = 64 << 20  # bytes; longer than any node


def true_parents(path: str) -> dict[int, int]:
    """The parent of each node that names a wrong one; empty where torch kept count, which is the rule.

    Memory grows with the number of nodes, by some 30 bytes for each.

    Args:
        path: A raw execution trace, complete.

    Raises:
        OSError: It cannot be read.
    """
    ids, parents = array("Q"), array("Q")
    by_thread: defaultdict[int, array[int]] = defaultdict(lambda: array("Q"))  # places of its nodes in the file
    roots: dict[int, int] = {}
    open_parents: set[int] = set()  # named, and not written yet
    for id_, name, parent, tid in _nodes(path):
        number, above = int(id_), int(parent)
        open_parents.discard(number)
        if name in _APART:
            if name == _THREAD:
                roots[int(tid)] = number
            continue
        open_parents.add(above)
        by_thread[int(tid)].append(len(ids))
        ids.append(number)
        parents.append(above)
    if open_parents <= {_root(roots, thread) for thread in by_thread}:
        return {}  # each named parent was written after those that name it: nobody lost count
    found: dict[int, int] = {}
    for thread, places in by_thread.items():
        above_all = _root(roots, thread)
        callers: list[int] = []
        for place in reversed(places):  # by their ends, the last one first
            number = ids[place]
            while callers and callers[-1] > number:
                callers.pop()
            caller = callers[-1] if callers else above_all
            if parents[place] != caller:
                found[number] = caller
            callers.append(number)
    return found


def _root(roots: dict[int, int], thread: int) -> int:
    return roots.get(thread, 1)  # 1: the process


def _nodes(path: str) -> Iterator[tuple[bytes, bytes, bytes, bytes]]:
    """Id, name, parent and thread of each node, in the order of the file."""
    with open(path, "rb", buffering=0) as file:
        for block, length, _ in pieces(file, "chakra", _PIECE, _LARGEST):
            yield from _NODE.findall(block, 0, length, concurrent=True)
