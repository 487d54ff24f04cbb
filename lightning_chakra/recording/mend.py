"""Making strict JSON of what torch writes, item by item while the file is read for compression.

torch escapes no name in either kind of file, so a quote in the name of a range, a class or a file makes the whole file
unreadable. Both of its writers fill fixed templates, one per event or node, which is what makes the names recognizable
again. Kineto moreover replaces characters: a backslash becomes a slash, a newline vanishes and a name with anything
outside printable ASCII becomes ``unknown``. The execution trace has the true name under the same id, and
the Kineto trace gets it back from there, so that both files name an operator alike.

A healthy file costs one search per piece, which leaves the GIL to the training, and all of it stays as torch wrote it.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import IO, Literal

import regex

from lightning_chakra.recording.layout import Kind

MOST_NAMES = 200_000
"""Operators whose true names are remembered for the Kineto trace; further ones keep the name that Kineto gave them."""

# Where an event or a node begins, and thus where a piece can be cut.
_START: dict[Kind, bytes] = {"kineto": b"\n  {\n", "chakra": b"\n      {\n"}

# Older Kineto (torch 2.9) has an event's name and ids in one line, and lines of its own for what it names itself.
_IDS = rb', "pid": (?:\d+|"[\w ]+"), "tid": (?:\d+|"[\w ]+"),\n'
_KINETO_FIXED = rb', "ph": "(?:M", "ts": |i", "s": "g",\n)'

# Matches where a name is not plain text between the quotes of its template. Unlike re, regex searches without the GIL.
_SUSPECT: dict[Kind, tuple[regex.Pattern[bytes], ...]] = {
    "kineto": (
        regex.compile(rb'"name": "[^"]*"(?!,?\n|%b|%b)' % (_IDS, _KINETO_FIXED)),
        regex.compile(rb'"CallFrom": "[^"]*"(?!, "Python )'),  # of a Python function, since torch 2.14
    ),
    "chakra": (regex.compile(rb'\n        "id": (?!\d+, "name": "[^"\\\x00-\x1f\x7f]*", "ctrl_deps": \d+,\n)'),),
}
# What a healthy file of the kind has nowhere.
_SUSPECT_TEXT: dict[Kind, tuple[bytes, ...]] = {
    "kineto": (b"\\", b"\t", b"\r"),
    "chakra": (b"\t", b"\r"),
}
# Kineto divides by a number of multiprocessors that it may not know.
_INFINITE = regex.compile(rb'per SM": inf')

_KINETO_NAME = re.compile(
    rb'^(    (?:  )?"name": "(?![^"]*"%b)|    "ph": "\w", "cat": "[^"]*", "name": ")(.*)(",?|"%b)$'
    % (_KINETO_FIXED, _IDS.removesuffix(rb"\n")),
    re.MULTILINE,
)
_KINETO_CALLER = re.compile(rb'("CallFrom": ")(.*?)(", "Python )')
_KINETO_ID = re.compile(rb'"Record function id": (\d+)[,\s]')
_KINETO_END = re.compile(rb'(\n  \],.*"traceName": ")(.*)("\s*\}\s*)\Z', re.DOTALL)
_ET_NODE = re.compile(
    rb'\A(        "id": (\d+), "name": ")(.*?)(", "ctrl_deps": )(\d+)(?=,\n        "inputs": \{"values": )', re.DOTALL
)
_ET_ID = re.compile(rb'"name": "rf_id", "type": "uint64", "value": (\d+)\}')
_NO_NUMBER = re.compile(rb"(?<=[\[,:\s])(-?(?:inf|nan))(?=[\],}\s])")
_UNPRINTABLE = re.compile(rb"[^ -~]")  # what Kineto calls "unknown"
_CONTROL = re.compile(rb"[\x00-\x09\x0b-\x1f]")


class MendError(ValueError):
    """The file is not JSON and nothing that is known of torch's writers explains how."""


_LARGEST = 2 << 20  # bytes; longer than any event or node


def pieces(
    source: IO[bytes], kind: Kind, piece: int, largest: int
) -> Iterator[tuple[bytes, int, Literal["between", "inside", "end"]]]:
    """Read a raw file in pieces that end where an event or a node ends.

    Args:
        source: The raw file.
        kind: What it is.
        piece: Bytes to read at a time.
        largest: Bytes of an event or a node beyond which it is cut rather than held.

    Yields:
        What was read, how many bytes of it are the piece, and where that ends: between two events or nodes, inside a
        very long one, or where the file does.
    """
    offset, size = 0, piece
    while source.seek(offset) == offset and (block := source.read(size)):
        if len(block) < size:
            yield block, len(block), "end"
            return
        cut = block.rfind(_START[kind])
        if cut > 0:
            yield block, cut, "between"
        elif size <= largest:  # a long event or node: again, and more of it
            size *= 2
            continue
        else:
            cut = size
            yield block, cut, "inside"
        offset, size = offset + cut, piece


