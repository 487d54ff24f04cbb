"""Which trace files lie below a folder: windows of this package, and folders that other profilers filled.

```
DIR                                      the window of a run with repeat == 1
DIR/step-00000020/                       a window
DIR/run-1/, DIR/run-1/step-00000020/     a later run, one of its windows
DIR/*.json, DIR/*.json.gz                a foreign folder: torch.profiler's own export, or any other collection
```
"""

import os
import re
from dataclasses import dataclass

from lightning_chakra.recording import storage
from lightning_chakra.recording.layout import FOLDERS, Kind, is_url, join
from lightning_chakra.traces.errors import CaptureError
from lightning_chakra.traces.reading import read_head, sniff_kind

_OUR_NAME = re.compile(r"rank-(\d+)\.json\.gz")
_WINDOW = re.compile(r"step-\d{8,}")
_RUN = re.compile(r"run-(\d+)")
_RANK_IN_FOREIGN_NAME = (
    re.compile(r"rank[-_ ]?(\d+)", re.I),
    re.compile(r"worker[-_]?(\d+)", re.I),
    re.compile(r"[-_](\d+)\.(?:pt\.trace\.)?json(?:\.gz)?$"),
)
_WORDS_FOR_KINDS = {"kineto", "trace", "device", "pt", "chakra", "et", "eg", "host", "execution", "json", "gz"}


@dataclass(frozen=True)
class TraceFile:
    """One trace file.

    Attributes:
        kind: ``"kineto"`` or ``"chakra"`` (the execution trace).
        path: Local path or fsspec URL.
        name: Path below the folder that was asked for, for messages.
        rank: The rank in the file's name; ``None``: the name has none.
    """

    kind: Kind
    path: str
    name: str
    rank: int | None


