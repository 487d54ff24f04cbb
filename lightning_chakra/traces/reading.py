"""Trace files as streams of typed events, a few megabytes in memory at a time.

A trace of 500 MB must not cost a multiple of that, so the list that makes up nearly all of the file (``traceEvents`` of
a Kineto trace, ``nodes`` of an execution trace) is decoded in pieces, and of each entry only the fields of a
:class:`msgspec.Struct` are kept. msgspec reads strict JSON (RFC 8259): no NaN, no raw control characters in strings.
"""

import contextlib
import gzip
import importlib
import io
import re
import zlib
from collections.abc import Iterator
from typing import IO, Any, Generic, TypeVar, cast

import msgspec

from lightning_chakra.recording.layout import Kind, is_url
from lightning_chakra.traces.errors import TraceError

_gzip_file: Any = gzip.GzipFile
_GZIP_ERRORS: tuple[type[Exception], ...] = (gzip.BadGzipFile, zlib.error)
with contextlib.suppress(ImportError):
    # Three times as fast as the standard library. Imported by name: whether it brings types depends on its version.
    _gzip_file = importlib.import_module("isal.igzip").IGzipFile
    _GZIP_ERRORS += (importlib.import_module("isal.isal_zlib").error,)

PIECE = 4 << 20
"""Bytes of JSON that are decoded at a time."""

_LIST: dict[Kind, str] = {"kineto": "traceEvents", "chakra": "nodes"}
"""The key of the long list of each kind of trace."""

_GUESSES = 16
"""How often the end of an entry is guessed before more of the file is read."""

T = TypeVar("T")
H = TypeVar("H")


_UNREADABLE: tuple[type[Exception], ...] = (TraceError, OSError, EOFError, *_GZIP_ERRORS)


class Event(msgspec.Struct, gc=False):
    """A Kineto event (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).

    Attributes:
        ph: Phase: ``"X"`` a complete slice, ``"M"`` metadata, ``"s"``/``"f"`` the ends of a flow.
        cat: Category, such as ``"cpu_op"`` or ``"kernel"``.
        name: Name.
        pid: Process, or the device's number for device events.
        tid: Thread, or the stream's number for device events.
        ts: Start, µs.
        dur: Duration, µs.
        args: What else was recorded. Only the fields of :class:`EventArgs` are kept.
    """

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = ""
    tid: int | str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: "EventArgs | None" = None


class EventArgs(msgspec.Struct, gc=False, rename={"rf_id": "Record function id"}):
    """The arguments of an event that a check needs.

    Attributes:
        rf_id: The number that links an operator with its node in the execution trace; 0 where none was recorded.
    """

    rf_id: int = 0


class KinetoHead(msgspec.Struct):
    """The top level of a Kineto trace without its events.

    Attributes:
        distributed: ``distributedInfo``: rank, world size, process groups.
        devices: ``deviceProperties``: the GPUs of the host; ``None`` in traces without that field.
        lightning_chakra: What this package says about the capture; ``None`` in traces that others wrote.
        base_time_ns: Added to ``ts`` it gives the time since 1970, ns; ``None`` in older traces.
    """

    distributed: dict[str, Any] | None = msgspec.field(default=None, name="distributedInfo")
    devices: list[Any] | None = msgspec.field(default=None, name="deviceProperties")
    lightning_chakra: dict[str, Any] | None = None
    base_time_ns: int | None = msgspec.field(default=None, name="baseTimeNanoseconds")


class ChakraHead(msgspec.Struct):
    """The top level of an execution trace without its nodes.

    Attributes:
        schema: Version of the format, such as ``"1.1.1-chakra.0.0.4"``.
        pid: Process that wrote it.
        finish_ts: Set when the observer was unregistered; ``None`` in a cut trace.
        lightning_chakra: What this package noted when it published the file, such as what it mended.
    """

    schema: str = ""
    pid: int | None = None
    finish_ts: int | None = None
    lightning_chakra: dict[str, Any] | None = None


class NodeAttr(msgspec.Struct, gc=False):
    """One attribute of a node (schema 1.0.3 and later)."""

    name: str = ""
    value: Any = None