class Mender:
    """Reads the raw files of one window as strict JSON. Memory does not grow with their size.

    Read the execution trace first: what it is called there is what the Kineto trace calls it then.
    """

    def __init__(self) -> None:
        self._names: dict[int, bytes] = {}
        self._texts: dict[bytes, bytes] = {}
        self._parents: dict[int, int] = {}

    def reparent(self, parents: dict[int, int]) -> None:
        """Give nodes of the execution trace, which is read next, other parents, and count them at its end.

        Args:
            parents: Ids of nodes, and of the node below which each belongs.
        """
        self._parents = parents

    def read(self, source: IO[bytes], kind: Kind, piece: int) -> Iterator[tuple[bytes | memoryview, int]]:
        """The content of ``source`` in parts that end where an event or a node ends.

        Args:
            source: The raw file.
            kind: What it is.
            piece: Bytes to read at a time.

        Yields:
            A part of the mended file, and how many raw bytes it was made of.

        Raises:
            MendError: An event or a node could not be made JSON.
        """
        for block, length, place in pieces(source, kind, piece, _LARGEST):
            if place == "inside":  # not what torch writes: pass it on as it is
                yield block, length
                continue
            part = self._mend(block, length, kind)
            yield (self._mend_end(part, kind) if place == "end" else part), length

    def _mend(self, block: bytes, length: int, kind: Kind) -> bytes | memoryview:
        odd = not block.isascii() or any(text in block for text in _SUSPECT_TEXT[kind])
        if kind == "kineto" and not odd:
            odd = _INFINITE.search(block, concurrent=True) is not None
        names = bool(self._names if kind == "kineto" else self._parents)
        if not (odd or names or any(s.search(block, 0, length, concurrent=True) for s in _SUSPECT[kind])):
            return memoryview(block)[:length]
        mend = self._mend_event if kind == "kineto" else self._mend_node
        head, *items = block[:length].split(_START[kind])
        return _START[kind].join([head, *(self._mend_item(item, mend, odd) for item in items)])

    def _mend_item(self, item: bytes, mend: Callable[[bytes], bytes], odd: bool) -> bytes:
        mended = mend(item)
        # older Kineto begins its file like an event, and that one does not end before the last of them
        return mended if (mended == item and not odd) or b'"traceEvents": [' in item else _checked(mended)

    def _mend_event(self, event: bytes) -> bytes:
        true_name = None
        if self._names and (found := _KINETO_ID.search(event)):
            true_name = self._names.get(int(found[1]))
        if true_name is None and b"\\" not in event and not any(s.search(event) for s in _SUSPECT["kineto"]):
            return event
        event = _KINETO_CALLER.sub(lambda m: m[1] + _escaped(m[2].replace(b'\\"', b'"')) + m[3], event)

        def mended(match: re.Match[bytes]) -> bytes:
            # A backslash can only be the escape of a version of Kineto that escapes quotes: others became slashes.
            name = true_name if true_name is not None else _escaped(match[2].replace(b'\\"', b'"'))
            return match[1] + name + match[3]

        # The first name is the event's; a second one is that of a thread or a process, in its arguments.
        return _KINETO_NAME.sub(mended, event, count=1 if true_name is not None else 0)

    def _mend_node(self, node: bytes) -> bytes:
        match = _ET_NODE.match(node)
        if match is None:
            return node
        head, id_, raw, between, parent = match.groups()
        name = _escaped(raw)
        if (name != raw or _UNPRINTABLE.search(raw)) and len(self._names) < MOST_NAMES:
            found = _ET_ID.search(node, match.end())
            if found:
                self._names[int(found[1])] = self._texts.setdefault(name, name)
        true_parent = self._parents.get(int(id_))
        if name == raw and true_parent is None:
            return node
        return head + name + between + (parent if true_parent is None else b"%d" % true_parent) + node[match.end() :]

    def _mend_end(self, part: bytes | memoryview, kind: Kind) -> bytes | memoryview:
        """The last line of a Kineto trace holds the path of the raw file; an execution trace tells what was mended."""
        if kind == "chakra" and not self._parents:
            return part
        part = bytes(part)
        tail = part.rfind(b"\n  ],")
        if tail < 0:
            return part
        if kind == "chakra":
            entries = json.loads(b"{" + part[tail + len(b"\n  ],") :])
            entries.setdefault("lightning_chakra", {})["mended_nodes"] = len(self._parents)
            lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items())
            return part[:tail] + f"\n  ],\n{lines}\n}}\n".encode()
        return part[:tail] + _KINETO_END.sub(lambda m: m[1] + _escaped(m[2]) + m[3], part[tail:])


def _escaped(raw: bytes) -> bytes:
    """What stands between the quotes of a JSON string with this text; bytes that are no text become U+FFFD."""
    return json.dumps(raw.decode("utf-8", "replace"), ensure_ascii=False)[1:-1].encode()


def _checked(item: bytes) -> bytes:
    """``item`` as it is if it is JSON, else without the faults of torch's writers that are not in names.

    Raises:
        MendError: It is not JSON then.
    """
    if _is_object(item):
        return item
    repairs: tuple[Callable[[bytes], bytes], ...] = (
        lambda item: _CONTROL.sub(lambda match: b"\\u%04x" % match[0][0], item),
        lambda item: _NO_NUMBER.sub(rb'"\1"', item),  # as torch writes them in execution traces
        lambda item: item.decode("utf-8", "replace").encode(),
    )
    mended = item
    for repair in repairs:
        mended = repair(mended)
        if _is_object(mended):
            return mended
    raise MendError(f"torch wrote invalid JSON that cannot be mended, in {item.strip()[:200]!r}")


def _is_object(item: bytes) -> bool:
    try:
        _DECODER.raw_decode("{" + item.decode("utf-8"))
    except ValueError:
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
