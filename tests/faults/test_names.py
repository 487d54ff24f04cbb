"""Names and values that torch writes as invalid JSON."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from torch.profiler import record_function

from lightning_chakra.recording.layout import Kind, PublishedTrace, RawTrace, RawWindow
from lightning_chakra.recording.mend import Mender, MendError
from lightning_chakra.recording.writer import TraceWriter
from tests import harness, programs
from tests.reading import attribute, check_pair, files, operators

# What Kineto makes of a double quote in a name.
QUOTE = "'" if Version(torch.__version__) >= Version("2.14") else '"'

HOSTILE = [
    'qu"ote',
    'end"',
    '"begin',
    "back\\slash",
    "end\\",
    "C:\\new",
    "new\nline",
    "\n",
    "tab\tulator",
    "carriage\rreturn",
    "control\x01\x1f\x7f",
    "Zeit für 漢字 🎉",
    "\u2028",
    'a", "pid": 3, "x": "b',
    'a", "ctrl_deps": 4, "x": "b',
    "{}[],",
    '\\"both\\"',
    "\\u0041",
    "",
    'long"' * 1000,
]


class Hostile(programs.Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for name in HOSTILE:
            with record_function(name, 'an "argument"\n'):
                torch.ones(2)
        # what masked attention does all the time
        scores = torch.zeros(2, 2).masked_fill(torch.ones(2, 2, dtype=torch.bool), float("-inf"))
        torch.clamp(scores, min=float("-inf"), max=float("inf")).add(1, alpha=float("nan"))
        torch._foreach_add([scores, scores], [float("inf"), float("nan")])
        strange = type('Cla"ss\\', (torch.nn.ReLU,), {})()
        exec(compile("result = torch.relu(scores)", 'fi"le\\\n.py', "exec"), {"torch": torch, "scores": scores})
        return super().training_step(strange(batch), batch_idx)


def hostile(callback: dict[str, Any]) -> dict[str, Any]:
    return programs.train(callback, model=Hostile())


def strictly(data: bytes) -> Any:
    """JSON without NaN and without an object that has a key twice."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(items)) == len(items), [key for key, _ in items]
        return dict(items)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(data.decode("utf-8"), parse_constant=refuse, object_pairs_hook=pairs)


@pytest.mark.parametrize("with_stack", [False, True])
def test_hostile_names_are_the_same_in_both_files(out: Path, tmp_path: Path, with_stack: bool) -> None:
    callback = {
        "dirpath": out,
        "collect_chakra": True,
        "collect_shapes": True,
        "collect_callstack": with_stack,
        "scratch_dir": tmp_path / 'scr"atch ü',
    }
    (rank,) = harness.run(hostile, callback)
    assert rank.exitcode == 0, rank.err
    assert "ChakraProfilerWarning" not in rank.err
    assert rank.value["offences"] == []
    assert files(out) == ["chakra/rank-0.json.gz", "pytorch_profile/rank-0.json.gz"]
    kineto, et = check_pair(out, 0, [10, 11])
    for trace in ("pytorch_profile", "chakra"):
        strictly(gzip.decompress((out / trace / "rank-0.json.gz").read_bytes()))
    for name in HOSTILE:
        assert sum(node["name"] == name for node in et["nodes"]) == 2, name
        assert sum(event["name"] == name for event in operators(kineto)) == 2, name
    values = [value for node in et["nodes"] if node["name"] == "aten::clamp" for value in node["inputs"]["values"]]
    assert "-inf" in values
    assert "inf" in values
    if with_stack:
        assert any(f"Cla{QUOTE}ss" in event["name"] for event in kineto["traceEvents"])
        assert any(event["name"].startswith(f"fi{QUOTE}le") for event in kineto["traceEvents"])
    assert not list((tmp_path / 'scr"atch ü').iterdir())


def test_hostile_names_without_an_execution_trace(out: Path) -> None:
    (rank,) = harness.run(hostile, {"dirpath": out})
    assert rank.exitcode == 0, rank.err
    kineto = strictly(gzip.decompress((out / "pytorch_profile" / "rank-0.json.gz").read_bytes()))
    names = {event["name"] for event in kineto["traceEvents"]}
    # Kineto itself replaces what it cannot write; only the execution trace would know better
    quotes = {name.replace('"', QUOTE) for name in ('qu"ote', 'a", "pid": 3, "x": "b')}
    assert {*quotes, "back/slash", "newline", "unknown"} <= names