class Node(msgspec.Struct, gc=False):
    """A node of an execution trace.

    Up to schema 1.0.2 ``rf_id``, ``parent`` and ``tid`` are fields of the node; since 1.0.3 the parent is called
    ``ctrl_deps`` and the others are attributes.
    """

    id: int = -1
    name: str = ""
    ctrl_deps: int | None = None
    parent: int | None = None
    rf_id: int | None = None
    attrs: list[NodeAttr] | None = None

    @property
    def parent_id(self) -> int | None:
        """The node that it was called from."""
        return self.parent if self.ctrl_deps is None else self.ctrl_deps

    def attr(self, name: str) -> Any:
        """The value of an attribute; ``None`` if the node has none of that name."""
        return next((attr.value for attr in self.attrs or () if attr.name == name), None)

    @property
    def record_function_id(self) -> int:
        """The number that links it with the operator in the Kineto trace; 0 where there is none."""
        return int(self.rf_id if self.rf_id is not None else self.attr("rf_id") or 0)


def open_trace(path: str) -> IO[bytes]:
    """Open a trace file, gzipped or plain, local or an fsspec URL, for reading its JSON.

    Raises:
        TraceError: There is no such file.
    """
    try:
        raw: IO[bytes] = _open_url(path) if is_url(path) else open(path, "rb")  # noqa: SIM115 - handed on
        magic = raw.read(2)
        raw.seek(0)
    except Exception as error:  # fsspec: whatever its backend raises
        raise TraceError(f"cannot be opened: {error}") from error
    return cast("IO[bytes]", _gzip_file(fileobj=raw, mode="rb")) if magic == b"\x1f\x8b" else raw


def read_head(path: str, size: int = 4096) -> bytes:
    """The first bytes of the JSON, empty if the file cannot be read."""
    try:
        with open_trace(path) as stream:
            return stream.read(size)
    except _UNREADABLE:
        return b""


def sniff_kind(head: bytes) -> Kind | None:
    """What kind of trace begins with these bytes; ``None``: neither."""
    if re.match(rb'\s*\{\s*"schema"\s*:\s*"', head):
        return "chakra"
    if re.match(rb'\s*\{\s*"', head) and re.search(
        rb'"(schemaVersion|traceEvents|deviceProperties|distributedInfo|lightning_chakra|displayTimeUnit)"', head
    ):
        return "kineto"
    return None


