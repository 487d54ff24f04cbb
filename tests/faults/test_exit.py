"""The interpreter ends while a window is open. True interpreters: a fork skips the end that is tested here."""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

from tests import harness
from tests.faults.trainings import LIMIT, PAIR, SHORT, Boom, check_files, fit, outcome
from tests.programs import Model, train
from tests.reading import check_pair, et_marks, files, load


def end(program: Any, *args: Any) -> harness.Rank:
    (rank,) = harness.run(program, *args, fresh=True, timeout=LIMIT)
    return rank


def check_partial(out: Path, steps: list[int]) -> None:
    assert files(out) == PAIR
    kineto, _ = check_pair(out, 0, steps)
    assert kineto["lightning_chakra"]["partial"] is True


class Exits(Callback):
    """Leaves the process from a hook."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            sys.exit(3)


def test_exit_in_a_hook(out: Path) -> None:
    rank = end(_exit_in_hook, out)
    assert rank.exitcode == 3, rank.err
    assert "Warning: rank" not in rank.err
    check_partial(out, [3])


def _exit_in_hook(out: Path) -> None:
    fit({**SHORT, "dirpath": out}, {"callbacks": [Exits()]}, swallow=False)


class Hides(Callback):
    """Raises from a hook, and again when it is told of that: those after it never hear of the exception."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            raise Boom("first")

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        raise Boom("second")


def test_exception_that_never_reaches_us_and_is_swallowed(out: Path) -> None:
    """The fit has no end that we could see; the end of the interpreter is the next chance."""
    rank = end(_hide, out)
    assert rank.exitcode == 0, rank.err
    assert rank.value == ("tests.faults.trainings.Boom: second", [])  # nothing was published when fit was over
    check_partial(out, [3, 4])


def _hide(out: Path) -> Any:
    result = fit({**SHORT, "dirpath": out}, {}, before=[Hides()])
    return result["error"], result["traces"]


def test_swallowed_exception(out: Path) -> None:
    (rank,) = harness.run(_swallow, out, timeout=LIMIT)
    assert rank.exitcode == 0, rank.err
    assert rank.value == ("tests.faults.trainings.Boom: first", [])
    check_partial(out, [3, 4])


def _swallow(out: Path) -> Any:
    result = fit({**SHORT, "dirpath": out}, {}, before=[RaisesOnce()])
    return result["error"], result["offences"]


class RaisesOnce(Hides):
    """Raises from a hook only."""

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        pass


class Forks(Model):
    """Forks inside the window; the child raises, which Lightning tells all callbacks of the child's copy."""

    child_exit = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 3:
            child = os.fork()
            if child == 0:
                super().training_step(batch, batch_idx)
                raise Boom("in the child")
            _, status = os.waitpid(child, 0)
            self.child_exit = os.waitstatus_to_exitcode(status)
        return loss


def test_child_that_raises_inside_the_window(out: Path) -> None:
    """It has a copy of everything that is open, and must touch none of it."""
    result = outcome(out, program=_fork)
    assert result["child"] == 7
    assert (result["error"], result["warnings"], result["offences"]) == (None, [], [])
    check_files(out, result, [3, 4], partial=False)


def _fork(out: Path) -> dict[str, Any]:
    model = Forks(6)
    parent = os.getpid()
    try:
        result = fit({**SHORT, "dirpath": out}, {}, model, swallow=False)
    except Boom:
        os._exit(7 if os.getpid() != parent else 8)
    return {**result, "child": model.child_exit}


@pytest.mark.parametrize("phase", [2, 9], ids=["prepared", "idle"])
def test_exit_outside_the_window(out: Path, phase: int) -> None:
    rank = end(_exit_at, out, phase)
    assert rank.exitcode == 4, rank.err
    assert files(out) == ([] if phase == 2 else PAIR)
    for name in files(out):
        load(out / name)


def _exit_at(out: Path, batch: int) -> None:
    fit({**SHORT, "dirpath": out}, {}, ExitsAt(batch), swallow=False)


class ExitsAt(Model):
    """Leaves the process from a training step."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.batch:
            sys.exit(4)
        return super().training_step(batch, batch_idx)


def test_daemon_thread_that_still_trains(out: Path) -> None:
    """Only the thread that started Kineto can stop it; elsewhere that is a segmentation fault."""
    rank = end(_train_in_daemon, out)
    assert rank.exitcode == 0, rank.err
    assert rank.err.count("of this window") == 1
    assert "rank 0, steps 3-4: no Kineto trace of this window: the training still runs in another thread" in rank.err
    assert files(out) == PAIR[:1]
    assert et_marks(load(out / PAIR[0])) == [3, 4]


def _train_in_daemon(out: Path) -> None:
    model = Waits(8)
    threading.Thread(target=train, args=({**SHORT, "dirpath": out}, {}, model), daemon=True).start()
    assert model.inside.wait(60)


class Waits(Model):
    """Never ends its fifth step."""

    def __init__(self, batches: int) -> None:
        super().__init__(batches)
        self.inside = threading.Event()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 4:
            self.inside.set()
            threading.Event().wait()
        return super().training_step(batch, batch_idx)
