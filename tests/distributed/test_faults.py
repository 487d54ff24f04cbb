"""Ranks that raise, die, are interrupted or cannot set up, on training groups with a short timeout."""

import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.distributed import faults
from tests.reading import files, load

_START = 60  # seconds until a marker has to be there


def _wait_for(paths: list[Path]) -> None:
    deadline = time.monotonic() + _START
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"none of {paths}"
        time.sleep(0.05)


def _when_exporting(marker: Path, act: Callable[[list[Any]], object], waiting: int) -> Callable[[list[Any]], None]:
    """Act on the processes once the slow export runs and rank ``waiting`` waits at the barrier."""

    def watch(processes: list[Any]) -> None:
        _wait_for([marker, marker.with_name(f"waiting-{waiting}")])
        act(processes)

    return watch


def _send(number: signal.Signals) -> Callable[[list[Any]], None]:
    """Send a signal to all processes."""

    def send(processes: list[Any]) -> None:
        for process in processes:
            os.kill(process.pid, number)

    return send


def _whole(out: Path) -> list[str]:
    """The published files; all of them can be read."""
    names = files(out) if out.exists() else []
    assert [name for name in names if not name.endswith(".json.gz")] == []
    for name in names:
        load(out / name)
    return names


def test_one_rank_raises_in_the_window(out: Path) -> None:
    program = partial(faults.train, model=partial(_raises, on=1))
    results = harness.run(program, {"dirpath": out}, ranks=2, timeout=30 + _START / 2)
    assert [result.exitcode for result in results] == [1, 1], harness.describe(results)
    raised = results[1]
    assert raised.err.strip().splitlines()[-1] == "ArithmeticError: the model's own error"
    assert "COLLECTIVE" in raised.out.split("RAISING")[0]
    assert "COLLECTIVE" not in raised.out.split("RAISING")[1]
    assert {"chakra/rank-1.json.gz", "pytorch_profile/rank-1.json.gz"} <= set(_whole(out))


