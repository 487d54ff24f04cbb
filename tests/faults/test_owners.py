"""Others who want the one profiler or the one execution trace observer of the process."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from packaging.version import Version
from torch.profiler import ExecutionTraceObserver, profile, schedule

from lightning_chakra import ChakraProfilerCallback
from tests import police
from tests.faults.trainings import PAIR, SHORT, check_clean, check_files, check_only_kineto, fit, fitting, outcome
from tests.programs import QUIET, Model
from tests.reading import check_pair, et_marks, files, load

# --- refused at setup -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profiler", ["pytorch", PyTorchProfiler(record_module_names=False)])
def test_a_profiler_of_the_trainer_that_drives_kineto_is_refused(out: Path, profiler: Any) -> None:
    trainer = Trainer(**QUIET, profiler=profiler, callbacks=[ChakraProfilerCallback(out)])
    with pytest.raises(MisconfigurationException, match=r"PyTorchProfiler.*ChakraProfilerCallback.*one Kineto"):
        trainer.fit(Model(5))
    assert not out.exists()


def test_two_of_us_are_refused(out: Path) -> None:
    ours = [ChakraProfilerCallback(out / name) for name in "ab"]
    trainer = Trainer(**QUIET, callbacks=ours)
    with pytest.raises(MisconfigurationException, match="2 `ChakraProfilerCallback`s"):
        trainer.fit(Model(5))
    assert not out.exists()


@pytest.mark.parametrize("profiler", ["simple", "advanced"])
def test_profilers_that_do_not_drive_kineto_are_welcome(out: Path, profiler: str) -> None:
    result = fitting({**SHORT, "dirpath": out}, {"profiler": profiler}, Model(9))
    assert result["warnings"] == []
    check_clean(result)
    check_files(out, result, [3, 4], partial=False)


# --- the user's own profiler, inside and outside of the window --------------------------------------------------------


ENDED_BY_OTHER = "the window ends where another profiler was started; what it recorded until then is kept"


class OwnProfiler(Model):
    """Runs a profiler of its own from one step to another.

    It starts where no range of torch's is open. In ``training_step`` the optimizer's is, and a range that begins under
    one profiler and ends under another writes into memory that torch has freed; no test can hold that.
    """

    def __init__(self, first: int, last: int, path: Path) -> None:
        super().__init__(12)
        self.first = first
        self.last = last
        self.path = path
        self.own: Any = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.first:
            self.own = profile()
            self.own.start()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == self.last:
            self.own.stop()
            self.own.export_chrome_trace(str(self.path))
            self.own = None
        return loss


def check_own(path: Path) -> None:
    """The user's trace is whole and holds operators."""
    assert any(event.get("cat") == "cpu_op" for event in load(path)["traceEvents"])


@pytest.mark.parametrize(("first", "last"), [(3, 3), (3, 4), (4, 4), (3, 6), (4, 5)], ids=lambda step: str(step))
def test_own_profiler_started_in_the_window(out: Path, tmp_path: Path, first: int, last: int) -> None:
    again = tmp_path / "again"
    result = fitting({**SHORT, "dirpath": out}, {}, OwnProfiler(first, last, tmp_path / "own.json"), again=again)
    assert (result["error"], result["batches"]) == (None, 12)
    (warning,) = result["warnings"]
    assert warning == f"rank 0, steps 3-4: {ENDED_BY_OTHER}. The training goes on."
    check_own(tmp_path / "own.json")
    check_files(out, result, list(range(3, first + 1)), partial=True)
    check_clean(result, again)


