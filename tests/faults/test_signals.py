"""Signals at the places where they hurt most; each process sends them to itself, at a precise point."""

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_chakra import cli
from lightning_chakra.recording import recorder
from lightning_chakra.recording.mend import Mender
from lightning_chakra.recording.signals import deferred_signals
from tests import harness, programs
from tests.faults.trainings import LIMIT, PAIR, SHORT, fitting
from tests.reading import check_kineto, check_pair, files, load

INT, TERM, KILL, USR1, USR2 = signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1, signal.SIGUSR2


class Signalled(programs.Model):
    """Calls ``strike`` in the first recorded step."""

    def __init__(self, strike: Callable[[], None]) -> None:
        super().__init__()
        self.strike = strike

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            self.strike()
        return super().training_step(batch, batch_idx)


def train(callback: dict[str, Any], places: dict[str, list[signal.Signals]], bystander: str | None = None) -> None:
    """A training that sends itself signals: in the ``window``, ``export`` (after it) or the work of the ``writer``."""

    def strike(place: str) -> None:
        for number in places.pop(place, []):
            os.kill(os.getpid(), number)

    class Profile(recorder.KinetoProfile):
        def export_chrome_trace(self, path: str) -> None:
            strike("export before")
            super().export_chrome_trace(path)
            strike("export")

    read = Mender.read

    def half_read(self: Mender, *args: Any) -> Iterator[Any]:
        for number, part in enumerate(read(self, args[0], args[1], 4096)):
            if number == 2:
                strike("writer")
            yield part

    recorder.KinetoProfile = Profile
    Mender.read = half_read  # type: ignore[method-assign]
    if bystander is not None:  # a child that outlives this process, as the workers of a data loader do for a while
        child = os.fork()
        if child == 0:
            signal.pause()
        Path(bystander).write_text(str(child))
    programs.train(callback, model=Signalled(lambda: strike("window")))


def signalled(out: Path, places: dict[str, list[signal.Signals]], **options: Any) -> harness.Rank:
    (rank,) = harness.run(train, {**SHORT, "dirpath": out}, places, timeout=LIMIT, **options)
    return rank


@pytest.mark.parametrize(
    ("places", "steps", "exitcode", "fresh"),
    [
        # Lightning leaves with 1 after Ctrl-C, and with 0 after a SIGTERM
        ({"window": [INT]}, [3], 1, False),
        ({"window": [TERM]}, [3], 0, True),
        ({"export": [INT]}, [3, 4], 1, True),
        ({"export before": [INT, INT, TERM]}, [3, 4], 1, False),
        ({"export": [TERM]}, [3, 4], 0, False),
        ({"writer": [INT]}, [3, 4], 1, False),
        ({"writer": [TERM, TERM]}, [3, 4], 0, False),
        # twice in a row: the second one comes while the first one's window is being saved
        ({"window": [INT], "export": [INT], "writer": [INT]}, [3], 1, False),
        ({"window": [TERM], "writer": [INT]}, [3], -INT, True),
    ],
)
def test_interrupted_trainings_save_whole_pairs(
    out: Path, places: dict[str, list[signal.Signals]], steps: list[int], exitcode: int, fresh: bool
) -> None:
    rank = signalled(out, places, fresh=fresh)
    assert rank.exitcode == exitcode, rank.err
    assert files(out) == PAIR
    kineto, _ = check_pair(out, 0, steps)
    assert kineto["lightning_chakra"]["partial"] is (steps == [3])
    assert "ChakraProfilerWarning" not in rank.err
    assert "lightning-chakra-" not in " ".join(os.listdir(tempfile.gettempdir()))