# The two templates, as torch 2.13 fills them.


def new_event(name: str, number: int, args: str = "") -> str:
    return (
        f'\n  {{\n    "ph": "X",\n    "cat": "cpu_op",\n    "name": "{name}",\n    "pid": 9,\n    "tid": 9,\n'
        f'    "ts": 53.858,\n    "dur": 2.264\n    ,\n    "args": {{\n      "External id": {number},'
        f'"Record function id": {number}, {args}"Ev Idx": {number}\n    }}\n  }},'
    )


def old_event(name: str, number: int, args: str = "") -> str:
    """The same of torch 2.9."""
    return (
        f'\n  {{\n    "ph": "X", "cat": "cpu_op", "name": "{name}", "pid": 9, "tid": 9,\n'
        f'    "ts": 53.858, "dur": 2.264,\n    "args": {{\n      "External id": {number},'
        f'"Record function id": {number}, {args}"Ev Idx": {number}\n    }}\n  }},'
    )


def old_kineto_file(events: list[str], path: str = "/tmp/k.json") -> bytes:
    head = '\n  {\n    "schemaVersion": 1,\n    "deviceProperties": [\n    ],\n  "traceEvents": ['
    ids = '"ts": 5.896, "pid": 9, "tid": 9,'
    head += (
        f'\n  {{\n    "name": "thread_name", "ph": "M", {ids}\n    "args": {{\n      "name": "thr"ead"\n    }}\n  }},'
    )
    end = '\n  {\n    "name": "Record Window End", "ph": "i", "s": "g",\n    "pid": "", "tid": "", "ts": 5.896\n  }'
    return (head + "".join(events) + end + f'\n  ],\n  "traceName": "{path}"\n}}').encode("utf-8", "surrogateescape")


def new_kineto_file(events: list[str], path: str = "/tmp/k.json") -> bytes:
    head = ' {\n    "schemaVersion": 1,\n    "deviceProperties": [],\n    \n    "traceEvents": [\n    '
    thread = '\n  {\n    "ph": "M",\n    "name": "thread_name",\n    "args": {\n      "name": "thr"ead"\n    }\n  },'
    end = '\n  {\n    "ph": "i",\n    "name": "Record Window End",\n    "ts": 5.896\n    \n  }'
    return (head + thread + "".join(events) + end + f'\n  ],"traceName": "{path}" }}').encode(
        "utf-8", "surrogateescape"
    )


def node(name: str, number: int) -> str:
    empty = '{"values": [], "shapes": [], "types": [], "strides": []}'
    return (
        f'\n      {{\n        "id": {number}, "name": "{name}", "ctrl_deps": 1,\n        "inputs": {empty},\n'
        f'        "outputs": {empty},\n        "attrs": [{{"name": "rf_id", "type": "uint64", "value": {number}}}]\n'
        "      }"
    )


def et_file(nodes: list[str]) -> bytes:
    text = '{\n  "schema": "1.1.1-chakra.0.0.4", "pid": 9,\n  "nodes": [' + ",".join(nodes) + "\n  ],"
    return (text + '\n  "finish_ts": 18\n}').encode("utf-8", "surrogateescape")


def mended(mender: Mender, raw: bytes, kind: Kind, piece: int) -> bytes:
    parts = list(mender.read(io.BytesIO(raw), kind, piece))
    assert sum(consumed for _, consumed in parts) == len(raw)
    return b"".join(part for part, _ in parts)


def spelled_by_kineto(name: str) -> str:
    name = name.replace("\\", "/").replace("\n", "")
    return name if name.isascii() and name.isprintable() else "unknown"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=6), st.integers(1, 3000), st.booleans())