class Scheduled(Model):
    """Has a profiler of its own with a schedule, which is prepared some steps before it records."""

    def __init__(self, first: int, wait: int, warmup: int, active: int) -> None:
        super().__init__(16)
        self.first = first
        self.schedule = schedule(wait=wait, warmup=warmup, active=active, repeat=1)
        self.own: Any = None
        self.recorded: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.first:
            self.own = profile(schedule=self.schedule, on_trace_ready=self.keep)
            self.own.start()

    def keep(self, own: profile) -> None:
        self.recorded.append(len(own.events()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.own is not None:
            self.own.step()

    def on_train_end(self) -> None:
        self.own.stop()
        self.own = None


@pytest.mark.parametrize(
    ("plan", "steps"),
    [
        ((3, 0, 1, 1), [3]),  # prepared in our window, and over with it
        ((4, 0, 3, 1), [3, 4]),  # prepared in our window, and on after it
        ((0, 4, 1, 1), [3]),  # prepared by its step() at the end of batch 3
        ((0, 1, 3, 2), None),  # prepared before our warmup, and on in the window
        ((1, 0, 9, 1), None),  # prepared all the while
        ((2, 0, 2, 2), None),  # prepared in our warmup
        ((6, 0, 1, 1), [3, 4]),
    ],
    ids=str,
)
def test_own_profiler_with_a_schedule(
    out: Path, tmp_path: Path, plan: tuple[int, int, int, int], steps: list[int] | None
) -> None:
    again = tmp_path / "again"
    callback = {**SHORT, "dirpath": out}
    result, recorded = outcome(callback, plan, again, program=_fit_scheduled, fresh=True)  # ends as interpreters end
    assert (result["error"], result["batches"]) == (None, 16)
    assert recorded > 0
    if steps is None:
        assert "another profiler is" in result["warnings"][0]
        assert files(out) == []
    else:
        assert files(out) == PAIR
        assert {(t["first_step"], t["last_step"]) for t in result["traces"]} == {(steps[0], steps[-1])}
    check_clean(result, again)


def _fit_scheduled(callback: Any, plan: tuple[int, int, int, int], again: Path) -> tuple[dict[str, Any], int]:
    model = Scheduled(*plan)
    result = fit(callback, {}, model)
    result["again"] = fit({**callback, "dirpath": again}, {}, Model(9))
    return result, model.recorded[0]


@pytest.mark.parametrize(("first", "last"), [(0, 1), (2, 2), (5, 6)])
def test_own_profiler_outside_the_window_takes_nothing(out: Path, tmp_path: Path, first: int, last: int) -> None:
    result = fitting({**SHORT, "dirpath": out}, {}, OwnProfiler(first, last, tmp_path / "own.json"))
    assert (result["error"], result["warnings"]) == (None, [])
    check_own(tmp_path / "own.json")
    check_clean(result)
    check_files(out, result, [3, 4], partial=False)


@pytest.mark.parametrize(
    ("first", "last", "text"),
    [
        (1, 2, "rank 0, step 2: another profiler is running in this process. The window for which this step warms up"),
        (2, 3, "rank 0, step 3: another profiler is running in this process. This window is not recorded"),
        (0, 8, "rank 0, step 2: another profiler is running in this process. The window for which this step warms up"),
    ],
)
def test_own_profiler_is_running_when_ours_would_begin(
    out: Path, tmp_path: Path, first: int, last: int, text: str
) -> None:
    again = tmp_path / "again"
    result = fitting({**SHORT, "dirpath": out}, {}, OwnProfiler(first, last, tmp_path / "own.json"), again=again)
    assert (result["error"], result["batches"]) == (None, 12)
    (warning,) = result["warnings"]
    assert warning.startswith(text)
    check_own(tmp_path / "own.json")
    assert files(out) == []
    check_clean(result, again)


def test_own_profiler_costs_one_window_of_several(out: Path, tmp_path: Path) -> None:
    model = OwnProfiler(3, 3, tmp_path / "own.json")
    result = fitting({**SHORT, "dirpath": out, "repeat": 2}, {}, model)
    assert len(result["warnings"]) == 1
    check_own(tmp_path / "own.json")
    check_pair(out / "step-00000008", 0, [8, 9])
    check_clean(result)


class FitWithin(OwnProfiler):
    """Trains another model in a hook of its own training, as a probe does, and then profiles its own steps."""

    def __init__(self, inner: Path, path: Path) -> None:
        super().__init__(4, 4, path)
        self.inner = inner

    def on_train_start(self) -> None:
        callback = ChakraProfilerCallback(self.inner, wait=0, active=1)
        Trainer(**QUIET, callbacks=[callback]).fit(Model(3))


def test_a_fit_within_a_fit_leaves_the_outer_one_its_guard(out: Path, tmp_path: Path) -> None:
    result = fitting({**SHORT, "dirpath": out}, {}, FitWithin(tmp_path / "inner", tmp_path / "own.json"))
    assert "another profiler was started" in result["warnings"][0]
    assert files(tmp_path / "inner") == ["pytorch_profile/rank-0.json.gz"]
    check_own(tmp_path / "own.json")
    check_files(out, result, [3, 4], partial=True)
    check_clean(result)


@pytest.mark.parametrize(("first", "last"), [(3, 3), (4, 5), (3, 6)])
def test_own_profiler_in_the_window_with_an_observer_from_the_environment(
    out: Path, tmp_path: Path, first: int, last: int
) -> None:
    """``ENABLE_PYTORCH_EXECUTION_TRACE=1``: the user's profiler brings an observer, which torch lets end ours."""
    again = tmp_path / "again"
    model = OwnProfiler(first, last, tmp_path / "own.json")
    result = outcome(out, model, again, program=_with_environment, env={"ENABLE_PYTORCH_EXECUTION_TRACE": "1"})
    assert (result["error"], result["batches"]) == (None, 12)
    ended, refused = sorted(result["warnings"], key=lambda text: "Observer" in text)
    assert ended.startswith(f"rank 0, steps 3-4: {ENDED_BY_OTHER}")
    assert refused.startswith("rank 0, steps 3-4: another ExecutionTraceObserver was registered for ")
    check_own(tmp_path / "own.json")
    check_files(out, result, list(range(3, first + 1)), partial=True)
    check_clean(result, again)


@pytest.mark.parametrize(("first", "last"), [(0, 1), (2, 2), (5, 7)])
def test_own_profiler_outside_the_window_with_an_observer_from_the_environment(
    out: Path, tmp_path: Path, first: int, last: int
) -> None:
    model = OwnProfiler(first, last, tmp_path / "own.json")
    result = outcome(out, model, None, program=_with_environment, env={"ENABLE_PYTORCH_EXECUTION_TRACE": "1"})
    assert (result["error"], result["warnings"]) == (None, [])
    check_own(tmp_path / "own.json")
    check_files(out, result, [3, 4], partial=False)
    check_clean(result)


def _with_environment(out: Path, model: Model, again: Path) -> dict[str, Any]:
    return fit({**SHORT, "dirpath": out}, {}, model, again=again)


def test_profiler_of_another_thread(out: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    result = outcome(out, again, program=_profile_in_thread)
    assert (result["error"], result["batches"]) == (None, 9)
    (warning,) = result["warnings"]
    assert "rank 0, step 2: another profiler is running in this process" in warning
    assert files(out) == []
    check_clean(result, again)


def _profile_in_thread(out: Path, again: Path) -> dict[str, Any]:
    started, done = threading.Event(), threading.Event()

    def run() -> None:
        with profile():
            started.set()
            done.wait(60)

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(60)
    result = fit({**SHORT, "dirpath": out}, {}, Model(9))
    done.set()
    thread.join()
    result["offences"] = police.offences()
    result["again"] = fit({**SHORT, "dirpath": again}, {}, Model(9))
    return result


# --- the user's own observer ----------------------------------------------------------------------------------------


def test_observer_registered_before_the_fit(out: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    again = tmp_path / "again"
    result = outcome(out, own, again, program=_observe_first)
    assert (result["error"], result["batches"]) == (None, 12)
    (first, second) = result["warnings"]  # one for each window
    assert first.startswith("rank 0, steps 3-4: no execution trace of this window: another ExecutionTraceObserver")
    assert second.startswith("rank 0, steps 8-9: ")
    trace = load(own)
    assert et_marks(trace) == [3, 4, 8, 9]
    assert files(out) == [f"step-0000000{first}/{PAIR[1]}" for first in (3, 8)]
    check_clean(result, again)


def _observe_first(out: Path, own: Path, again: Path) -> dict[str, Any]:
    observer = ExecutionTraceObserver()
    observer.register_callback(str(own))
    observer.start()
    result = fit({**SHORT, "dirpath": out, "repeat": 2}, {}, Model(12))
    observer.stop()
    observer.unregister_callback()
    result["offences"] = police.offences()
    result["again"] = fit({**SHORT, "dirpath": again}, {}, Model(9))
    return result


class OwnObserver(Model):
    """Registers an observer in one step and drops it in a later one."""

    def __init__(self, first: int, last: int, path: Path) -> None:
        super().__init__(12)
        self.first = first
        self.last = last
        self.path = path
        self.own: Any = None

    def register(self, observer: ExecutionTraceObserver, path: str) -> None:
        observer.register_callback(path)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.first:
            self.own = ExecutionTraceObserver()
            self.register(self.own, str(self.path))
            self.own.start()
        loss = super().training_step(batch, batch_idx)
        if batch_idx == self.last:
            self.own.stop()
            self.own.unregister_callback()
            self.own = None
        return loss


@pytest.mark.parametrize(("first", "last"), [(3, 3), (3, 4), (4, 4), (3, 8), (4, 5)])
def test_observer_registered_in_the_window(out: Path, tmp_path: Path, first: int, last: int) -> None:
    """torch would tell it that it is registered, let it end our trace, and die when it is stopped after ours."""
    again = tmp_path / "again"
    own = tmp_path / "own.json"
    result = fitting({**SHORT, "dirpath": out}, {}, OwnObserver(first, last, own), again=again)
    assert (result["error"], result["batches"]) == (None, 12)
    (warning,) = result["warnings"]
    assert warning.startswith(f"rank 0, steps 3-4: another ExecutionTraceObserver was registered for {own}; ")
    check_files(out, result, [3, 4], partial=False)
    check_clean(result, again)


class HiddenObserver(OwnObserver):
    """Registers it on a road of its own, which cannot be closed."""

    def register(self, observer: ExecutionTraceObserver, path: str) -> None:
        REGISTER(observer, path)


REGISTER = ExecutionTraceObserver.register_callback


@pytest.mark.parametrize("last", [3, 4])
def test_observer_that_ends_our_trace(out: Path, tmp_path: Path, last: int) -> None:
    again = tmp_path / "again"
    result = fitting({**SHORT, "dirpath": out}, {}, HiddenObserver(3, last, tmp_path / "own.json"), again=again)
    assert (result["error"], result["batches"]) == (None, 12)
    (warning,) = result["warnings"]
    assert warning.startswith("rank 0, steps 3-4: no whole execution trace of this window: another Execution")
    check_only_kineto(out, result, [3, 4])
    check_clean(result, again)


@pytest.mark.parametrize(("first", "last"), [(0, 1), (6, 8)])
def test_observer_outside_the_window(out: Path, tmp_path: Path, first: int, last: int) -> None:
    own = tmp_path / "own.json"
    result = fitting({**SHORT, "dirpath": out}, {}, OwnObserver(first, last, own))
    assert (result["error"], result["warnings"]) == (None, [])
    assert len(load(own)["nodes"]) > 10
    check_files(out, result, [3, 4], partial=False)
    check_clean(result)


@pytest.mark.parametrize("last", [3, 8])
def test_observer_registered_before_the_window(out: Path, tmp_path: Path, last: int) -> None:
    again = tmp_path / "again"
    own = tmp_path / "own.json"
    result = fitting({**SHORT, "dirpath": out}, {}, OwnObserver(2, last, own), again=again)
    assert (result["error"], result["batches"]) == (None, 12)
    (warning,) = result["warnings"]
    assert warning.startswith("rank 0, steps 3-4: no execution trace of this window: another ExecutionTraceObserver")
    assert len(load(own)["nodes"]) > 10
    check_only_kineto(out, result, [3, 4])
    check_clean(result, again)


# --- Kineto's daemon ------------------------------------------------------------------------------------------------


def test_daemon_mode(out: Path, tmp_path: Path) -> None:
    """A fresh interpreter: libkineto reads the variable when torch is loaded."""
    again = tmp_path / "again"
    env = {"KINETO_USE_DAEMON": "1", "KINETO_LOG_LEVEL": "4"}
    result = outcome(out, Model(9), again, program=_with_environment, env=env, fresh=True)
    assert (result["error"], result["warnings"]) == (None, [])
    check_files(out, result, [3, 4], partial=False)
    check_clean(result, again)


# --- torch itself fails ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "text", "kept"),
    [
        ("prepare_trace", "rank 0, step 2: RuntimeError: injected. The window for which this step warms up", []),
        ("start_trace", "rank 0, step 3: RuntimeError: injected. This window is not recorded", []),
        ("stop_trace", "rank 0, steps 3-4: no Kineto trace of this window: injected. ", PAIR[:1]),
        ("export_chrome_trace", "rank 0, steps 3-4: no Kineto trace of this window: injected. ", PAIR[:1]),
    ],
)
def test_torch_raises(out: Path, tmp_path: Path, method: str, text: str, kept: list[str]) -> None:
    again = tmp_path / "again"
    result = outcome(out, method, again, program=_break_torch)
    assert (result["error"], result["batches"]) == (None, 9)
    (warning,) = result["warnings"]
    assert warning.startswith(text)
    assert warning.endswith(("the training goes on.", "The training goes on."))
    assert files(out) == kept
    for name in kept:
        assert et_marks(load(out / name)) == [3, 4]
    if method == "start_trace" and Version(torch.__version__) < Version("2.13"):
        # torch refuses the next profiler after one that was prepared and not started
        assert (result["again"]["error"], result["again"]["batches"]) == (None, 9)
    else:
        check_clean(result, again)


def _break_torch(out: Path, method: str, again: Path) -> dict[str, Any]:
    from lightning_chakra.recording import recorder

    class Broken(recorder.KinetoProfile):  # type: ignore[misc]
        pass

    def raises(self: Any, *args: Any) -> None:
        if method == "stop_trace":
            super(Broken, self).stop_trace()
        raise RuntimeError("injected")

    setattr(Broken, method, raises)
    intact, recorder.KinetoProfile = recorder.KinetoProfile, Broken
    result = fit({**SHORT, "dirpath": out}, {}, Model(9))
    recorder.KinetoProfile = intact
    result["again"] = fit({**SHORT, "dirpath": again}, {}, Model(9))
    return result


def test_environment_observer_alone_does_not_touch_ours(out: Path) -> None:
    """Without a profiler of the user's, the variable has nobody to give an observer to."""
    env = {"ENABLE_PYTORCH_EXECUTION_TRACE": "1"}
    result = outcome(out, Model(9), None, program=_with_environment, env=env)
    assert result["warnings"] == []
    check_files(out, result, [3, 4], partial=False)
    check_clean(result)
