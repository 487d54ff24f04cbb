"""HolisticTraceAnalysis reads our folder."""

import importlib.metadata

import pytest

pytestmark = pytest.mark.interop
analysis = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed: make interop")


def test_the_version_we_name():
    assert importlib.metadata.version("HolisticTraceAnalysis") == "0.5.0"


def test_a_two_rank_folder_has_ranks_0_and_1(two_ranks):
    loaded = analysis.TraceAnalysis(trace_dir=str(two_ranks / "traces" / "pytorch_profile"))
    assert sorted(loaded.t.get_all_traces()) == [0, 1]
    for rank in (0, 1):
        trace = loaded.t.get_trace(rank)
        assert len(trace) > 100
        assert set(trace["iteration"]) - {-1} == {2, 3}  # of 2, 3, 4: HTA leaves out the last step


def test_it_does_not_take_the_folder_above(two_ranks):
    assert sorted(p.name for p in (two_ranks / "traces" / "pytorch_profile").iterdir()) == [
        "rank-0.json.gz",
        "rank-1.json.gz",
    ]