@example(HOSTILE, 100, False)
@example(HOSTILE, 100, True)
@example(["\x7f"], 1, False)
@example(['"\n', "\\", '",\n', '"}'], 1, False)
@example(['a", "pid": 3, "tid": 4,', 'a", "ph": "i", "s": "g'], 1, True)
def test_any_name_survives_pieces_of_any_size(names: list[str], piece: int, old: bool) -> None:
    event, kineto_file = (old_event, old_kineto_file) if old else (new_event, new_kineto_file)
    mender = Mender()
    et = strictly(mended(mender, et_file([node(n, i) for i, n in enumerate(names, 2)]), "chakra", piece))
    raw = kineto_file([event(spelled_by_kineto(n), i) for i, n in enumerate(names, 2)], 'pa"th')
    kineto = strictly(mended(mender, raw, "kineto", piece))
    assert [n["name"] for n in et["nodes"]] == names
    assert [e["name"] for e in kineto["traceEvents"][1:-1]] == names
    assert kineto["traceEvents"][0]["args"]["name"] == 'thr"ead'
    assert kineto["traceName"] == 'pa"th'


def test_only_the_broken_string_changes() -> None:
    events = [new_event("aten::add", 2), new_event('qu"ote', 3), new_event("aten::mul", 4)]
    raw = new_kineto_file(events).replace(b'thr"ead', b"thread")
    assert mended(Mender(), raw, "kineto", 64) == raw.replace(b'qu"ote', b'qu\\"ote')
    raw = et_file([node("aten::add", 2), node("a\tb", 3), node("ü", 4)])
    assert mended(Mender(), raw, "chakra", 64) == raw.replace(b"a\tb", b"a\\tb")


def test_quotes_that_kineto_escaped_itself_stay() -> None:
    raw = new_kineto_file([new_event('qu\\"ote', 3)]).replace(b'thr"ead', b"thread")
    assert mended(Mender(), raw, "kineto", 64) == raw


def test_a_caller_in_a_file_with_a_quote_in_its_name() -> None:
    """As torch 2.14 writes it, with stacks."""
    args = '"CallFrom": "fi"le/.py:1", "Python parent id": 971, '
    raw = new_kineto_file([new_event("f", 7, args), new_event("g", 8)]).replace(b'thr"ead', b"thread")
    assert mended(Mender(), raw, "kineto", 4096) == raw.replace(b'fi"le', b'fi\\"le')


def test_values_that_are_no_json() -> None:
    raw = new_kineto_file([new_event("k", 2, '"blocks per SM": inf, "x": -nan, "s": "a\tb", ')])
    args = strictly(mended(Mender(), raw, "kineto", 1000))["traceEvents"][1]["args"]
    assert (args["blocks per SM"], args["x"], args["s"]) == ("inf", "-nan", "a\tb")
    raw = new_kineto_file([new_event("thread \udcc3", 2)])
    assert strictly(mended(Mender(), raw, "kineto", 1000))["traceEvents"][1]["name"] == "thread \ufffd"


def test_memory_does_not_grow_with_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_chakra.recording.mend.MOST_NAMES", 10)
    mender = Mender()
    et = strictly(mended(mender, et_file([node("a\tb", i) for i in range(2, 100)]), "chakra", 512))
    assert {n["name"] for n in et["nodes"]} == {"a\tb"}
    assert [attribute(n, "rf_id") for n in et["nodes"]] == list(range(2, 100))
    kineto = strictly(mended(mender, new_kineto_file([new_event("unknown", i) for i in range(2, 100)]), "kineto", 512))
    assert [e["name"] for e in kineto["traceEvents"][1:-1]] == ["a\tb"] * 10 + ["unknown"] * 88


def test_what_cannot_be_mended_is_kept_raw_and_said_once(tmp_path: Path) -> None:
    raw = tmp_path / "window" / "rank-0.json"
    raw.parent.mkdir()
    raw.write_bytes(new_kineto_file([new_event("add", 2, '"k"ey": "\t", ')]))
    with pytest.raises(MendError):
        mended(Mender(), raw.read_bytes(), "kineto", 100)
    published: list[PublishedTrace] = []
    writer = TraceWriter(published.append)
    target = tmp_path / "out" / "rank-0.json.gz"
    writer.submit(RawWindow(1, 2, False, str(raw.parent), (RawTrace("kineto", str(raw), str(target)),)))
    writer.close()
    (error,) = writer.take_errors()
    assert "invalid JSON that cannot be mended" in error.reason
    assert raw.exists()
    assert published == []
    assert not any(target.parent.iterdir())
