"""summary: the figures of a timeline worked out by hand, and those of HolisticTraceAnalysis on public GPU traces."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_chakra.analysis.activity import RankActivity
from lightning_chakra.analysis.collecting import read_activity
from lightning_chakra.cli import main
from lightning_chakra.traces.captures import find_captures
from lightning_chakra.traces.intervals import subtract, total, union
from tests.cli.captured import needs_shared, rewrite, write_kineto
from tests.cli.test_check import put

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
COMMS = {
    "Collective name": "allreduce",
    "In msg nelems": 1000,
    "Out msg nelems": 1000,
    "dtype": "BFloat16",
    "Group size": 2,
    "Process Group Name": "0",
    "Process Group Description": "default_pg",
}


def event(cat: str, name: str, start: float, end: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": end - start, "args": args}


def timeline(slower: float = 0) -> list[dict[str, Any]]:
    """Two steps with a validation between them; the last kernel ends after the last step. µs."""
    return [
        event("user_annotation", "ProfilerStep#5", 0, 100 + slower),
        event("user_annotation", "ProfilerStep#6", 150, 250),
        event("user_annotation", "validation", 105, 140),
        event("cpu_op", "aten::empty", 15, 20),
        event("cpu_op", "aten::mm", 10, 40),  # not in the order of time, as in real traces
        event("cuda_runtime", "cudaLaunchKernel", 30, 38),
        event("user_annotation", "loss", 45, 60),
        event("cpu_op", "aten::sum", 50, 55),
        event("cpu_op", "aten::mm", 42, 44, tid=2),
        event("python_function", "train.py(3): step", 0, 90),
        event("kernel", "gemm", 20, 60, tid=7),
        event("kernel", NCCL, 50, 90, tid=8, **COMMS),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 85, 95, tid=7),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 200, 210, tid=7),
        event("kernel", "gemm", 230, 260, tid=7),
        event("gpu_user_annotation", "ProfilerStep#5", 20, 95, tid=7),
        event("user_annotation", "nccl:all_reduce", 45, 46, tid=3, **COMMS),
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}},
        {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 300, "s": "g"},
    ]


def write(folder: Path, rank: int = 0, events: list[dict[str, Any]] | None = None) -> Path:
    path = folder / "pytorch_profile" / f"rank-{rank}.json.gz"
    write_kineto(path, timeline() if events is None else events, distributedInfo={"rank": rank, "world_size": 2})
    return folder


def activities(path: Path) -> list[RankActivity]:
    return [read_activity(trace) for capture in find_captures(str(path)) for trace in capture.kineto]


def summary(path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    assert main(["summary", str(path), "--json", "--jobs", "1", *more]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)["windows"]


def parts(split: Any) -> tuple[float, ...]:
    return (split.compute, split.communication, split.copies, split.idle)


def test_the_time_of_the_device(tmp_path: Path) -> None:
    (rank,) = activities(write(tmp_path))
    assert rank.device is not None
    assert (parts(rank.device), rank.device.span) == ((70, 30, 15, 125), 240)
    first, second = rank.steps
    assert (first.number, first.mark_us, first.period_us, first.validation_us) == (5, 100, 150, 35)
    assert parts(first.device) == (40, 30, 5, 75)
    assert (second.number, second.mark_us, second.period_us, second.validation_us) == (6, 100, None, 0)
    assert parts(second.device) == (30, 0, 10, 70)  # to the end of the last kernel, at 260


def test_self_times(tmp_path: Path) -> None:
    (rank,) = activities(write(tmp_path))
    host = {name: (o.calls, o.self_us, o.total_us) for name, o in rank.host.items()}
    assert host == {
        "aten::mm": (2, 30 - 5 - 8 + 2, 32),
        "aten::empty": (1, 5, 5),
        "cudaLaunchKernel": (1, 8, 8),
        "aten::sum": (1, 5, 5),
    }
    ranges = {name: (o.calls, o.self_us, o.total_us) for name, o in rank.ranges.items()}
    assert ranges == {"loss": (1, 10, 15), "validation": (1, 35, 35), "nccl:all_reduce": (1, 1, 1)}
    assert {name: (o.calls, o.self_us) for name, o in rank.kernels.items()} == {
        "gemm": (2, 70),
        NCCL: (1, 40),
        "Memcpy DtoH (Device -> Pageable)": (1, 10),
        "Memcpy HtoD (Pageable -> Device)": (1, 10),
    }


def test_gaps_of_the_device(tmp_path: Path) -> None:
    (rank,) = activities(write(tmp_path))
    assert [(g.where, g.step, g.start_us, g.length_us, g.before, g.after) for g in rank.gaps] == [
        ("device", 5, 95, 105, "Memcpy DtoH (Device -> Pageable)", "Memcpy HtoD (Pageable -> Device)"),
        ("device", 6, 210, 20, "Memcpy HtoD (Pageable -> Device)", "gemm"),
    ]


def test_gaps_of_the_host_without_a_device(tmp_path: Path) -> None:
    events = [e for e in timeline() if e.get("cat") not in ("kernel", "gpu_memcpy")]
    (rank,) = activities(write(tmp_path, 0, events))
    assert rank.device is None
    assert [step.device for step in rank.steps] == [None, None]
    assert [(g.where, g.start_us, g.length_us, g.before, g.after) for g in rank.gaps] == [
        ("host", 44, 6, "aten::mm", "aten::sum"),
        ("host", 40, 2, "aten::mm", "aten::mm"),
    ]


def test_collectives(tmp_path: Path) -> None:
    (rank,) = activities(write(tmp_path))
    (found,) = rank.collectives  # not once more for the range of the same call
    assert (found.name, found.group, found.group_size, found.dtype) == ("allreduce", "0 (default_pg)", 2, "BFloat16")
    assert (found.calls, found.in_bytes, found.out_bytes, found.time_us) == (1, 2000, 2000, 40)


def test_collectives_of_a_cpu_backend(tmp_path: Path) -> None:
    """Names and arguments as torch 2.13 writes them for gloo, which leaves no record_param_comms."""
    args = {"Input Dims": [[10, 3]], "Input type": ["float"], "Record function id": 0}
    events = [
        event("user_annotation", "gloo:all_reduce", 0, 30, tid=4, **args),
        event("user_annotation", "gloo:all_reduce", 40, 60, tid=5, **args),
        event("user_annotation", "gloo:barrier", 70, 75, tid=5),
    ]
    group = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]}
    write_kineto(tmp_path / "a.json", events, distributedInfo={"rank": 0, "world_size": 2, "pg_config": [group]})
    (rank,) = activities(tmp_path)
    assert [(c.name, c.group, c.group_size, c.calls, c.in_bytes, c.time_us) for c in rank.collectives] == [
        ("all_reduce", "0 (default_pg)", 2, 2, 240, 50),
        ("barrier", "0 (default_pg)", 2, 1, None, 5),
    ]


def test_kernels_without_the_arguments_of_their_collective(tmp_path: Path) -> None:
    events = [event("kernel", NCCL, 0, 30), event("kernel", "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t()", 40, 50)]
    (rank,) = activities(write(tmp_path, 0, events))
    assert [(c.name, c.calls, c.in_bytes, c.time_us) for c in rank.collectives] == [
        ("AllReduce", 1, None, 30),
        ("SendRecv", 1, None, 10),
    ]


def test_the_spread_between_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, slower in enumerate((0, 30, 10)):
        write(tmp_path, rank, timeline(slower))
    late = [e for e in timeline() if e.get("name") != NCCL] + [event("kernel", NCCL, 50, 70, tid=8, **COMMS)]
    write(tmp_path, 3, late)
    (window,) = summary(tmp_path, capsys)
    assert window["spread"][0] == {
        "step": None,
        "slowest": "1",
        "slowest_us": 115,
        "fastest": "0",
        "fastest_us": 100,
        "median_us": 102.5,
    }
    assert [(s["step"], s["slowest"], s["slowest_us"], s["fastest_us"]) for s in window["spread"][1:]] == [
        (5, "1", 130, 100),
        (6, "0", 100, 100),
    ]
    assert window["waited_for"] == "3"
    assert window["collectives"][0]["calls"] == 4
    assert window["host"][0] == {"name": "aten::mm", "calls": 8, "self_us": 76, "total_us": 128}
    assert main(["summary", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "all steps: rank 1 is the slowest with 0.115 ms, 0.015 ms (15.0%) more than rank 0" in out
    assert "rank 3 has least exposed communication, 0.010 ms, rank 0 most, 0.030 ms" in out


def test_top_bounds_the_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (window,) = summary(write(tmp_path), capsys, "--top", "2")
    assert len(window["host"]) == len(window["kernels"]) == len(window["ranks"][0]["host"]) == 2
    assert main(["summary", str(tmp_path), "--top", "0"]) == 2


def test_a_recorded_capture(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (window,) = summary(capture, capsys)
    assert [[step["number"] for step in rank["steps"]] for rank in window["ranks"]] == [[10, 11], [10, 11]]
    (first, last) = window["ranks"][0]["steps"]
    assert first["period_us"] >= first["mark_us"] > 0
    assert (last["period_us"], last["device"]) == (None, None)
    names = {operator["name"] for operator in window["host"]}
    assert "aten::addmm" in names
    assert not any(name.startswith("ProfilerStep") for name in names)


def test_names_that_would_break_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, [event("cpu_op", "a\nb\x1b[31m", 0, 10)])
    assert main(["summary", str(tmp_path)]) == 0
    assert "a\\nb\\x1b[31m" in capsys.readouterr().out
    assert main(["summary", str(tmp_path), "--jobs", "-2"]) == 2
    assert "--jobs: at least 1" in capsys.readouterr().err


def test_some_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(3):
        write(tmp_path / "step-00000010", rank)
    write(tmp_path / "step-00000020", 0)
    (window,) = summary(tmp_path, capsys, "--ranks", "1-2")
    assert (window["name"], [rank["rank"] for rank in window["ranks"]]) == ("step-00000010", [1, 2])
    assert main(["summary", str(tmp_path), "--ranks", "2-3"]) == 2
    assert "there are no traces of rank 3, only of ranks 0-2" in capsys.readouterr().err


def test_names_like_markup_are_printed_as_they_are(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(capture / "pytorch_profile/rank-0.json.gz", ('"aten::addmm"', '"[bold]:smile: [/x] {n}"'))
    assert main(["summary", str(capture), "--top", "100"]) == 0
    assert "[bold]:smile: [/x] {n}" in capsys.readouterr().out


def test_a_file_that_cannot_be_read(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (capture / "pytorch_profile/rank-0.json.gz").write_bytes(b"\x1f\x8b\x08")
    assert main(["summary", str(capture), "--jobs", "1"]) == 1
    out = capsys.readouterr().out
    assert "pytorch_profile/rank-0.json.gz: the gzip file ends too early" in out
    assert re.search(r"^ 1 +10 ", out, re.M)  # the other rank is there


# --- plots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.png", "a.html"])
def test_plots(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    for rank in (0, 1):
        write(tmp_path, rank)
    target = tmp_path / name
    assert main(["summary", str(tmp_path), "--plot", str(target), "--jobs", "1"]) == 0
    content = target.read_bytes()
    if name.endswith(".png"):
        assert content.startswith(b"\x89PNG")
        assert len(content) > 20_000
    else:
        assert b"exposed communication" in content
        assert b"<script src=" not in content  # needs no network


def test_what_is_drawn(tmp_path: Path) -> None:
    from lightning_chakra.analysis.summary import put_together
    from lightning_chakra.cli.plot import steps_data

    (capture,) = find_captures(str(write(tmp_path)))
    records = steps_data(put_together(capture, activities(tmp_path)))
    assert [(r["step"], r["part"], r["ms"]) for r in records][:4] == [
        (5, "compute", 0.04),
        (5, "exposed communication", 0.03),
        (5, "copies", 0.005),
        (5, "idle", 0.075),
    ]
    write(tmp_path, 0, [e for e in timeline() if e.get("cat") in ("user_annotation", "cpu_op")])
    records = steps_data(put_together(capture, activities(tmp_path)))
    assert [(r["part"], r["ms"]) for r in records] == [
        ("step", 0.1),
        ("validation", 0.035),
        ("between steps", 0.015),
        ("step", 0.1),
        ("validation", 0.0),
        ("between steps", 0.0),
    ]


def test_plots_are_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["summary", str(tmp_path), "--plot", "a.pdf"]) == 2
    assert capsys.readouterr().err == "lightning-chakra: error: --plot a.pdf: the name must end in .png or .html\n"
    assert main(["summary", str(tmp_path), "--plot", str(tmp_path / "no" / "a.png")]) == 2
    assert "no such folder" in capsys.readouterr().err
    monkeypatch.setitem(__import__("sys").modules, "altair", None)
    assert main(["summary", str(tmp_path), "--plot", str(tmp_path / "a.png")]) == 2
    assert capsys.readouterr().err == (
        "lightning-chakra: error: --plot needs altair: pip install 'lightning-chakra[plot]'\n"
    )


# --- intervals --------------------------------------------------------------------------------------------------------

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1])))


def moments(intervals: Any) -> set[int]:
    return {moment for start, end in intervals for moment in range(int(start), int(end))}


@given(INTERVALS, INTERVALS, st.integers(-2, 50), st.integers(-2, 50))
def test_intervals(first: list[Any], second: list[Any], start: int, end: int) -> None:
    a, b = union(first), union(second)
    assert moments(a) == moments(first)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(a))
    assert moments(subtract(a, b)) == moments(first) - moments(second)
    assert total(a) == len(moments(first))
    assert total(a, start, end) == len(moments(first) & set(range(start, end)))


# --- HolisticTraceAnalysis --------------------------------------------------------------------------------------------

# HolisticTraceAnalysis 0.5.0, HTA_DISABLE_NS_ROUNDING=1, TraceAnalysis(..., include_last_profiler_step=True),
# get_temporal_breakdown(): compute, non-compute, idle and kernel time in µs, by rank.
HTA = {
    "nccl": (["hta/nccl_data.json.gz"], {0: (115655.847, 41844.167, 503050.991, 660551.006)}),
    "sampled": (
        ["hta/sampled_rank-0.json.gz", "hta/sampled_rank-1.json.gz"],
        {0: (210320, 337336, 675191, 1222847), 1: (271973, 308077, 651136, 1231186)},
    ),
    "mi250": (
        ["hta/mi250_minitoy_train_ROCm6_2_kineto.json.gz"],
        {0: (110.881, 38.161, 8762.845, 8911.887)},
    ),
    "linear": (["param-et/linear_kineto.json.gz"], {0: (369343, 1640, 637587, 1008570)}),
    "megatron": (
        [f"astrasim-megatron-tp8/megatron_kineto_{rank}.json.gz" for rank in (0, 6)],
        {0: (131390, 241337, 222514, 595241), 6: (133554, 263997, 208748, 606299)},
    ),
    "dlrm": (
        ["param-dlrm-8gpu/dlrm_kineto.tar.gz"],
        {0: (1034, 5556, 6419, 13009), 1: (1246, 11075, 6428, 18749), 7: (1059, 1600, 8308, 10967)},
    ),
}


@needs_shared
@pytest.mark.parametrize("name", HTA)
def test_the_time_of_the_device_is_that_of_hta(name: str, tmp_path: Path) -> None:
    names, expected = HTA[name]
    found = {rank.rank or 0: rank.device for rank in activities(put(tmp_path, *names))}
    for rank, figures in expected.items():
        device = found[rank]
        assert device is not None
        others = device.communication + device.copies
        assert (device.compute, others, device.idle, device.span) == pytest.approx(figures, abs=0.002)


@needs_shared
def test_the_kernel_breakdown_is_that_of_hta(tmp_path: Path) -> None:
    """get_gpu_kernel_breakdown(include_memory_kernels=True) of the two sampled ranks, µs, both together."""
    ranks = activities(put(tmp_path, *HTA["sampled"][0]))
    devices = [rank.device for rank in ranks if rank.device is not None]
    assert sum(device.communication for device in devices) == 635528 + 4978  # alone, and over copies
    assert sum(device.copies for device in devices) == 4907
    assert sum(device.compute for device in devices) == 347519 + 126830 + 7916 + 28
    sums = {
        name.split("<")[0].split("(")[0]: round(o.self_us) for name, o in ranks[0].kernels.items() if o.self_us > 9e3
    }
    assert sums == {
        "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t": 396199,
        "void split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_cta_per_row_1": 23469,
        "void split_embedding_codegen_forward_unweighted_kernel": 15167,
        "void split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_warp_per_row_1": 9309,
        "void split_embedding_backward_codegen_rowwise_adagrad_weighted_kernel_cta_per_row_1": 9201,
    }


@needs_shared
def test_collectives_of_a_gpu_trace(tmp_path: Path) -> None:
    (rank,) = activities(put(tmp_path, "hta/nccl_data.json.gz"))
    assert [(c.name, c.group, c.group_size, c.dtype, c.calls, c.in_bytes) for c in rank.collectives] == [
        ("allreduce", "0 (default_pg)", 2, "Float", 15, 306_684_384),
        ("broadcast", "0 (default_pg)", 2, "Float", 3, 637_440),
        ("broadcast", "0 (default_pg)", 2, "Long", 3, 1_272),
    ]


@pytest.mark.interop
@needs_shared
@pytest.mark.parametrize("name", HTA)
def test_hta_itself_agrees(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hta")
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    from hta.trace_analysis import TraceAnalysis

    folder = put(tmp_path, *HTA[name][0])
    analysis = TraceAnalysis(trace_dir=str(folder), include_last_profiler_step=True)
    breakdown = analysis.get_temporal_breakdown(visualize=False).set_index("rank")
    kernels = analysis.get_gpu_kernel_breakdown(
        visualize=False, duration_ratio=1.0, num_kernels=100_000, include_memory_kernels=True
    )[1]
    ours = {rank.rank or 0: rank for rank in activities(folder)}
    assert sorted(ours) == sorted(breakdown.index)
    for number, rank in ours.items():
        row, device = breakdown.loc[number], rank.device
        assert device is not None
        assert device.compute == pytest.approx(row["compute_time(us)"], abs=0.01)
        assert device.communication + device.copies == pytest.approx(row["non_compute_time(us)"], abs=0.01)
        assert device.idle == pytest.approx(row["idle_time(us)"], abs=0.01)
        theirs = kernels[kernels["rank"] == number].groupby("name")["sum (us)"].sum().to_dict()
        assert {k: o.self_us for k, o in rank.kernels.items()} == pytest.approx(theirs, abs=0.01)
