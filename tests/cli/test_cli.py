"""The command as a whole: start-up, exit codes, messages, processes."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from lightning_chakra import __version__
from lightning_chakra.cli import COMMANDS, main
from lightning_chakra.traces.errors import ResultError
from lightning_chakra.traces.jobs import map_ranks
from tests.cli.captured import copy, needs_shared, write_kineto


def test_starts_without_torch_and_lightning() -> None:
    code = (
        "import sys; from lightning_chakra.cli import main\n"
        "assert main(['check', 'no such folder']) == 2\n"
        "heavy = {'torch', 'lightning', 'numpy', 'fsspec', 'altair', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "lightning-chakra: error: no such folder: no such folder\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    assert f"usage: lightning-chakra [options] {command} " in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"lightning-chakra {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "but it was not provided"),
        (["judge"], "invalid choice: 'judge'"),
        (["check"], "the following arguments are required"),
        (["check", ".", "--nope"], "unrecognized arguments: --nope"),
        (["check", ".", "--jobs", "many"], "Got value: many"),
        (["check", "no/such/folder"], "no such folder: no/such/folder"),
        (["check", "nothing://x/y"], "cannot list nothing://x/y: "),
        (["summary", "no/such/folder"], "no such folder: no/such/folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("lightning-chakra: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_a_folder_without_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path)]) == 2
    assert "expected pytorch_profile/ and chakra/, or step-*/ or run-*/" in capsys.readouterr().err
    (tmp_path / "notes.json").write_text("[]")
    assert main(["check", str(tmp_path)]) == 2
    assert f"no traces in {tmp_path}" in capsys.readouterr().err


def test_the_folder_that_was_meant_is_named(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy(recorded, tmp_path / "lightning_logs" / "version_0")
    assert main(["check", str(tmp_path)]) == 2
    assert f"there are some in {tmp_path / 'lightning_logs' / 'version_0'}" in capsys.readouterr().err


def test_only_execution_traces(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (capture / "pytorch_profile").iterdir():
        path.unlink()
    assert main(["summary", str(capture)]) == 2
    assert "no Kineto traces" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "summary"])
def test_processes_give_the_same_as_one(command: str, capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = []
    for jobs in ("1", "2"):
        assert main([command, str(capture), "--json", "--jobs", jobs]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0] == results[1]


@pytest.mark.parametrize("more", ["", "--json"])
@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_a_reader_that_stops_early_is_no_error(more: str, tmp_path: Path) -> None:
    mark = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 1, "dur": 5}
    for step in range(200):  # more than a pipe holds
        folder = tmp_path / f"step-{step:08d}" / "pytorch_profile"
        write_kineto(folder / "rank-0.json.gz", [mark], distributedInfo={"rank": 0, "world_size": 1})
    command = (
        f"set -o pipefail; {sys.executable} -m lightning_chakra.cli summary {tmp_path} {more} --jobs 1 | head -c 10"
    )
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (141, "")


def die(task: int) -> int:
    if task == 1:
        os._exit(9)
    return task


def test_a_process_that_is_killed() -> None:
    with pytest.raises(ResultError, match="try fewer than --jobs 2"):
        map_ranks(die, [0, 1, 2], jobs=2)


def test_results_are_in_the_order_of_the_tasks() -> None:
    assert map_ranks(abs, [-3, 2, -1], jobs=2) == map_ranks(abs, [-3, 2, -1], jobs=1) == [3, 2, 1]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_must_not_be_read(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (capture / "chakra").chmod(0)
    try:
        assert main(["check", str(capture)]) == 1
    finally:
        (capture / "chakra").chmod(0o755)
    assert capsys.readouterr().err.count("\n") == 1


@needs_shared
def test_a_single_file(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.cli.captured import SHARED

    assert main(["check", str(SHARED / "hta" / "nccl_data.json.gz")]) == 0
    assert "steps 4-6" in capsys.readouterr().out


ODD = (
    "--jobs --jobs=[ --jobs=0x1 --json=maybe --ranks=0: --top --config --check={ --check.jobs=1 --print_config "
    "!!x = -- @ %YAML {"
)


@hypothesis.given(
    st.lists(
        st.sampled_from([*COMMANDS, *ODD.split(), "", "\0", "\ud800", "? :", "&a *a"]) | st.text(max_size=20),
        max_size=4,
    )
)
def test_no_argument_ends_in_a_traceback(arguments: list[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main(arguments)
        except SystemExit as exit_:  # --help
            code = exit_.code
    assert code == 0 or len(err.getvalue().splitlines()) == 1


def test_text_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    name = os.fsdecode(b"no such \xff \xc3\xa4")
    result = subprocess.run(
        [sys.executable, "-m", "lightning_chakra.cli", "check", name],
        capture_output=True, text=True, timeout=60, cwd=tmp_path, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert result.returncode == 2
    assert result.stderr.startswith("lightning-chakra: error: no such folder")
    assert len(result.stderr.splitlines()) == 1
