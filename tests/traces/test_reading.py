"""Reading in pieces gives what reading at once gives, whatever the layout of the file and the size of the pieces."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_chakra.traces import reading
from lightning_chakra.traces.reading import Event, KinetoHead, TraceError, TraceReader, sniff_kind

NASTY = ["},\n  {", "}, {", '"},{"', "\\", 'x"traceEvents": [', "é", "]}", "\u2028"]
EVENTS: list[dict[str, Any]] = [
    {
        "ph": "X",
        "name": name,
        "cat": "cpu_op",
        "pid": 1,
        "tid": n,
        "ts": n + 0.5,
        "dur": 1,
        "args": {"a": [{}, {"b": {}}]},
    }
    for n, name in enumerate(NASTY * 3)
]
LAYOUTS: list[dict[str, Any]] = [{"indent": 2}, {"indent": 1}, {}, {"separators": (",", ":")}, {"ensure_ascii": False}]


@pytest.mark.parametrize("piece", [1, 7, 64, 300, 1 << 20])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_pieces(piece: int, layout: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE", piece)
    document = {"distributedInfo": {"rank": 3}, "traceEvents": EVENTS, "after": [{"a": 1}, {"b": 2}], "traceName": "n"}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document, **layout), encoding="utf-8")
    reader = TraceReader(str(path), "kineto", Event)
    events = [event for events in reader for event in events]
    assert [(e.name, e.ts, e.tid) for e in events] == [(e["name"], e["ts"], e["tid"]) for e in EVENTS]
    assert reader.head(KinetoHead).distributed == {"rank": 3}


@pytest.mark.parametrize("piece", [40, 1 << 20])
@pytest.mark.parametrize("event", [0, 12, 23])
def test_the_place_of_an_error(piece: int, event: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE", piece)
    content = json.dumps({"traceEvents": EVENTS}, indent=2)
    at = content.index(f'"tid": {event},')
    path = tmp_path / "trace.json"
    path.write_text(content[:at] + "!" + content[at:])
    with pytest.raises(TraceError, match=rf"not strict JSON at byte {at}: .*near"):
        list(TraceReader(str(path), "kineto", Event))


def test_memory_is_bounded_by_the_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE", 4096)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": EVENTS * 200}, indent=2))
    sizes = [len(events) for events in TraceReader(str(path), "kineto", Event)]
    assert sum(sizes) == 200 * len(EVENTS)
    assert max(sizes) < 100


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file is empty"),
        ("{}", "it has no traceEvents"),
        ('{"traceEvents": 3}', "an entry is not as it should be"),
        ('{"traceEvents": [{"ts": "soon"}]}', "an entry is not as it should be"),
        ('{"traceEvents": [{"ts": 1}', "the JSON ends too early"),
        ('{"traceEvents": [] } trailing', "not strict JSON"),
    ],
)
def test_what_is_no_trace(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(TraceError, match=message):
        list(TraceReader(str(path), "kineto", Event))


def test_kinds() -> None:
    assert sniff_kind(b'{\n  "schema": "1.0.1", "pid": 1') == "chakra"
    assert sniff_kind(b' {\n "schemaVersion": 1,') == "kineto"
    assert sniff_kind(b'{"traceEvents":[]}') == "kineto"
    assert sniff_kind(b'{"a": 1}') is None
    assert sniff_kind(b"\x00\x01") is None