def _raises(_: int, on: int) -> Any:
    return faults.Raises(on)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_killed_in_its_export_ends_the_job_with_an_error_of_torch(ranks: int, out: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    program = partial(
        faults.train, ranks=ranks, slow=faults.slow_kineto, slow_rank=ranks - 1, seconds=60, marker=marker
    )
    results = harness.run(
        program,
        {"dirpath": out, "profile_ranks": [ranks - 1], "scratch_dir": tmp_path / "scratch"},
        ranks=ranks,
        timeout=30,  # counts from the kill
        while_running=_when_exporting(marker, lambda processes: os.kill(processes[-1].pid, signal.SIGKILL), 0),
    )
    shown = harness.describe(results)
    assert [result.exitcode for result in results] == [1] * (ranks - 1) + [-signal.SIGKILL], shown
    for rank, result in enumerate(results[:-1]):
        # The dead one was noticed at our barrier, long before `barrier_timeout`; what ends the rank is the training's.
        assert re.search(rf"rank {rank} lost a peer after .* while the ranks export steps 2-3", result.err), shown
        assert "BarrierError" not in result.err
        assert re.match(r"(\w+\.)*\w*Error: .*(gloo|Connection|Timed out)", result.err.strip().splitlines()[-1]) or (
            "Connection closed by peer" in result.err[-3000:]
        ), shown
    assert _whole(out) == []


def test_the_first_barrier_notices_a_dead_rank_on_every_other_one(tmp_path: Path) -> None:
    def kill(processes: list[Any]) -> None:
        _wait_for([tmp_path / f"ready-{rank}" for rank in range(8)])
        os.kill(processes[2].pid, signal.SIGKILL)

    results = harness.run(
        faults.meet_once,
        tmp_path,
        ranks=8,
        env={"RANKS": "8"},
        timeout=30,  # far below the barrier's own 600 s
        while_running=kill,
    )
    values = [result.value for rank, result in enumerate(results) if rank != 2]
    assert all("lost a peer" in value for value in values), harness.describe(results)


def test_an_interrupted_wait_ends_at_once(out: Path, tmp_path: Path) -> None:
    """Also at the end of the interpreter: nothing there waits for the barrier's timeout."""
    marker = tmp_path / "marker"
    program = partial(faults.train, slow=faults.slow_kineto, marker=marker, seconds=60)

    def interrupt(processes: list[Any]) -> None:
        processes[1].send_signal(signal.SIGINT)
        processes[1].wait(20)  # while rank 0 still exports
        (tmp_path / "release").touch()

    results = harness.run(
        program,
        {"dirpath": out, "profile_ranks": [0]},
        ranks=2,
        fresh=True,
        timeout=45,
        while_running=_when_exporting(marker, interrupt, waiting=1),
    )
    shown = harness.describe(results)
    assert results[1].exitcode == 1, shown
    assert results[0].exitcode == 1, shown  # by the training's own error: its peer is gone
    assert "rank 0 lost a peer" in results[0].err, shown
    assert "chakra/rank-0.json.gz" in _whole(out)


def test_sigterm_on_all_ranks_in_the_flush_saves_the_traces(out: Path, tmp_path: Path) -> None:
    """As before a preemption. Lightning's handler enters a collective, in which the ranks have to meet."""
    marker = tmp_path / "marker"
    program = partial(faults.train, slow=faults.slow_kineto, marker=marker, seconds=8)

    results = harness.run(
        program,
        {"dirpath": out, "profile_ranks": [0]},
        ranks=2,
        timeout=60,
        while_running=_when_exporting(marker, _send(signal.SIGTERM), waiting=1),
    )
    shown = harness.describe(results)
    assert [result.exitcode for result in results] == [0, 0], shown
    assert [result.value for result in results] == [None, None], shown  # the training did not go on to its end
    assert all("Received SIGTERM" in result.err and "RuntimeError" not in result.err for result in results), shown
    assert _whole(out) == ["chakra/rank-0.json.gz", "pytorch_profile/rank-0.json.gz"]


def test_a_signal_that_the_training_answers_with_a_collective(out: Path, tmp_path: Path) -> None:
    """It comes in an export that takes longer than the timeout of the training's group, and is answered after it."""
    marker = tmp_path / "marker"
    program = partial(
        faults.train, slow=faults.deaf_kineto, marker=marker, seconds=9, group_timeout=3, model=faults.AnswersUsr1
    )

    results = harness.run(
        program,
        {"dirpath": out, "profile_ranks": [0]},
        ranks=2,
        timeout=60,
        while_running=_when_exporting(marker, _send(signal.SIGUSR1), waiting=1),
    )
    values = harness.succeed(results)
    assert [value["batches"] for value in values] == [8, 8]
    for result in results:
        assert [line for line in result.out.splitlines() if "ANSWER" in line] == ["ANSWERING", "ANSWERED"]
    assert _whole(out) == ["chakra/rank-0.json.gz", "pytorch_profile/rank-0.json.gz"]


@pytest.mark.parametrize("part", ["group", "folder"])
def test_setup_that_fails_on_one_rank_is_agreed_on(part: str, out: Path) -> None:
    results = harness.run(faults.train_without_agreement, {"dirpath": out}, part, ranks=2)
    values = harness.succeed(results)
    assert [value["batches"] for value in values] == [8, 8]
    assert all("Nothing is recorded in this fit" in result.err for result in results)
    assert "injected" in results[1].err
    assert not out.exists() or files(out) == []


@pytest.mark.parametrize(
    ("unlike", "told"),
    [
        ({"wait": 3}, "wait=3 and not 1"),
        ({"profile_ranks": [1], "active": 3}, "profile_ranks="),
        ({"profile_ranks": [7]}, "profile_ranks="),
        ({"step_unit": "batch"}, "step_unit='batch' and not 'optimizer_step'"),
    ],
)
def test_unlike_arguments_are_told_on_all_ranks(out: Path, unlike: dict[str, Any], told: str) -> None:
    results = harness.run(faults.train_unlike, [{"dirpath": out}, {"dirpath": out, **unlike}], ranks=2, timeout=30)
    for result in results:
        assert result.exitcode == 1, harness.describe(results)
        last = result.err.strip().splitlines()[-1]
        assert last.startswith("ValueError: the profiler has other arguments on rank 1 than on rank 0: ")
        assert told in last
    assert not out.exists()


def test_a_folder_of_each_rank_becomes_that_of_rank_0(out: Path, tmp_path: Path) -> None:
    results = harness.run(faults.train_unlike, [{"dirpath": out}, {"dirpath": tmp_path / "other"}], ranks=2)
    harness.succeed(results)
    assert len(_whole(out)) == 4
    assert not (tmp_path / "other").exists()
    assert f"all of them write to that of rank 0, {out}" in results[0].err
    assert "that of rank 0" not in results[1].err


def test_nothing_of_the_group_is_left_after_close() -> None:
    for value in harness.succeed(harness.run(faults.open_and_close, ranks=4, env={"RANKS": "4"})):
        assert value["during"][0] > value["before"][0]  # sockets
        assert value["during"][1] > value["before"][1]  # threads
        # less is fine: on a busy machine what closed before may still be going then
        assert value["after"][0] <= value["before"][0]
        assert value["after"][1] <= value["before"][1]
