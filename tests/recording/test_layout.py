"""Names below `dirpath`."""

import dataclasses
import pickle

import pytest

from lightning_chakra.recording.layout import PublishedTrace, TraceLayout, is_occupied, join, run_folder, window_folder


@pytest.mark.parametrize(
    ("root", "per_window", "kineto", "chakra"),
    [
        ("/t", False, "/t/pytorch_profile/rank-3.json.gz", "/t/chakra/rank-3.json.gz"),
        (
            "/t",
            True,
            "/t/step-00000020/pytorch_profile/rank-3.json.gz",
            "/t/step-00000020/chakra/rank-3.json.gz",
        ),
        ("s3://b/t", False, "s3://b/t/pytorch_profile/rank-3.json.gz", "s3://b/t/chakra/rank-3.json.gz"),
        ("memory://", False, "memory://pytorch_profile/rank-3.json.gz", "memory://chakra/rank-3.json.gz"),
    ],
)
def test_final_names(root: str, per_window: bool, kineto: str, chakra: str) -> None:
    layout = TraceLayout(root, per_window)
    assert layout.path("kineto", 3, 20) == kineto
    assert layout.path("chakra", 3, 20) == chakra


def test_window_folders_sort_by_step() -> None:
    steps = [0, 9, 10, 99_999_999]
    assert sorted(map(window_folder, steps)) == [window_folder(step) for step in steps]
    assert window_folder(123_456_789) == "step-123456789"


@pytest.mark.parametrize(
    ("entries", "occupied"),
    [
        ([], False),
        (["events.out.tfevents.1", "hparams.yaml", "checkpoints", "run-1"], False),
        (["pytorch_profile"], True),
        (["chakra"], True),
        (["notes.txt", "step-00000020"], True),
        (["step-123456789"], True),
        (["step-20", "chakra.txt", "my_pytorch_profile"], False),
    ],
)
def test_earlier_traces_are_recognised(entries: list[str], occupied: bool) -> None:
    assert is_occupied(entries) == occupied


def test_run_folders() -> None:
    assert [run_folder("/t", index) for index in range(3)] == ["/t", "/t/run-1", "/t/run-2"]
    assert run_folder("s3://b/t/", 1) == "s3://b/t/run-1"
    assert join("/t", "a", "b") == "/t/a/b"


def test_a_published_trace_is_plain_data() -> None:
    trace = PublishedTrace("kineto", 10, 11, "/t/pytorch_profile/rank-0.json.gz", 5)
    assert pickle.loads(pickle.dumps(trace)) == trace
    assert dataclasses.asdict(trace) == {
        "kind": "kineto",
        "first_step": 10,
        "last_step": 11,
        "path": "/t/pytorch_profile/rank-0.json.gz",
        "bytes": 5,
        "partial": False,
    }