class TraceReader(Generic[T]):
    """Reads one trace file in pieces.

    Iterate over it once to get its events or nodes in lists; :meth:`head` is there after that.

    Args:
        path: The file.
        kind: Its kind.
        entry: The Struct to make of each event or node.
    """

    def __init__(self, path: str, kind: Kind, entry: type[T]) -> None:
        self._path = path
        self._key = _LIST[kind]
        self._entries = msgspec.json.Decoder(list[entry])  # type: ignore[valid-type]
        document = msgspec.defstruct("Document", [("entries", list[entry])], rename={"entries": self._key})  # type: ignore[valid-type]
        self._document: msgspec.json.Decoder[Any] = msgspec.json.Decoder(document)
        self._rest = b""  # what is read and not decoded; in the end the document without the entries of the list
        self._start = 0  # where self._rest starts in the JSON, bytes
        self._prefix = b""  # the JSON up to the first entry
        self._list_ended = False

    def head(self, type_: type[H]) -> H:
        """The top level of the trace, without the events or nodes.

        Raises:
            TraceError: A field of it has the wrong type.
        """
        try:
            return msgspec.json.decode(self._rest, type=type_)
        except msgspec.DecodeError as error:
            raise TraceError(f"its top level is not as it should be: {error}") from None

    @property
    def compact_rank(self) -> bool:
        """Whether the rank is written without the white space that HolisticTraceAnalysis looks for."""
        return re.search(rb'"rank":\d', self._rest) is not None

    def __iter__(self) -> Iterator[list[T]]:
        """Yield the events or nodes in lists.

        Raises:
            TraceError: The file is not whole gzip or not strict JSON, and where.
        """
        try:
            with open_trace(self._path) as stream:
                yield from self._pieces(stream)
        except EOFError:
            raise TraceError(f"the gzip file ends too early, after {self._end} bytes of JSON: it was cut") from None
        except _GZIP_ERRORS as error:
            raise TraceError(f"not whole gzip, after {self._end} bytes of JSON: {error}") from None
        except OSError as error:
            raise TraceError(f"cannot be read: {error}") from error

    @property
    def _end(self) -> int:
        return self._start + len(self._rest)

    def _pieces(self, stream: IO[bytes]) -> Iterator[list[T]]:
        # In torch's traces that is in the first piece. Quotes inside a string are escaped, so a match is a key.
        start = re.compile(rf'"{self._key}"\s*:\s*\['.encode())
        while (match := start.search(self._rest)) is None:
            if not (more := stream.read(max(PIECE, len(self._rest)))):
                break
            self._rest += more
        if match is not None:
            self._prefix, self._rest = self._rest[: match.end()], self._rest[match.end() :]
            self._start = match.end()
            separators = _separators(self._rest)
            while more := stream.read(max(PIECE, len(self._rest))):
                self._rest += more
                if not self._list_ended and (entries := self._take(separators)):
                    yield entries
        yield self._take_last()

    def _take(self, separators: list[bytes]) -> list[T] | None:
        """Decode as many entries as are there, and keep the rest.

        Where ``[`` + text + ``]`` is valid JSON, the text ends between two entries of the list: the guess at the
        separator is proven by the decoding. A wrong guess, in a string or a list within an entry, leaves the text
        unfinished; any other error is one of the JSON itself.
        """
        for separator in separators:
            end = len(self._rest)
            for _ in range(_GUESSES):
                end = self._rest.rfind(separator, 0, end)
                if end < 0:
                    break
                text = self._rest[: end + 1]
                try:
                    entries = self._entries.decode(b"[" + text + b"]")
                except msgspec.DecodeError as error:
                    if "trailing characters" in str(error):  # the list ended before
                        self._list_ended = True
                        return None
                    if isinstance(error, msgspec.ValidationError) or _place(error) is not None:
                        raise self._error(error, text, self._start - 1) from None
                    continue
                _check_utf8(text, self._start)
                comma = self._rest.index(b",", end)
                self._rest, self._start = self._rest[comma + 1 :], self._start + comma + 1
                return entries
        return None

    def _take_last(self) -> list[T]:
        offset = self._start - len(self._prefix)
        self._rest = self._prefix + self._rest
        if not self._rest.strip():
            raise TraceError("the file is empty")
        try:
            document = self._document.decode(self._rest)
        except msgspec.DecodeError as error:
            raise self._error(error, self._rest, offset) from None
        _check_utf8(self._rest, offset)
        self._start = offset
        return cast("list[T]", document.entries)

    def _error(self, error: msgspec.DecodeError, text: bytes, offset: int) -> TraceError:
        if isinstance(error, msgspec.ValidationError):
            if f"missing required field `{self._key}`" in str(error):
                return TraceError(f"it has no {self._key}: not a trace of this kind")
            return TraceError(f"an entry is not as it should be: {error}")
        place = _place(error)
        if place is None:
            return TraceError(f"the JSON ends too early, after {offset + len(text)} bytes: it was cut")
        near = text[max(0, place - 40) : place + 20].decode("utf-8", "replace")
        reason = str(error).removeprefix("JSON is malformed: ").partition(" (byte")[0]
        return TraceError(f"not strict JSON at byte {offset + place}: {reason}, near {near!r}")


def _separators(text: bytes) -> list[bytes]:
    """How the entries of the list may be separated, judging by what stands before the first one."""
    indent = re.match(rb"\s*?(\n[ \t]*)?(?=\S)", text)
    own = [b"}," + indent[1] + b"{"] if indent and indent[1] else []
    return [*own, b"}, {", b"},{"]


def _place(error: msgspec.DecodeError) -> int | None:
    match = re.search(r"\(byte (\d+)\)", str(error))
    return int(match[1]) if match else None


def _check_utf8(text: bytes, offset: int) -> None:
    """Look at the text of fields that were skipped too: msgspec takes any bytes there."""
    if not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise TraceError(f"not strict JSON at byte {offset + error.start}: not UTF-8") from None


def _open_url(path: str) -> IO[bytes]:
    import fsspec  # only needed for URLs

    opened: Any = fsspec.open(path, "rb").open()
    return cast("IO[bytes]", io.BufferedReader(opened, PIECE))