@pytest.mark.parametrize(
    ("place", "raw", "told"),
    [
        ("window", ["chakra/rank-0.json"], "not complete"),
        ("export before", ["chakra/rank-0.json"], "chakra/rank-0.json ("),
        ("export", ["chakra/rank-0.json", "pytorch_profile/rank-0.json"], "pytorch_profile/rank-0.json ("),
        ("writer", ["chakra/rank-0.json", "pytorch_profile/rank-0.json"], "pytorch_profile/rank-0.json ("),
    ],
)
def test_a_killed_training_leaves_raw_files_that_the_next_one_tells_of(
    out: Path, tmp_path: Path, place: str, raw: list[str], told: str
) -> None:
    bystander = tmp_path / "pid"
    (rank,) = harness.run(train, {**SHORT, "dirpath": out}, {place: [KILL]}, str(bystander), timeout=LIMIT)
    try:
        assert rank.exitcode == -KILL, rank.err
        assert [name for name in files(out) if name.endswith((".gz", ".json"))] == []
        (scratch,) = Path(tempfile.gettempdir()).glob("lightning-chakra-*")
        assert [name for name in files(scratch / "step-00000003") if name != "window.json"] == raw
        result = fitting({**SHORT, "dirpath": tmp_path / "next"}, {"max_steps": 5})
    finally:
        os.kill(int(bystander.read_text()), KILL)
    (warning,) = result["warnings"]
    assert "rank 0: an earlier process ended before it published" in warning
    assert f"`lightning-chakra recover {scratch}`" in warning
    assert told in warning
    check_pair(tmp_path / "next", 0, [3, 4])
    if place in ("export", "writer"):
        assert cli.main(["recover", str(scratch)]) == 0
    if place == "writer":
        assert "not complete" not in warning
        check_pair(out, 0, [3, 4])
    if place == "export":  # the execution trace is closed after it
        check_kineto(load(out / "pytorch_profile" / "rank-0.json.gz"), 0, [3, 4])
        assert load(out / "chakra" / "rank-0.json.gz")["lightning_chakra"] == {"partial": True}
    shutil.rmtree(scratch, ignore_errors=True)


@pytest.fixture
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (INT, TERM, USR1, USR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def deferring(numbers: list[signal.Signals], then: Callable[[], Any] = lambda: None) -> None:
    with deferred_signals():
        for number in numbers:
            os.kill(os.getpid(), number)
        then()


@pytest.mark.usefixtures("_handlers")
class TestDeferral:
    def test_the_handler_runs_after_the_block(self) -> None:
        done: list[bool] = []
        with pytest.raises(KeyboardInterrupt):
            deferring([INT], lambda: done.append(True))
        assert done == [True]
        assert signal.getsignal(INT) is signal.default_int_handler

    def test_all_handlers_run_and_return_although_each_raises(self) -> None:
        def end(*_: Any) -> None:
            ran.append(True)
            raise SystemExit(3)

        ran: list[bool] = []
        signal.signal(TERM, end)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            deferring([TERM, INT])
        assert ran == [True]
        assert signal.getsignal(INT) is signal.default_int_handler
        assert signal.getsignal(TERM) is end

    def test_an_error_of_the_block_is_the_context_of_the_interrupt(self) -> None:
        with pytest.raises(KeyboardInterrupt) as caught:
            deferring([INT], lambda: 1 / 0)
        assert isinstance(caught.value.__context__, ZeroDivisionError)

    def test_handlers_that_are_not_functions_and_other_threads_are_left_alone(self) -> None:
        seen: list[Any] = []
        signal.signal(TERM, signal.SIG_IGN)
        deferring([TERM], lambda: seen.append(signal.getsignal(TERM)))
        thread = threading.Thread(target=deferring, args=([], lambda: seen.append(signal.getsignal(INT))))
        thread.start()
        thread.join()
        assert seen == [signal.SIG_IGN, signal.default_int_handler]

    def test_nested(self) -> None:
        done: list[bool] = []

        def inner() -> None:
            deferring([INT])
            done.append(True)

        with pytest.raises(KeyboardInterrupt):
            deferring([], inner)
        assert done == [True]

    def test_every_signal_with_a_handler_comes_once_and_in_order(self) -> None:
        came: list[int] = []
        for number in (TERM, USR1, USR2):
            signal.signal(number, lambda number, _: came.append(number))
        deferring([USR2, TERM, USR2, USR1, TERM], lambda: came.append(0))
        assert came == [0, USR2, TERM, USR1]

    def test_one_can_be_left_out(self) -> None:
        done: list[bool] = []

        @deferred_signals(but=INT)
        def block() -> None:
            os.kill(os.getpid(), INT)
            done.append(True)

        with pytest.raises(KeyboardInterrupt):
            block()
        assert done == []

    def test_a_handler_that_the_block_sets_stays(self) -> None:
        came: list[str] = []
        signal.signal(USR1, lambda *_: came.append("old"))

        def new(*_: Any) -> None:
            came.append("new")

        deferring([USR1], lambda: signal.signal(USR1, new))
        assert came == ["old"]
        assert signal.getsignal(USR1) is new
