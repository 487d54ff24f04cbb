"""check: every fault that was put in is found, named and told by the exit code; good captures are called good."""

import gzip
import json
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_chakra.cli import main
from tests.cli.captured import SHARED, copy, needs_shared, rewrite, text, write_kineto

KINETO, CHAKRA = "pytorch_profile/rank-1.json.gz", "chakra/rank-1.json.gz"


def check(path: Path | str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["check", str(path), "--json", "--jobs", "1"])
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, json.loads(captured.out)


def problems(path: Path | str, capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str, str]]:
    """Errors and warnings; the exit code has to agree with them."""
    code, report = check(path, capsys)
    found = [(p["severity"], p["file"], p["what"]) for c in report["captures"] for p in c["problems"]]
    bad = [p for p in found if p[0] != "note"]
    assert (code, report["good"]) == ((1, False) if bad else (0, True))
    assert all(p["meaning"] for c in report["captures"] for p in c["problems"])
    return bad


def test_a_good_capture(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = check(capture, capsys)
    assert (code, report["captures"][0]["problems"]) == (0, [])
    for rank in report["captures"][0]["ranks"]:
        assert rank["kineto"]["steps"] == rank["chakra"]["steps"] == [10, 11]
        assert rank["linked"] == rank["kineto"]["operators"] == rank["kineto"]["with_id"] > 50
        assert rank["chakra"]["schema"] == "1.1.1-chakra.0.0.4"
    assert main(["check", str(capture)]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("good .: rank 0-1 of 2, steps 10-11, 2 Kineto and 2 execution traces, 100.0% of ")


def cut_gzip(capture: Path) -> None:
    path = capture / CHAKRA
    path.write_bytes(path.read_bytes()[:-100])


def flip_byte(capture: Path) -> None:
    path = capture / KINETO
    content = bytearray(path.read_bytes())
    content[-6] ^= 0xFF  # in the checksum: everything decompresses
    path.write_bytes(content)


def cut_json(capture: Path) -> None:
    path = capture / CHAKRA
    path.write_bytes(gzip.compress(text(path)[:-20].encode()))


def not_gzip(capture: Path) -> None:
    (capture / KINETO).write_bytes(b"")


def hostile_name(capture: Path) -> None:
    rewrite(capture / KINETO, ('"name": "aten::linear"', '"name": "say "hi""'))


def raw_newline(capture: Path) -> None:
    rewrite(capture / CHAKRA, ('"name": "aten::linear"', '"name": "a\nb"'))


def nan(capture: Path) -> None:
    content = re.sub(r'"Ev Idx": \d+', '"Ev Idx": NaN', text(capture / KINETO), count=1)
    (capture / KINETO).write_bytes(gzip.compress(content.encode()))


def not_utf8(capture: Path) -> None:
    content = text(capture / KINETO).encode().replace(b'"ProfilerStep#10", "pid"', b'"ProfilerStep#10", "pid"', 1)
    content = content.replace(b'"traceName": "', b'"traceName": "\xff', 1)
    (capture / KINETO).write_bytes(gzip.compress(content))


def lost_rank(capture: Path) -> None:
    (capture / KINETO).unlink()


def lost_chakra(capture: Path) -> None:
    (capture / CHAKRA).unlink()


def lost_all_chakra(capture: Path) -> None:
    shutil.rmtree(capture / "chakra")


def extra_rank(capture: Path) -> None:
    for rank in (0, 1):
        rewrite(capture / f"pytorch_profile/rank-{rank}.json.gz", ('"profiled_ranks": [0, 1]', '"profiled_ranks": [0]'))


def swapped(capture: Path) -> None:
    folder = capture / "pytorch_profile"
    (folder / "rank-0.json.gz").rename(folder / "x")
    (folder / "rank-1.json.gz").rename(folder / "rank-0.json.gz")
    (folder / "x").rename(folder / "rank-1.json.gz")


def other_steps_in_chakra(capture: Path) -> None:
    rewrite(capture / CHAKRA, ("ProfilerStep#10", "ProfilerStep#12"))


def other_steps_on_a_rank(capture: Path) -> None:
    for name in (KINETO, CHAKRA):
        rewrite(capture / name, ("ProfilerStep#10", "ProfilerStep#12"))


def no_marks(capture: Path) -> None:
    for name in (KINETO, CHAKRA):
        rewrite(capture / name, ("ProfilerStep#", "step "))


def announced(capture: Path) -> None:
    for rank in (0, 1):
        rewrite(capture / f"pytorch_profile/rank-{rank}.json.gz", ('"last_step": 11', '"last_step": 12'))


def partial(capture: Path) -> None:
    rewrite(capture / KINETO, ('"partial": false', '"partial": true'))


def two_runs(capture: Path) -> None:
    rewrite(capture / KINETO, ('"collect_shapes": true', '"collect_shapes": false'))


def no_ids(capture: Path) -> None:
    content = re.sub(r'"Record function id": \d+', '"Record function id": 0', text(capture / KINETO))
    (capture / KINETO).write_bytes(gzip.compress(content.encode()))


def other_run(capture: Path) -> None:
    content = re.sub(r'"name": "(?!Prof)', '"name": "other ', text(capture / CHAKRA).replace('{"name"', '{ "name"'))
    content = content.replace('{ "name": "other ', '{"name": "')
    (capture / CHAKRA).write_bytes(gzip.compress(content.encode()))


def one_unlinked(capture: Path) -> None:
    rewrite(capture / CHAKRA, ('"name": "aten::addmm"', '"name": "aten::admm"'), count=1)


def repeated_id(capture: Path) -> None:
    rewrite(capture / CHAKRA, ('"id": 4,', '"id": 3,'), count=1)


def dangling_parent(capture: Path) -> None:
    content = re.sub(r'"ctrl_deps": \d\d,', '"ctrl_deps": 99999,', text(capture / CHAKRA), count=1)
    (capture / CHAKRA).write_bytes(gzip.compress(content.encode()))


def unknown_schema(capture: Path) -> None:
    rewrite(capture / CHAKRA, ("1.1.1-chakra.0.0.4", "2.0.0"))


def compact_rank(capture: Path) -> None:
    content = json.dumps(json.loads(text(capture / KINETO)), separators=(",", ":"))
    (capture / KINETO).write_bytes(gzip.compress(content.encode()))


def no_distributed_info(capture: Path) -> None:
    rewrite(capture / KINETO, ('"distributedInfo"', '"wasInfo"'))


def empty_window(capture: Path) -> None:
    rewrite(capture / KINETO, ('"cat": "cpu_op"', '"cat": "none"'), ('"cat": "user_annotation"', '"cat": "none"'))


def gpu_without_kernels(capture: Path) -> None:
    rewrite(capture / KINETO, ('"deviceProperties": [', '"deviceProperties": [{"id": 0, "name": "A100"}'))


def stranger(name: str) -> Callable[[Path], None]:
    def put(capture: Path) -> None:
        (capture / "pytorch_profile" / name).write_bytes(b"{}")

    put.__name__ = f"stranger {name}"
    return put


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (cut_gzip, [("error", CHAKRA, r"the gzip file ends too early, after \d+ bytes of JSON: it was cut")]),
        (flip_byte, [("error", KINETO, r"not whole gzip, after \d+ bytes")]),
        (cut_json, [("error", CHAKRA, r"the JSON ends too early, after \d+ bytes: it was cut")]),
        (not_gzip, [("error", KINETO, "the file is empty")]),
        (hostile_name, [("error", KINETO, r'not strict JSON at byte \d+: .*near .*say "hi')]),
        (raw_newline, [("error", CHAKRA, r"not strict JSON at byte \d+: invalid character")]),
        (nan, [("error", KINETO, r"not strict JSON at byte \d+: invalid character, near .*Ev Idx")]),
        (not_utf8, [("error", KINETO, "not strict JSON at byte .*: not UTF-8")]),
        (lost_rank, [("error", "pytorch_profile", "no trace of rank 1")]),
        (lost_chakra, [("error", "chakra", "no trace of rank 1")]),
        (lost_all_chakra, [("error", "chakra", "no trace of rank 0-1")]),
        (extra_rank, [("error", ".", "trace of rank 1, which was not profiled")]),
        (
            swapped,
            [
                ("error", "pytorch_profile/rank-0.json.gz", "it is the trace of rank 1"),
                ("error", KINETO, "it is the trace of rank 0"),
                ("error", "pytorch_profile/rank-0.json.gz", "0.0% of .* operators link"),
                ("error", KINETO, "0.0% of .* operators link"),
            ],
        ),
        (
            other_steps_in_chakra,
            [
                ("error", CHAKRA, "steps 11-12, but 10-11 in pytorch_profile/rank-1"),
                ("warning", KINETO, "9.*% of .* operators link"),
            ],
        ),
        (
            other_steps_on_a_rank,
            [
                ("error", KINETO, "steps 11-12, but it announces 10-11"),
                ("error", f"{KINETO} and 1 more", "steps 11-12, other ranks 10-11"),
            ],
        ),
        (no_marks, [("error", KINETO, "no ProfilerStep marks"), ("error", CHAKRA, "no ProfilerStep marks")]),
        (
            announced,
            [
                ("error", "pytorch_profile/rank-0.json.gz", "steps 10-11, but it announces 10-12"),
                ("error", KINETO, "steps 10-11, but it announces 10-12"),
            ],
        ),
        (partial, [("warning", KINETO, "partial: 2 of 2 steps")]),
        (two_runs, [("error", KINETO, "options .*, but .* in pytorch_profile/rank-0")]),
        (no_ids, [("error", KINETO, "no operator has a number")]),
        (other_run, [("error", KINETO, "% of .* operators link")]),
        (one_unlinked, [("warning", KINETO, r"9\d\.\d% of \d+ operators link with chakra/rank-1.*aten::addmm")]),
        (
            repeated_id,
            [
                ("error", CHAKRA, "1 nodes with the id of another .such as 3.$"),
                ("error", CHAKRA, "1 parents that are not there .of node 5.$"),
            ],
        ),
        (dangling_parent, [("error", CHAKRA, "1 parents that are not there")]),
        (unknown_schema, [("warning", CHAKRA, "schema 2.0.0")]),
        (compact_rank, [("warning", KINETO, "no white space")]),
        (no_distributed_info, [("warning", KINETO, "no rank in distributedInfo")]),
        (
            empty_window,
            [("error", KINETO, "no operators"), ("error", KINETO, "no ProfilerStep marks")],
        ),
        (gpu_without_kernels, [("warning", KINETO, "no device events, but a host with 1 GPUs")]),
        (
            stranger("rank-2.json.gz.77.part"),
            [("warning", "pytorch_profile/rank-2.json.gz.77.part", "half-written file")],
        ),
        (stranger("notes.txt"), [("warning", "pytorch_profile/notes.txt", "not a trace of this package")]),
        (stranger("rank-0.json"), [("error", "pytorch_profile/rank-0.json", "not a trace of this package")]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_faults(
    spoil: Callable[[Path], None],
    expected: list[tuple[str, str, str]],
    capture: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(capture)
    found = problems(capture, capsys)
    assert [(severity, file) for severity, file, _ in found] == [(s, f) for s, f, _ in expected], found
    for (_, _, what), (_, _, pattern) in zip(found, expected, strict=True):
        assert re.search(pattern, what), what


def test_windows_and_runs_are_all_checked(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("step-00000010", "step-00000100", "run-1/step-00000010", "run-2", "run-10"):
        copy(recorded, tmp_path / name)
    cut_gzip(tmp_path / "run-1" / "step-00000010")
    code, report = check(tmp_path, capsys)
    assert [c["name"] for c in report["captures"]] == [
        "step-00000010",
        "step-00000100",
        "run-1/step-00000010",
        "run-2",
        "run-10",
    ]
    assert (code, [c["good"] for c in report["captures"]]) == (1, [True, True, False, True, True])
    (problem,) = report["captures"][2]["problems"]
    assert problem["file"] == f"run-1/step-00000010/{CHAKRA}"
    assert main(["check", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert len(re.findall("^good ", out, re.M)) == 4
    assert len(re.findall("^BAD  run-1/step-00000010", out, re.M)) == 1


@pytest.mark.parametrize("below", ["pytorch_profile", "pytorch_profile/", "chakra", "pytorch_profile/../chakra/.."])
def test_a_folder_of_the_window_will_do(capture: Path, below: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = check(f"{capture}/{below}", capsys)
    assert (code, len(report["captures"][0]["ranks"])) == (0, 2)


def test_urls(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for folder in ("pytorch_profile", "chakra"):
        memory.put(f"{capture}/{folder}", f"/check-urls/{folder}", recursive=True)
    try:
        assert check("memory://check-urls", capsys)[0] == 0
        memory.rm_file("/check-urls/chakra/rank-0.json.gz")
        assert problems("memory://check-urls/", capsys) == [("error", "chakra", "no trace of rank 0")]
        assert check("memory://check-urls/pytorch_profile/rank-0.json.gz", capsys)[1]["captures"][0]["foreign"]
    finally:
        memory.rm("/check-urls", recursive=True)
    assert check(capture.as_uri(), capsys)[0] == 0


def test_plain_torch_profiler(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ((severity, _, what),) = problems(recorded / "plain", capsys)
    assert (severity, what) == ("warning", "no ProfilerStep marks")


def test_steps_that_move_the_global_step_by_more_than_one(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As with two optimizers: the marks are 10 and 12."""
    for path in capture.glob("*/*.json.gz"):
        content = text(path).replace("ProfilerStep#11", "ProfilerStep#12")
        path.write_bytes(gzip.compress(re.sub(r'"last_step": ?11', '"last_step": 12', content).encode()))
    assert problems(capture, capsys) == []


def test_marks_of_another_profiler(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in capture.glob("*/*.json.gz"):
        rewrite(path, ('"aten::addmm"', '"ProfilerStep#3"'))
    found = problems(capture, capsys)
    assert [what for _, _, what in found] == ["steps 3, 10-11, but it announces 10-11"] * 2


def test_a_file_that_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "e.json").write_text("{}")
    assert main(["check", str(tmp_path / "e.json")]) == 2
    assert "e.json is neither a Kineto trace nor an execution trace" in capsys.readouterr().err


def test_backend_ranges_need_no_link(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """gloo opens and closes its ranges in different threads: torch gives them the id 0 and no node."""
    gloo = '{"ph": "X", "cat": "user_annotation", "name": "gloo:all_reduce", "pid": 1, "tid": 2, "ts": 1, "dur": 1'
    rewrite(capture / KINETO, ('"traceEvents": [', '"traceEvents": [' + gloo + ', "args": {"Record function id": 0}},'))
    assert problems(capture, capsys) == []


@pytest.mark.parametrize(("ts", "share"), [(1e18, None), (1, r"9\d\.\d% of \d+ operators link")])
def test_an_operator_that_outlives_the_window_in_another_thread(
    capture: Path, capsys: pytest.CaptureFixture[str], ts: float, share: str | None
) -> None:
    """An execution trace has an operator once it ends."""
    event = f'{{"ph": "X", "cat": "cpu_op", "name": "c10d::wait", "pid": 1, "tid": 2, "ts": {ts}, "dur": 9'
    event += ', "args": {"Record function id": 987654321}},'
    rewrite(capture / KINETO, ('"traceEvents": [', '"traceEvents": [' + event))
    found = problems(capture, capsys)
    assert [severity for severity, _, _ in found] == ["warning"] * (share is not None)
    assert share is None or re.match(share, found[0][2])


# --- traces that others wrote -----------------------------------------------------------------------------------------


def put(tmp_path: Path, *names: str) -> Path:
    for name in names:
        source = SHARED / name
        if source.name.endswith(".tar.gz"):
            with tarfile.open(source) as archive:
                for member in archive.getmembers():
                    if member.isfile() and (content := archive.extractfile(member)) is not None:
                        (tmp_path / Path(member.name).name).write_bytes(content.read())
        else:
            shutil.copy(source, tmp_path)
    return tmp_path


UNLINKED = ("error", "no operator has a number that links it with its execution trace")
NO_MARKS = ("warning", "no ProfilerStep marks")


@needs_shared
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["hta/nccl_data.json.gz"], set()),
        (["hta/nccl_data.json.gz", "param-et/resnet_1gpu_et.json.gz"], set()),
        (["hta/sampled_rank-0.json.gz", "hta/sampled_rank-1.json.gz"], set()),
        (["hta/mi250_minitoy_train_ROCm6_2_kineto.json.gz"], set()),
        (
            ["hta/distributed_info_not_found.json.gz"],
            {("warning", "no device events, but a host with 8 GPUs")},
        ),
        (["param-et/linear_kineto.json.gz", "param-et/linear_et.json.gz"], {UNLINKED, NO_MARKS}),
        (["param-et/resnet_2gpu_et.json.gz"], set()),
        (
            ["hta/nccl_data.json.gz", "param-et/resnet_2gpu_et.json.gz"],
            {("error", "25.4% of 14388 operators link with resnet_2gpu_et.json.gz")},
        ),
        (
            [f"astrasim-megatron-tp8/megatron_{kind}_{rank}.json.gz" for kind in ("kineto", "et") for rank in range(3)],
            {UNLINKED, NO_MARKS},
        ),
        (["param-dlrm-8gpu/dlrm_kineto.tar.gz"], set()),
        (["param-dlrm-8gpu/dlrm_kineto.tar.gz", "param-dlrm-8gpu/dlrm_pytorch_et.tar.gz"], {UNLINKED, NO_MARKS}),
    ],
    ids=lambda value: "+".join(Path(name).name for name in value[:2]) if isinstance(value, list) else "",
)
def test_public_traces(
    names: list[str], expected: set[tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = problems(put(tmp_path, *names), capsys)
    assert {(severity, what.partition(" (not ")[0]) for severity, _, what in found} == expected


@needs_shared
def test_traces_of_different_jobs_in_one_folder(capsys: pytest.CaptureFixture[str]) -> None:
    found = problems(SHARED / "hta", capsys)
    assert [f for f in found if "2 traces of rank 0" in f[2]]
    assert len([f for f in found if "other ranks" in f[2]]) == 3


def test_foreign_files_that_are_no_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 1, "dur": 5}
    for rank in (0, 1):
        write_kineto(tmp_path / f"worker{rank}.pt.trace.json", [mark], distributedInfo={"rank": 0, "world_size": 2})
    (tmp_path / "config.json").write_text('{"a": 1}')
    found = problems(tmp_path, capsys)
    assert [(severity, what) for severity, _, what in found] == [
        ("error", "it is the trace of rank 0"),
        ("error", "2 traces of rank 0 in one folder, such as worker1.pt.trace.json"),
    ]
