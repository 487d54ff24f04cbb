import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_chakra.cli import main
from lightning_chakra.recording.layout import TraceLayout
from lightning_chakra.recording.scratch import Scratch, leftovers
from lightning_chakra.transform.mending import UNFINISHED, mend_execution_trace

# One process that records as the callback does and is killed in the middle of its window.
VICTIM = """
import os, sys
import torch
from torch.profiler import ExecutionTraceObserver, record_function
from lightning_chakra.recording.layout import TraceLayout
from lightning_chakra.recording.scratch import Scratch

scratch, published, whole = sys.argv[1], sys.argv[2], sys.argv[3]
window = Scratch(scratch, 0, TraceLayout(published, True), ("kineto", "chakra")).open_window(20)
raw = next(file.path for file in window.files if file.kind == "chakra")
observer = ExecutionTraceObserver()
observer.register_callback(raw)
observer.start()
mark = record_function("ProfilerStep#20")
mark.__enter__()
a = torch.ones(4, 4)
for n in range(20):
    with record_function("outer"):
        torch.nn.functional.linear(a, a).relu()
        torch.einsum("ij,jk->ik", a, a)
if whole != "whole":
    os.kill(os.getpid(), 9)
mark.__exit__(None, None, None)
observer.stop()
observer.unregister_callback()
"""


@pytest.fixture(scope="module")
def whole_trace(tmp_path_factory):
    """An execution trace as torch writes it, uncompressed."""
    folder = tmp_path_factory.mktemp("whole")
    subprocess.run([sys.executable, "-c", VICTIM, str(folder), str(folder / "p"), "whole"], check=True, timeout=100)
    return next(folder.glob("*/*/chakra/rank-0.json")).read_bytes()


KINETO = b"""{
  "schemaVersion": 1, "baseTimeNanoseconds": 1,
  "distributedInfo": {"rank": 0, "world_size": 1},
  "traceEvents": [
  ],
  "traceName": "x" }"""


def left_behind(tmp_path, *, kineto=KINETO, chakra=None, pid=None, target="p", host=None):
    """A scratch folder whose process is gone."""
    root = tmp_path / target if "://" not in target else target
    scratch = Scratch(str(tmp_path / "s"), 0, TraceLayout(str(root), True), ("kineto", "chakra"))
    window = scratch.open_window(20)
    for file in window.files:
        content = kineto if file.kind == "kineto" else chakra
        if content is not None:
            Path(file.path).write_bytes(content)
    owner = Path(window.folder).parent / "owner.json"
    content = json.loads(owner.read_text())
    content["pid"] = dead_pid() if pid is None else pid
    content["host_name"] = host or content["host_name"]
    owner.write_text(json.dumps(content))
    return window


def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def published(tmp_path, kind, target="p"):
    return tmp_path / target / "step-00000020" / kind / "rank-0.json.gz"