@dataclass(frozen=True)
class Capture:
    """The traces of one window.

    Attributes:
        root: The window's folder.
        name: Path of the window below the folder that was asked for; ``"."`` for that folder itself.
        kineto: Its Kineto traces by rank (files without a rank last, by name).
        chakra: Its execution traces, ordered alike.
        strangers: Names of files that do not belong in the window's folders, below the folder that was asked for.
        foreign: Whether the folder has not the layout of this package.
    """

    root: str
    name: str
    kineto: tuple[TraceFile, ...]
    chakra: tuple[TraceFile, ...]
    strangers: tuple[str, ...] = ()
    foreign: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in the names of its files."""
        return tuple(sorted({f.rank for f in self.kineto + self.chakra if f.rank is not None}))

    def pairs(self) -> list[tuple[TraceFile | None, TraceFile | None]]:
        """Each rank's Kineto trace and execution trace, ``None`` where there is none.

        Foreign files without a rank in the name go together if their names differ only in the words for the two kinds,
        or if there is one of each.
        """
        if len(self.kineto) == len(self.chakra) == 1 and (self.foreign or self.kineto[0].rank == self.chakra[0].rank):
            return [(self.kineto[0], self.chakra[0])]
        keys = [_pair_key(f) for f in self.kineto]
        single = {key: f for key, f in zip(keys, self.kineto, strict=True) if keys.count(key) == 1}
        partners = {}
        for trace in self.chakra:
            if (key := _pair_key(trace)) in single and single[key] not in partners:
                partners[single[key]] = trace
        alone = [f for f in self.chakra if f not in partners.values()]
        return [(f, partners.get(f)) for f in self.kineto] + [(None, f) for f in alone]

    def pair(self, rank: int) -> tuple[TraceFile | None, TraceFile | None]:
        """The Kineto trace and the execution trace of ``rank``, ``None`` where there is none."""
        return (
            next((f for f in self.kineto if f.rank == rank), None),
            next((f for f in self.chakra if f.rank == rank), None),
        )


def find_captures(path: str) -> list[Capture]:
    """All windows below ``path``, runs and windows in their order in time.

    Args:
        path: A folder with the layout of this package, one of its ``pytorch_profile`` or ``chakra`` folders, a
            folder of traces that others wrote, or a single trace file. Local, or an fsspec URL.

    Raises:
        CaptureError: There is no such folder, or no trace in it.
    """
    root = storage.absolute(path)
    root = root.rstrip("/") if is_url(root) and not root.endswith("://") else root
    parent, _, last = root.replace(os.sep, "/").rpartition("/")
    if last in FOLDERS.values() and any(_OUR_NAME.fullmatch(name) for name in storage.entries(root)):
        return [_window(parent, ".")]  # this window and none of the windows and runs beside it
    names = _entries(root, path)
    if names == [last] and last.endswith((".json", ".gz")):  # an object store lists a file as itself
        names = []
    if not names and (is_url(root) or os.path.isfile(root)) and last.endswith((".json", ".gz")):
        capture = _foreign(parent, ".", [last])
        if not capture.kineto and not capture.chakra:
            raise CaptureError(f"{path} is neither a Kineto trace nor an execution trace")
        return [capture]
    captures = _find(root, ".", names)
    if not captures:
        raise CaptureError(f"no traces in {path}{_hint(root, names)}")
    return captures


def _find(root: str, name: str, names: list[str]) -> list[Capture]:
    found = []
    if any(folder in names for folder in FOLDERS.values()):
        found.append(_window(root, name))
    for entry in sorted(filter(_WINDOW.fullmatch, names), key=lambda entry: int(entry[len("step-") :])):
        found.append(_window(join(root, entry), _below(name, entry)))
    for entry in sorted(filter(_RUN.fullmatch, names), key=lambda entry: int(entry[len("run-") :])):
        folder = join(root, entry)
        found.extend(_find(folder, _below(name, entry), storage.entries(folder)))
    if not found and (files := [entry for entry in names if entry.endswith((".json", ".gz"))]):
        capture = _foreign(root, name, files)
        found.extend([capture] if capture.kineto or capture.chakra else [])
    return found


def _window(root: str, name: str) -> Capture:
    files: dict[Kind, tuple[TraceFile, ...]] = {}
    strangers = []
    for kind, folder in FOLDERS.items():
        found = []
        for entry in storage.entries(join(root, folder)):
            below = _below(name, f"{folder}/{entry}")
            if match := _OUR_NAME.fullmatch(entry):
                found.append(TraceFile(kind, join(root, folder, entry), below, int(match[1])))
            else:
                strangers.append(below)
        files[kind] = _ordered(found)
    return Capture(root, name, files["kineto"], files["chakra"], tuple(sorted(strangers)))


def _foreign(root: str, name: str, entries: list[str]) -> Capture:
    files: dict[Kind, list[TraceFile]] = {"kineto": [], "chakra": []}
    strangers = []
    for entry in entries:
        path = join(root, entry)
        kind = sniff_kind(read_head(path))
        if kind is None:
            strangers.append(_below(name, entry))
        else:
            files[kind].append(TraceFile(kind, path, _below(name, entry), _rank_in_name(entry)))
    return Capture(root, name, _ordered(files["kineto"]), _ordered(files["chakra"]), tuple(sorted(strangers)), True)


def _ordered(files: list[TraceFile]) -> tuple[TraceFile, ...]:
    return tuple(sorted(files, key=lambda f: (f.rank is None, f.rank or 0, f.name)))


def _rank_in_name(name: str) -> int | None:
    for pattern in _RANK_IN_FOREIGN_NAME:
        if match := pattern.search(name):
            return int(match[1])
    return None


def _pair_key(trace: TraceFile) -> int | tuple[str, ...]:
    if trace.rank is not None:
        return trace.rank
    return tuple(word for word in re.split(r"[._-]+", trace.name.lower()) if word not in _WORDS_FOR_KINDS)


def _below(name: str, entry: str) -> str:
    return entry if name == "." else f"{name}/{entry}"


def _entries(root: str, path: str) -> list[str]:
    if not is_url(root) and not os.path.exists(root):
        raise CaptureError(f"no such folder: {path}")
    try:
        return storage.entries(root)
    except Exception as error:  # fsspec: whatever its backend raises, and a backend that is not installed
        raise CaptureError(f"cannot list {path}: {error}") from error


def _hint(root: str, names: list[str]) -> str:
    """Where the traces may be, when they are not in the folder that was asked for."""
    for depth in range(2):
        for entry in list(names):
            below = storage.entries(join(root, *entry.split("/")))
            if any(n in FOLDERS.values() or _WINDOW.fullmatch(n) or n.endswith((".json", ".json.gz")) for n in below):
                return f"; there are some in {join(root, *entry.split('/'))}"
            if depth == 0:
                names.extend(f"{entry}/{n}" for n in below[:100])
    return (
        "; expected pytorch_profile/ and chakra/, or step-*/ or run-*/ with those in them, "
        "or the .json or .json.gz files that torch.profiler exports"
    )
