import gzip
import json
import os
import sys
from pathlib import Path

import pytest

from lightning_chakra.cli import main
from lightning_chakra.traces.jobs import map_ranks
from lightning_chakra.transform.mlc_chakra import explain, lost_dependencies

# Stand-ins for mlc-chakra's two programs with the same arguments, for what this command does around them. The real ones
# are run by tests/interop.
LINKER = """
import argparse, json, os, sys
p = argparse.ArgumentParser()
for name in ("--rank", "--chakra-host-trace", "--chakra-device-trace", "--output-file"):
    p.add_argument(name, required=True)
a = p.parse_args()
if os.environ.get("LINKER_FAILS"):
    sys.exit(os.environ["LINKER_FAILS"])
for path in (a.chakra_host_trace, a.chakra_device_trace):
    assert os.path.isabs(path), path
with open(a.chakra_host_trace) as file:
    host = json.load(file)
print(os.environ.get("LINKER_SAYS", ""))
traces = [n for n in os.listdir(os.path.dirname(a.chakra_device_trace)) if n.startswith("rank-")]
with open(a.output_file, "w") as file:
    json.dump({"rank": a.rank, "nodes": len(host["nodes"]), "traces": traces}, file)
"""
CONVERTER = """
import argparse, os
p = argparse.ArgumentParser()
p.add_argument("--log-filename", default="debug.log")
q = p.add_subparsers().add_parser("PyTorch")
q.add_argument("--input", required=True)
q.add_argument("--output", required=True)
a = p.parse_args()
if not os.environ.get("CONVERTER_WRITES_NOTHING"):
    with open(a.input) as linked, open(a.output, "w") as file:
        file.write("converted " + linked.read())
"""


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """The stand-ins, importable here and in the processes that the command starts."""
    root = tmp_path / "tools"
    for name, text in {
        "chakra/__init__.py": "",
        "chakra/src/__init__.py": "",
        "chakra/src/trace_link/__init__.py": "",
        "chakra/src/trace_link/trace_link.py": LINKER,
        "chakra/src/converter/__init__.py": "",
        "chakra/src/converter/converter.py": CONVERTER,
        "et_replay/__init__.py": "",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(root))
    for name in [name for name in sys.modules if name.split(".")[0] in ("chakra", "et_replay")]:
        monkeypatch.delitem(sys.modules, name)
    return root