def everything(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def recover(path, *options):
    return main(["recover", str(path), *options])


# --- mending ---------------------------------------------------------------------------------------------------------


def mended(tmp_path, cut):
    source, destination = tmp_path / "cut.json", tmp_path / "mended.json"
    source.write_bytes(cut)
    result = mend_execution_trace(str(source), str(destination))
    assert source.read_bytes() == cut
    return result, json.loads(destination.read_bytes()), destination.read_bytes()


def test_a_trace_cut_anywhere_becomes_whole(tmp_path, whole_trace):
    nodes = json.loads(whole_trace)["nodes"]
    kept = set()
    for share in (5, 20, 33, 47, 60, 71, 83, 92, 96, 99):
        cut = whole_trace[: len(whole_trace) * share // 100]
        result, trace, text = mended(tmp_path, cut)
        ids = {node["id"] for node in trace["nodes"]}
        assert len(ids) == len(trace["nodes"])
        assert all(node["ctrl_deps"] in ids for node in trace["nodes"])
        assert 1 in ids
        assert trace["nodes"][: result.nodes] == nodes[: result.nodes]
        assert cut[: len(cut) - result.cut_bytes] == text[: len(cut) - result.cut_bytes]  # torch's text, not a rewrite
        assert trace["lightning_chakra"] == {"partial": True}
        assert trace["finish_ts"] == trace["start_ts"]
        kept.add(result.nodes)
    assert len(kept) == 10
    assert max(kept) > 0.9 * len(nodes)


def test_running_operators_get_nodes_below_their_thread(tmp_path, whole_trace):
    place = whole_trace.rindex(b'"name": "aten::relu"')
    result, trace, _ = mended(tmp_path, whole_trace[:place])
    by_id = {node["id"]: node for node in trace["nodes"]}
    unfinished = [node for node in trace["nodes"] if node["name"] == UNFINISHED]
    assert len(unfinished) == result.unfinished >= 2  # the step's mark and "outer"
    for node in unfinished:
        assert by_id[node["ctrl_deps"]]["name"] == "[pytorch|profiler|execution_trace|thread]"
    originals = {node["id"]: node["name"] for node in json.loads(whole_trace)["nodes"]}
    assert {"ProfilerStep#20", "outer"} <= {originals[node["id"]] for node in unfinished}


def test_the_end_is_found_across_pieces(tmp_path, whole_trace, monkeypatch):
    cut = whole_trace[: len(whole_trace) // 2]
    with monkeypatch.context() as patch:
        patch.setattr("lightning_chakra.transform.mending._PIECE", 700)
        small, _, text = mended(tmp_path, cut)
    assert mended(tmp_path, cut)[0] == small
    assert json.loads(text)


@pytest.mark.parametrize("size", [0, 10, 120, 400])
def test_a_trace_without_a_whole_node_is_refused(tmp_path, whole_trace, size):
    with pytest.raises(ValueError, match="no whole node"):
        mended(tmp_path, whole_trace[:size])


def test_a_trace_that_is_broken_inside_is_refused(tmp_path, whole_trace):
    broken = whole_trace.replace(b'"aten::relu"', b'"aten\\:relu"', 1)
    with pytest.raises(ValueError, match="not a readable trace"):
        mended(tmp_path, broken[: len(broken) - 2000])


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="kills a process")
def test_a_process_killed_in_its_window(tmp_path, capsys):
    arguments = [str(tmp_path / "s"), str(tmp_path / "p"), "cut"]
    victim = subprocess.run([sys.executable, "-c", VICTIM, *arguments], check=False, timeout=100)
    assert victim.returncode == -signal.SIGKILL
    assert recover(tmp_path / "s") == 1
    said = capsys.readouterr().out
    assert "recovered in part" in said
    assert "only in the memory of the process" in said
    trace = json.loads(gzip.decompress(published(tmp_path, "chakra").read_bytes()))
    assert trace["lightning_chakra"] == {"partial": True}
    assert any(node["name"] == "aten::linear" for node in trace["nodes"])
    assert everything(tmp_path) == ["p/step-00000020/chakra/rank-0.json.gz"]
    assert recover(tmp_path / "s") == 0
    assert "nothing was left behind" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["parent", "scratch", "window"])
def test_whole_files_are_published_byte_by_byte(tmp_path, whole_trace, capsys, what):
    window = left_behind(tmp_path, chakra=whole_trace)
    step = Path(window.folder)
    assert recover({"parent": step.parent.parent, "scratch": step.parent, "window": step}[what]) == 0
    assert gzip.decompress(published(tmp_path, "pytorch_profile").read_bytes()) == KINETO
    assert gzip.decompress(published(tmp_path, "chakra").read_bytes()) == whole_trace
    said = capsys.readouterr().out
    assert said.count("recovered: ") == 2
    assert "MB)" in said
    assert everything(tmp_path / "s") == []


def test_a_published_trace_is_never_touched(tmp_path, whole_trace, capsys):
    window = left_behind(tmp_path, chakra=whole_trace)
    target = published(tmp_path, "chakra")
    target.parent.mkdir(parents=True)
    target.write_bytes(gzip.compress(b"another"))
    assert recover(tmp_path / "s") == 1
    assert "KEPT" in (said := capsys.readouterr().out)
    assert "another trace has that name, say --dirpath" in said
    assert recover(tmp_path / "s", "--discard") == 1  # not what could be recovered
    assert gzip.decompress(target.read_bytes()) == b"another"
    assert Path(window.files[1].path).read_bytes() == whole_trace


def test_killed_between_publishing_and_tidying_up(tmp_path, whole_trace, capsys):
    window = left_behind(tmp_path, chakra=whole_trace)
    for file in window.files:
        Path(file.target).parent.mkdir(parents=True)
        Path(file.target).write_bytes(gzip.compress(Path(file.path).read_bytes()))
    os.remove(window.files[0].path)
    assert recover(tmp_path / "s") == 0
    assert capsys.readouterr().out.count("was published") == 2
    assert everything(tmp_path / "s") == []


def test_half_written_files_of_the_dead_process_vanish(tmp_path, whole_trace):
    pid = dead_pid()
    left_behind(tmp_path, chakra=whole_trace, pid=pid)
    folder = published(tmp_path, "chakra").parent
    folder.mkdir(parents=True)
    (folder / f"rank-0.json.gz.{pid}.part").write_bytes(b"half")
    (folder / "rank-0.json.gz.1.part").write_bytes(b"somebody else's")
    assert recover(tmp_path / "s") == 0
    assert sorted(p.name for p in folder.iterdir()) == ["rank-0.json.gz", "rank-0.json.gz.1.part"]


def test_a_cut_kineto_trace_is_kept_until_it_is_discarded(tmp_path, whole_trace, capsys):
    window = left_behind(tmp_path, kineto=None, chakra=whole_trace)
    half = Path(window.files[0].path + ".tmp")
    half.write_bytes(KINETO[:60])
    assert recover(tmp_path / "s") == 1
    assert "cannot be mended" in capsys.readouterr().out
    assert published(tmp_path, "chakra").exists()
    assert half.exists()
    assert recover(tmp_path / "s", "--discard") == 1
    assert everything(tmp_path / "s") == []


def test_a_living_owner_is_left_alone(tmp_path, whole_trace, capsys):
    window = left_behind(tmp_path, chakra=whole_trace, pid=os.getpid())
    assert recover(tmp_path / "s") == 0
    assert recover(Path(window.folder).parent) == 2
    assert recover(window.folder) == 2
    assert "--force" in capsys.readouterr().err
    assert Path(window.files[1].path).exists()


def test_another_hosts_scratch_folder_on_demand(tmp_path, whole_trace):
    left_behind(tmp_path, chakra=whole_trace, host="elsewhere")
    assert recover(tmp_path / "s") == 0
    assert not (tmp_path / "p").exists()
    assert recover(tmp_path / "s", "--force") == 0
    assert published(tmp_path, "chakra").exists()


def test_another_place(tmp_path, whole_trace):
    left_behind(tmp_path, chakra=whole_trace, target="gone")
    assert recover(tmp_path / "s", "--dirpath", str(tmp_path / "here")) == 0
    assert everything(tmp_path) == [
        "here/step-00000020/chakra/rank-0.json.gz",
        "here/step-00000020/pytorch_profile/rank-0.json.gz",
    ]


def test_to_an_object_store(tmp_path, whole_trace):
    import fsspec

    left_behind(tmp_path, chakra=whole_trace, target=f"memory://{tmp_path.name}")
    assert recover(tmp_path / "s") == 0
    fs = fsspec.filesystem("memory")
    content = fs.cat(f"/{tmp_path.name}/step-00000020/chakra/rank-0.json.gz")
    assert gzip.decompress(content) == whole_trace


def test_an_unreadable_window_is_reported(tmp_path, whole_trace, capsys):
    window = left_behind(tmp_path, chakra=whole_trace)
    Path(window.folder, "window.json").write_text("{")
    assert recover(tmp_path / "s") == 1
    assert "LOST" in capsys.readouterr().out
    assert Path(window.files[1].path).exists()


def test_a_window_that_never_began_is_removed(tmp_path, whole_trace, capsys):
    window = left_behind(tmp_path, chakra=whole_trace)
    Path(window.folder, "window.json").unlink()
    Path(window.files[1].path).unlink(), Path(window.files[0].path).unlink()
    scratch = Path(window.folder).parent
    assert list(leftovers(str(scratch.parent))) == []  # the next training says nothing
    assert recover(scratch) == 0
    assert not scratch.exists()


def test_json_for_programs(tmp_path, whole_trace, capsys):
    left_behind(tmp_path, chakra=whole_trace[: len(whole_trace) // 2])
    assert recover(tmp_path / "s", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert [(o["status"], o["partial"]) for o in said] == [("recovered", False), ("recovered", True)]
    assert all(o["bytes"] == os.path.getsize(o["target"]) for o in said)


def test_no_such_folder(tmp_path, capsys):
    assert recover(tmp_path / "nowhere") == 2
    assert "no such folder" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert recover(tmp_path / "file") == 2
    assert "is a file: name a scratch folder" in capsys.readouterr().err


def test_a_list_touches_nothing(tmp_path, whole_trace, capsys):
    window = left_behind(tmp_path, chakra=whole_trace)
    before = everything(tmp_path)
    scratch = Path(window.folder).parent
    assert main(["recover", "--list", str(tmp_path / "s")]) == 0
    assert f"{scratch} (rank 0): " in (told := capsys.readouterr().out)
    assert "chakra/rank-0.json (" in told
    assert main(["recover", "--list", "--json", str(scratch)]) == 0
    (left,) = json.loads(capsys.readouterr().out)
    assert (left["folder"], left["rank"], left["ours"]) == (str(scratch), 0, True)
    assert everything(tmp_path) == before


def test_folders_of_other_users_are_left_alone_until_asked_for(tmp_path, whole_trace, capsys, monkeypatch):
    left_behind(tmp_path, chakra=whole_trace)
    before = everything(tmp_path)
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert recover(tmp_path / "s") == 0
    told = capsys.readouterr().out
    assert "left alone: 1 scratch folders of other users" in told
    assert everything(tmp_path) == before
    assert recover(tmp_path / "s", "--all-users") == 0
    assert len(list((tmp_path / "p").rglob("*.json.gz"))) == 2


def test_a_folder_of_another_user_that_is_named_is_taken_up(tmp_path, whole_trace, capsys, monkeypatch):
    scratch = Path(left_behind(tmp_path, chakra=whole_trace).folder).parent
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert recover(scratch) == 0
    assert "left alone" not in capsys.readouterr().out
    assert len(list((tmp_path / "p").rglob("*.json.gz"))) == 2


def test_a_folder_with_only_its_owner_is_removed(tmp_path, capsys):
    window = left_behind(tmp_path, kineto=None)
    scratch = Path(window.folder).parent
    shutil.rmtree(window.folder)
    assert [path.name for path in scratch.iterdir()] == ["owner.json"]
    assert recover(tmp_path / "s") == 0
    assert not scratch.exists()
