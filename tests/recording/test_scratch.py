"""The scratch folder, and how a later process tells an abandoned one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_chakra.recording.layout import TraceLayout
from lightning_chakra.recording.scratch import Scratch, leftovers, owner_rank, read_window, windows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A scratch folder with one raw file, of this process."""
    scratch = Scratch(str(tmp_path / "s"), 3, TraceLayout(str(tmp_path / "out"), False), ("kineto", "chakra"))
    window = scratch.open_window(20)
    Path(window.files[1].path).write_text("{}")
    return Path(window.folder).parent


def own(folder: Path, **changes: Any) -> None:
    path = folder / "owner.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_window_is_read_back(folder: Path) -> None:
    window = read_window(str(folder / "step-00000020"))
    assert [file.kind for file in window.files] == ["kineto", "chakra"]
    assert window.files[0].target.endswith("out/pytorch_profile/rank-3.json.gz")
    (found,) = windows(str(folder))
    assert [file.kind for file in found.files] == ["chakra"]
    assert owner_rank(str(folder)) == 3


def test_the_living_leave_nothing(folder: Path) -> None:
    assert list(leftovers(str(folder.parent))) == []


def test_a_process_that_got_the_same_number(folder: Path) -> None:
    own(folder, started="another-boot 17")
    assert list(leftovers(str(folder.parent))) == [str(folder)]


def test_an_owner_that_noted_only_its_number(folder: Path) -> None:
    own(folder, started=None)
    assert list(leftovers(str(folder.parent))) == []


def test_another_machine_cannot_be_judged(folder: Path) -> None:
    own(folder, started="another-boot 17", host_name="elsewhere")
    assert list(leftovers(str(folder.parent))) == []


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="no /proc")
def test_a_zombie_is_gone(folder: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    stat = Path(f"/proc/{process.pid}/stat")
    own(folder, pid=process.pid, started=None)
    assert list(leftovers(str(folder.parent))) == []
    started = stat.read_bytes().rpartition(b")")[2].split()[19].decode()
    own(folder, started=f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {started}")
    assert list(leftovers(str(folder.parent))) == []
    process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while b") Z" not in stat.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.01)  # there is no event for it
    assert list(leftovers(str(folder.parent))) == [str(folder)]
    process.wait()
    assert list(leftovers(str(folder.parent))) == [str(folder)]


def test_foreign_and_broken_folders_are_passed_over(folder: Path) -> None:
    (folder / "owner.json").write_text("[]")
    (folder.parent / "lightning-chakra-rank9-x").write_text("a file")
    assert list(leftovers(str(folder.parent))) == []
    assert list(leftovers(str(folder.parent / "nowhere"))) == []


def test_a_folder_that_torch_cannot_write_to_is_told(tmp_path: Path) -> None:
    parent = os.fsdecode(os.fsencode(tmp_path) + b"/scratch-\xff")
    scratch = Scratch(parent, 0, TraceLayout(str(tmp_path / "out"), False), ("kineto",))
    with pytest.raises(OSError, match="not UTF-8; set `scratch_dir` or TMPDIR"):
        scratch.open_window(3)
    assert os.listdir(tmp_path) == []


def test_the_folder_vanishes_with_its_last_window(tmp_path: Path) -> None:
    scratch = Scratch(str(tmp_path), 0, TraceLayout(str(tmp_path), True), ("kineto",))
    first, second = scratch.open_window(1), scratch.open_window(5)
    shutil.rmtree(first.folder)
    scratch.close()
    assert os.path.isdir(second.folder)
    scratch = Scratch(str(tmp_path / "b"), 0, TraceLayout(str(tmp_path), True), ("kineto",))
    shutil.rmtree(scratch.open_window(1).folder)
    scratch.close()
    assert os.listdir(tmp_path / "b") == []
