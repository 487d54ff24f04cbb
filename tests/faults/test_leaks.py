"""Many windows in one fit cost no more than a few."""

import gc
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from lightning.pytorch import Callback

from lightning_chakra.recording import writer
from tests import harness, programs
from tests.faults.trainings import recorded
from tests.reading import check_pair, files

WINDOWS = 50


class Usage(Callback):
    """What the process holds at the start of every window's warmup, when nothing of the last one is left to do."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 4 == 0 and batch_idx:
            deadline = time.monotonic() + 60
            while any(Path(trainer.default_root_dir).rglob("step-*")) and time.monotonic() < deadline:
                time.sleep(0.005)  # until the writer has removed the raw files, which no event tells
            gc.collect()
            process = psutil.Process()
            self.seen.append(
                {
                    "memory": process.memory_info().rss,
                    "files": process.num_fds(),
                    "threads": sorted(thread.name for thread in threading.enumerate()),
                }
            )


def many(out: str, root: str) -> dict[str, Any]:
    usage = Usage()
    callback = {
        "dirpath": out,
        "scratch_dir": root,
        "wait": 1,
        "warmup": 1,
        "active": 2,
        "repeat": 0,
        "collect_chakra": True,
    }
    trainer = {"default_root_dir": root, "callbacks": [usage]}
    with recorded() as told:
        result = programs.train(callback, trainer, programs.Model(WINDOWS * 4))
    return {**result, "seen": usage.seen, "warnings": told}


def test_fifty_windows_hold_no_more_than_five(out: Path, tmp_path: Path) -> None:
    (value,) = harness.succeed(harness.run(many, str(out), str(tmp_path / "root")))
    assert value["warnings"] == []
    assert value["offences"] == []
    assert len(value["traces"]) == 2 * WINDOWS
    assert len(files(out)) == 2 * WINDOWS
    check_pair(out / f"step-{4 * WINDOWS - 2:08d}", 0, [4 * WINDOWS - 2, 4 * WINDOWS - 1])
    seen = value["seen"][4:]
    assert len(seen) == WINDOWS - 5
    assert all(usage["files"] == seen[0]["files"] for usage in seen)
    assert all(usage["threads"] == seen[0]["threads"] for usage in seen)
    # The allocator breathes: a leak of the results of a window is a megabyte for each of the 45, at the least.
    assert seen[-1]["memory"] - seen[0]["memory"] < 5e6


def slow_writer(out: str) -> list[str]:
    """A training whose writer does not get anything done before the training is over."""
    over = threading.Event()
    compress = writer.TraceWriter._compress

    def wait(self: Any, *args: Any) -> None:
        assert over.wait(60)
        compress(self, *args)

    class Over(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 16:
                over.set()

    writer.TraceWriter._compress = wait  # type: ignore[method-assign]
    callback = {"dirpath": out, "wait": 1, "warmup": 1, "active": 2, "repeat": 0}
    with recorded() as told:
        programs.train(callback, {"max_steps": 16, "callbacks": [Over()]}, programs.Model(20))
    return told


def test_a_writer_that_falls_behind_is_told(out: Path) -> None:
    (told,) = harness.succeed(harness.run(slow_writer, str(out)))
    assert told
    assert all("windows wait to be compressed and published" in warning for warning in told)
    assert "3 windows" in told[0]
    assert len(files(out)) == 4
