"""mlc-chakra and et_replay take our files."""

import gzip
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from lightning_chakra.cli import main
from lightning_chakra.transform.mending import UNFINISHED, mend_execution_trace

pytestmark = pytest.mark.interop
pytest.importorskip("chakra.src.converter.pytorch_converter", reason="mlc-chakra is not installed: make interop")

HAS_ET_REPLAY = importlib.util.find_spec("et_replay") is not None
needs_et_replay = pytest.mark.skipif(not HAS_ET_REPLAY, reason="et_replay is not importable (it is not on PyPI)")


def convert(path, output):
    """Run the real converter on a trace in its input format."""
    command = [sys.executable, "-m", "chakra.src.converter.converter", "--log-filename", str(output) + ".log"]
    command += ["PyTorch", "--input", str(path), "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return nodes_of(output)


def nodes_of(path):
    """The nodes of a Chakra trace."""
    from chakra.schema.protobuf.et_def_pb2 import GlobalMetadata, Node
    from chakra.src.third_party.utils.protolib import decodeMessage, openFileRd

    found = []
    file = openFileRd(str(path))
    decodeMessage(file, GlobalMetadata())
    while decodeMessage(file, node := Node()):
        found.append(node)
    return found


def load(path):
    from et_replay.utils import load_execution_trace_file

    return load_execution_trace_file(str(path)).get_nodes()


def reachable(node):
    return 1 + sum(map(reachable, node.children))


def test_the_versions_we_name():
    assert importlib.metadata.version("mlc-chakra") == "1.0.0"
    assert int(importlib.metadata.version("pandas").split(".")[0]) < 3


def test_the_converter_takes_our_execution_trace(plain_trace, tmp_path):
    nodes = convert(plain_trace, tmp_path / "x.0.et")
    names = {node.name for node in nodes}
    assert {"aten::linear", "aten::addmm"} & names
    assert len(nodes) > 0.9 * len(json.loads(plain_trace.read_text())["nodes"])


@needs_et_replay
@pytest.mark.parametrize("rank", [0, 1])
def test_et_replay_loads_our_execution_trace(two_ranks, rank):
    path = two_ranks / "traces" / "chakra" / f"rank-{rank}.json.gz"
    nodes = load(path)
    content = json.loads(gzip.decompress(path.read_bytes()))
    assert len(nodes) == len(content["nodes"]) == reachable(nodes[1])
    assert any(node.name.startswith("ProfilerStep#") for node in nodes.values())


def test_the_converter_takes_a_mended_trace(plain_trace, tmp_path):
    cut, mended = tmp_path / "cut.json", tmp_path / "mended.json"
    cut.write_bytes(plain_trace.read_bytes()[: plain_trace.stat().st_size * 3 // 5])
    result = mend_execution_trace(str(cut), str(mended))
    assert len(convert(mended, tmp_path / "x.0.et")) > 0.9 * result.nodes


@needs_et_replay
def test_et_replay_loads_a_mended_trace(plain_trace, tmp_path):
    cut, mended = tmp_path / "cut.json", tmp_path / "mended.json"
    text = plain_trace.read_bytes()
    cut.write_bytes(text[: text.rindex(b'"name": "aten::')])  # within the last step: its mark was not written yet
    mend_execution_trace(str(cut), str(mended))
    nodes = load(mended)
    assert reachable(nodes[1]) == len(nodes)
    assert Counter(node.name for node in nodes.values())[UNFINISHED] >= 1


@needs_et_replay
def test_a_gpu_pair_becomes_a_trace_for_astra_sim(gpu_pair, tmp_path, capsys):
    code = main(["convert", str(gpu_pair / "traces"), "--output", str(tmp_path / "resnet"), "--jobs", "1"])
    said = capsys.readouterr().out
    assert code == 0, said
    nodes = nodes_of(tmp_path / "resnet.0.et")
    from chakra.schema.protobuf.et_def_pb2 import COMM_COLL_NODE

    on_device = [node for node in nodes if not next(a.bool_val for a in node.attr if a.name == "is_cpu_op")]
    assert (len(nodes), len(on_device)) == (18050, 3660)
    assert sum(node.type == COMM_COLL_NODE for node in nodes) == 21


@needs_et_replay
def test_what_the_linker_cannot_do_on_the_cpu(two_ranks, tmp_path, capsys):
    """docs/tools.md says so; when this fails, a new version can."""
    code = main(["convert", str(two_ranks / "traces"), "--output", str(tmp_path / "x"), "--ranks", "0", "--jobs", "1"])
    assert code == 1
    assert "it needs device events, and this trace has none" in capsys.readouterr().out
    assert not list(Path(tmp_path).iterdir())


@needs_et_replay
def test_traces_of_two_windows_are_refused(two_ranks, gpu_pair, tmp_path, capsys):
    """mlc-chakra itself says that this was successful."""
    for kind, folder in (("pytorch_profile", two_ranks), ("chakra", gpu_pair)):
        target = tmp_path / "d" / kind / "rank-0.json.gz"
        target.parent.mkdir(parents=True)
        target.write_bytes((folder / "traces" / kind / "rank-0.json.gz").read_bytes())
    assert main(["convert", str(tmp_path / "d"), "--output", str(tmp_path / "x"), "--jobs", "1"]) == 1
    assert "they are not of one window" in capsys.readouterr().out


@pytest.mark.skipif(HAS_ET_REPLAY, reason="et_replay is importable")
def test_without_et_replay_there_is_a_hint(two_ranks, tmp_path, capsys):
    assert main(["convert", str(two_ranks / "traces"), "--output", str(tmp_path / "x")]) == 2
    assert "git+https://github.com/facebookresearch/param.git" in capsys.readouterr().err
