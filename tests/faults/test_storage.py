"""Folders that cannot be written, disks that are really full, and names that are taken."""

import os
import resource
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from lightning_chakra.recording import storage
from tests import harness, programs
from tests.faults.trainings import LIMIT, PAIR, SHORT, check_clean, check_files, fit, fitting
from tests.reading import check_pair, files


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for very little."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "lightning-chakra-test", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, leave: int) -> None:
    """Write a file that leaves so many bytes."""
    free = shutil.disk_usage(folder).free
    (folder / "ballast").write_bytes(bytes(max(0, free - leave)))


def only(result: dict[str, Any], *texts: str) -> None:
    """The training ended well and said these things, each in one warning; what was lost is named with its rank."""
    assert result["error"] is None
    assert result["batches"] == 14
    told = [warning for warning in result["warnings"] if "GB are free" not in warning]
    assert len(told) == len(texts), told
    for text in texts:
        assert any(text in warning and warning.startswith("rank 0, ") for warning in told), (text, told)


@pytest.mark.parametrize("place", ["dirpath", "dirpath/pytorch_profile"])
def test_a_file_where_the_output_folder_should_be(out: Path, tmp_path: Path, place: str) -> None:
    taken = Path(str(place).replace("dirpath", str(out)))
    taken.parent.mkdir(parents=True, exist_ok=True)
    taken.write_text("mine")
    scratch = tmp_path / "scratch"
    target = out if place == "dirpath" else out / "run-1"
    result = fitting({**SHORT, "dirpath": out, "scratch_dir": scratch, "collect_chakra": False})
    assert taken.read_text() == "mine"
    if place == "dirpath":
        only(result, "was not published")
        assert "lightning-chakra recover" in result["warnings"][0]
        assert len(list(scratch.rglob("rank-0.json"))) == 1
    else:
        assert result["warnings"] == []
        assert files(target) == PAIR[1:]
    check_clean(result)


def test_a_read_only_output_folder(small: Path, tmp_path: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    result = fitting({**SHORT, "dirpath": small / "out", "scratch_dir": tmp_path / "scratch"})
    only(result, "pytorch_profile/rank-0.json.gz was not published", "chakra/rank-0.json.gz was not published")
    assert len(list((tmp_path / "scratch").rglob("rank-0.json"))) == 2
    check_clean(result)


class Remove(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 4:
            shutil.rmtree(self.folder)


def test_an_output_folder_that_is_removed_during_the_fit(out: Path) -> None:
    out.mkdir()
    result = fitting({**SHORT, "dirpath": out}, {"callbacks": [Remove(out)]})
    only(result)
    check_files(out, result, [3, 4], partial=False)
    check_clean(result)


def test_a_scratch_folder_that_is_removed_during_the_window(out: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    again = tmp_path / "again"
    result = fitting({**SHORT, "dirpath": out, "scratch_dir": scratch}, {"callbacks": [Remove(scratch)]}, again=again)
    only(result, "pytorch_profile/rank-0.json.gz was not published", "chakra/rank-0.json.gz was not published")
    assert "It is lost." in result["warnings"][0]
    assert files(out) == []
    check_clean(result, again)


def test_a_file_where_the_scratch_folder_should_be(out: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").write_text("mine")
    again = tmp_path / "again"
    result = fitting({**SHORT, "dirpath": out, "scratch_dir": tmp_path / "scratch"}, again=again)
    only(result, "scratch'. This window is not recorded")
    assert (tmp_path / "scratch").read_text() == "mine"
    assert files(out) == []
    check_clean(result, again)


@pytest.mark.parametrize("leave", [0, 4096, 40960])
def test_a_full_disk_under_the_raw_files(out: Path, tmp_path: Path, small: Path, leave: int) -> None:
    fill(small, leave)
    again = tmp_path / "again"
    result = fitting({**SHORT, "dirpath": out, "scratch_dir": small}, again=again)
    if leave < 40960:
        only(result, f"No space left on device: '{small}'. This window is not recorded")
        assert files(small) == ["ballast"]
    else:
        only(result, "pytorch_profile/rank-0.json.gz was not published", "chakra/rank-0.json.gz was not published")
    assert any("GB are free" in warning for warning in result["warnings"])
    assert files(out) == []
    check_clean(result, again)


def test_a_full_disk_under_the_published_files(tmp_path: Path, small: Path) -> None:
    fill(small, 8192)
    scratch = tmp_path / "scratch"
    result = fitting({**SHORT, "dirpath": small / "out", "scratch_dir": scratch, "collect_shapes": True})
    published = files(small / "out")
    assert set(published) < set(PAIR)
    told = [warning for warning in result["warnings"] if "No space left on device" in warning]
    assert len(told) == 2 - len(published)
    assert len(list(scratch.rglob("rank-0.json"))) == 2 - len(published)
    check_clean(result)


def limited(callback: dict[str, Any], again: Path) -> dict[str, Any]:
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN  # Python's own
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    result = fit(callback)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    result["again"] = fit({**SHORT, "dirpath": again}, {"max_steps": 5})
    return result


def test_a_limit_on_the_size_of_files(out: Path, tmp_path: Path) -> None:
    callback = {**SHORT, "dirpath": out, "scratch_dir": tmp_path / "scratch"}
    (result,) = harness.succeed(harness.run(limited, callback, tmp_path / "again", timeout=LIMIT))
    only(result, "pytorch_profile/rank-0.json.gz was not published", "chakra/rank-0.json.gz was not published")
    assert files(out) == []
    check_clean(result, tmp_path / "again")


def uneven(out: str, scratch: str) -> dict[str, Any]:
    """Two ranks, one of which cannot write its raw files."""
    rank = int(os.environ["LOCAL_RANK"])
    callback = {**SHORT, "dirpath": out, "scratch_dir": f"{scratch}-{rank}", "barrier_timeout": 60}
    return fit(callback, {"devices": 2, "strategy": "ddp"}, programs.Model())


def test_a_rank_that_cannot_write_keeps_nobody_waiting(out: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch-1").write_text("in the way")
    arguments = (str(out), str(tmp_path / "scratch"))
    good, bad = harness.succeed(harness.run(uneven, *arguments, ranks=2, timeout=50))  # less than the barrier's
    assert files(out) == PAIR
    check_pair(out, 0, [3, 4])
    assert good["warnings"] == []
    assert bad["warnings"]
    assert all(warning.startswith("rank 1") for warning in bad["warnings"])
    assert [good["batches"], bad["batches"]] == [14, 14]
    check_clean(good)
    check_clean(bad)


def test_nothing_is_overwritten_when_a_name_is_published_twice_at_once(tmp_path: Path) -> None:
    target = tmp_path / "rank-0.json.gz"
    barrier = threading.Barrier(8)
    refused: list[int] = []

    def publish(number: int) -> None:
        def produce(part: str) -> None:
            Path(part).write_text(str(number))
            barrier.wait(30)

        try:
            storage.publish(str(target), str(tmp_path), produce)
        except FileExistsError:
            refused.append(number)

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7
    assert int(target.read_text()) not in refused
    assert files(tmp_path) == ["rank-0.json.gz"]