def kineto(rank, *, first_id=1, steps=True, device=True, ids=True):
    events = [
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": f"aten::op{n}",
            "pid": 9,
            "tid": 9,
            "ts": 1.0 + n,
            "dur": 0.5,
            "args": {"Record function id": first_id + n if ids else 0},
        }
        for n in range(4)
    ]
    if steps:
        events.append({**events[0], "cat": "user_annotation", "name": "ProfilerStep#7", "args": {}})
        events[-1]["args"] = {"Record function id": first_id + 4 if ids else 0}
    if device:
        events.append({**events[0], "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "args": {"stream": 7}})
    return {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events, "traceName": "x"}


def chakra(*, schema="1.1.1-chakra.0.0.4", first_id=1):
    names = [*(f"aten::op{n}" for n in range(4)), "ProfilerStep#7"]
    nodes = [
        {
            "id": n + 2,
            "name": name,
            "ctrl_deps": 1,
            "attrs": [{"name": "rf_id", "type": "uint64", "value": n + first_id}],
        }
        for n, name in enumerate(names)
    ]
    nodes.append({"id": 1, "name": "[pytorch|profiler|execution_trace|process]", "ctrl_deps": 1, "attrs": []})
    return {"schema": schema, "pid": 9, "time": "", "start_ts": 1, "nodes": nodes, "finish_ts": 2}


def capture(root, ranks=(0, 1), *, kinetos=None, chakras=None):
    for rank in ranks:
        for folder, trace in (
            ("pytorch_profile", (kinetos or {}).get(rank, kineto(rank))),
            ("chakra", (chakras or {}).get(rank, chakra())),
        ):
            if trace is not None:
                path = root / folder / f"rank-{rank}.json.gz"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    return root


def run(tmp_path, capsys, *options):
    arguments = ["convert", str(tmp_path / "d"), "--output", str(tmp_path / "out" / "x"), "--jobs", "1", *options]
    code = main(arguments)
    said = capsys.readouterr()
    return code, said.out + said.err


def written(tmp_path):
    return sorted(p.name for p in (tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else []


def test_each_rank_becomes_a_file(tmp_path, capsys, tools):
    capture(tmp_path / "d")
    code, said = run(tmp_path, capsys)
    assert code == 0, said
    assert "100.0% of the operators linked" in said
    assert written(tmp_path) == ["x.0.et", "x.1.et"]
    content = (tmp_path / "out" / "x.1.et").read_text()
    assert json.loads(content.removeprefix("converted ")) == {"rank": "1", "nodes": 6, "traces": ["rank-1.json"]}


def test_ranks_side_by_side(tmp_path, capsys, tools):
    capture(tmp_path / "d")
    assert run(tmp_path, capsys, "--jobs", "2")[0] == 0
    assert written(tmp_path) == ["x.0.et", "x.1.et"]
    assert map_ranks(len, ["ab", "c"], 2) == [2, 1]


def test_ranks_are_chosen(tmp_path, capsys, tools):
    capture(tmp_path / "d", ranks=(0, 1, 2))
    assert run(tmp_path, capsys, "--ranks", "1-2")[0] == 0
    assert written(tmp_path) == ["x.1.et", "x.2.et"]
    code, said = run(tmp_path, capsys, "--ranks", "1,5")
    assert code == 2
    assert "no traces of rank 5, only of ranks 0-2" in said


@pytest.mark.parametrize(
    ("traces", "reason"),
    [
        ({"chakras": {1: chakra(first_id=900)}}, "only 0 of 5 operators are in both"),
        ({"kinetos": {1: kineto(1, ids=False)}}, "no ExecutionTraceObserver ran in the window"),
        ({"kinetos": {1: kineto(1, steps=False)}}, "no ProfilerStep marks"),
        ({"chakras": {1: chakra(schema="1.0.1")}}, "format '1.0.1'"),
    ],
)
def test_a_pair_that_does_not_link_is_refused(tmp_path, capsys, tools, traces, reason):
    capture(tmp_path / "d", **traces)
    code, said = run(tmp_path, capsys)
    assert code == 1
    assert reason in next(line for line in said.splitlines() if line.startswith("rank 1: NOT converted: "))
    assert written(tmp_path) == ["x.0.et"]


def test_a_rank_without_its_execution_trace_is_refused(tmp_path, capsys, tools):
    capture(tmp_path / "d", kinetos={2: kineto(2)}, ranks=(0, 1))
    (tmp_path / "d" / "chakra" / "rank-1.json.gz").unlink()
    code, said = run(tmp_path, capsys)
    assert code == 2
    assert "rank 1 has only one of the two traces" in said
    assert run(tmp_path, capsys, "--ranks", "0")[0] == 0


def test_a_cut_trace_is_refused(tmp_path, capsys, tools):
    path = capture(tmp_path / "d") / "chakra" / "rank-0.json.gz"
    path.write_bytes(path.read_bytes()[:-40])
    code, said = run(tmp_path, capsys)
    assert code == 1
    assert "rank 0: NOT converted: chakra/rank-0.json.gz:" in said
    assert written(tmp_path) == ["x.1.et"]


def test_existing_files_are_kept_unless_told(tmp_path, capsys, tools):
    capture(tmp_path / "d", ranks=(0,))
    target = tmp_path / "out" / "x.0.et"
    target.parent.mkdir()
    target.write_text("mine")
    code, said = run(tmp_path, capsys)
    assert code == 2
    assert "--overwrite" in said
    assert target.read_text() == "mine"
    assert run(tmp_path, capsys, "--overwrite")[0] == 0
    assert target.read_text().startswith("converted")
    assert written(tmp_path) == ["x.0.et"]


def test_failures_of_the_linker_in_one_line(tmp_path, capsys, tools, monkeypatch):
    capture(tmp_path / "d", ranks=(0,))
    monkeypatch.setenv("LINKER_FAILS", "ValueError: Duplicate correlation ID 17 found in kineto_id_cuda_launch_op_map.")
    code, said = run(tmp_path, capsys)
    assert code == 1
    assert said == (
        "rank 0: NOT converted: mlc-chakra's linker: "
        "two kernel launches of the Kineto trace share the correlation number 17\n"
    )
    assert written(tmp_path) == []


def test_a_converter_that_writes_nothing(tmp_path, capsys, tools, monkeypatch):
    capture(tmp_path / "d", ranks=(0,))
    monkeypatch.setenv("CONVERTER_WRITES_NOTHING", "1")
    code, said = run(tmp_path, capsys)
    assert code == 1
    assert "converter wrote nothing" in said


def test_lost_dependencies_are_told(tmp_path, capsys, tools, monkeypatch):
    capture(tmp_path / "d", ranks=(0,))
    monkeypatch.setenv(
        "LINKER_SAYS",
        "[ERROR]: Critical path analysis encountered an invalid graph structure: "
        "Cannot specify both 'axis' and 'index'/'columns'",
    )
    code, said = run(tmp_path, capsys)
    assert code == 1
    assert "WARNING: the dependencies by synchronization are missing" in said
    assert "pip install 'pandas<3'" in said
    assert written(tmp_path) == ["x.0.et"]


def test_a_trace_of_the_host_alone_is_marked(tmp_path, capsys, tools):
    capture(tmp_path / "d", ranks=(0,), kinetos={0: kineto(0, device=False)})
    code, said = run(tmp_path, capsys, "--json")
    assert code == 1
    (result,) = json.loads(said)
    assert result["warnings"] == ["no device events: the operators of the host only, and no communication"]
    assert result["bytes"] == (tmp_path / "out" / "x.0.et").stat().st_size


def test_the_linked_trace_can_be_kept(tmp_path, capsys, tools):
    capture(tmp_path / "d", ranks=(0,))
    assert run(tmp_path, capsys, "--keep-linked", str(tmp_path / "linked"))[0] == 0
    assert json.loads((tmp_path / "linked" / "rank-0.json").read_text())["nodes"] == 6


def test_several_windows_are_refused(tmp_path, capsys, tools):
    capture(tmp_path / "d" / "step-00000000")
    capture(tmp_path / "d" / "step-00000020")
    code, said = run(tmp_path, capsys)
    assert code == 2
    assert "step-00000020" in said


def test_without_execution_traces(tmp_path, capsys, tools):
    capture(tmp_path / "d", ranks=(0,), chakras={0: None})
    code, said = run(tmp_path, capsys)
    assert code == 2
    assert "collect_chakra" in said


@pytest.mark.parametrize(
    ("missing", "hint"),
    [
        ("chakra", "pip install 'lightning-chakra[convert]'"),
        ("et_replay", "git+https://github.com/facebookresearch/param"),
    ],
)
def test_missing_tools(tmp_path, capsys, monkeypatch, missing, hint):
    monkeypatch.setattr(
        "lightning_chakra.transform.convert._importable", lambda module: module.split(".")[0] != missing
    )
    capture(tmp_path / "d", ranks=(0,))
    code, said = run(tmp_path, capsys)
    assert code == 2
    assert hint in said
    assert said.count("\n") == 1


def test_what_is_known_about_failures():
    linker, converter = "chakra.src.trace_link.trace_link", "chakra.src.converter.converter"
    no_device = "TypeError: 'NoneType' object is not subscriptable in _construct_graph_from_kernels"
    assert "needs device events" in explain(linker, 1, no_device, device=False)
    assert "exit code 1" in explain(linker, 1, no_device, device=True)
    assert "fewer --jobs" in explain(linker, -9, "", device=True)
    assert "stack" in explain(converter, -11, "", device=True)
    assert explain(converter, 3, "", device=True) == "mlc-chakra's converter failed with exit code 3: it said nothing"
    assert "format 9.9" in explain(converter, 1, "ValueError: Unsupported schema version '9.9'. Please", device=True)
    assert lost_dependencies("all is well") is None


def test_the_traces_are_left_alone(tmp_path, capsys, tools):
    folder = capture(tmp_path / "d")
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    run(tmp_path, capsys, "--ranks", "0")
    assert {p: p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()} == before
