"""The road from hook to file in one process: what is recorded, under which marks, and where it lies."""

import copy
import dataclasses
import inspect
import logging
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from packaging.version import Version

from lightning_chakra import ChakraProfilerCallback
from lightning_chakra.recording.messages import ChakraProfilerWarning
from tests import harness, programs
from tests.police import offences
from tests.reading import check_kineto, check_pair, files, load, operators


@pytest.fixture(autouse=True)
def _no_trouble(recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    """No warning of ours that the test does not expect."""
    yield
    assert [str(w.message) for w in recwarn if issubclass(w.category, ChakraProfilerWarning)] == []


PAIR = ["chakra/rank-0.json.gz", "pytorch_profile/rank-0.json.gz"]
EARLY: dict[str, Any] = {"wait": 1, "warmup": 1}  # records steps 2 and 3


def _mark(kineto: dict[str, Any], name: str) -> dict[str, Any]:
    (event,) = [event for event in operators(kineto) if event["name"] == name]
    return event


def _inside(kineto: dict[str, Any], mark: dict[str, Any]) -> list[str]:
    """The names of the operators that the training thread began between begin and end of ``mark``."""
    begin, end = mark["ts"], mark["ts"] + mark["dur"]
    return [
        event["name"]
        for event in operators(kineto)
        if event["tid"] == mark["tid"] and event is not mark and begin <= event["ts"] <= end
    ]


def _per_step(kineto: dict[str, Any], steps: list[int], name: str) -> list[int]:
    """How many operators of this name each step has."""
    return [_inside(kineto, _mark(kineto, f"ProfilerStep#{step}")).count(name) for step in steps]


BATCH = "aten::mse_loss"  # one in the forward pass of each batch
OPTIMIZER = "Optimizer.step#SGD.step"


def _spans(result: dict[str, Any]) -> list[tuple[str, int, int, bool]]:
    return [(t["kind"], t["first_step"], t["last_step"], t["partial"]) for t in result["traces"]]


# What is recorded ----------------------------------------------------------------------------------------------------


def test_defaults_record_global_steps_10_and_11(out: Path) -> None:
    result = programs.train({"dirpath": out, "collect_chakra": True})
    assert files(out) == PAIR
    kineto, _ = check_pair(out, 0, [10, 11])
    assert _per_step(kineto, [10, 11], BATCH) == _per_step(kineto, [10, 11], OPTIMIZER) == [1, 1]
    assert _spans(result) == [("kineto", 10, 11, False), ("chakra", 10, 11, False)]
    for trace in result["traces"]:
        assert Path(trace["path"]).stat().st_size == trace["bytes"]


def _kineto(out: Path, **arguments: Any) -> dict[str, Any]:
    programs.train({"dirpath": out, **EARLY, **arguments}, model=programs.Model(5))
    assert files(out) == (PAIR if arguments.get("collect_chakra") else PAIR[1:])
    kineto = load(out / PAIR[1])
    check_kineto(kineto, 0, [2, 3])
    return kineto


def _what(kineto: dict[str, Any]) -> set[str]:
    """Which of the optional contents a Kineto trace has."""
    events = kineto["traceEvents"]
    found = {
        "shapes": any("Input Dims" in event.get("args", {}) for event in events),
        "callstack": any(event.get("cat") == "python_function" for event in events),
        "memory": any(event.get("name") == "[memory]" for event in events),
        "flops": kineto.get("with_flops") == 1,
        "modules": kineto.get("with_modules") == 1,
    }
    return {name for name, there in found.items() if there}


@pytest.mark.parametrize(
    ("asked", "there"),
    [
        ([], set()),
        (["collect_shapes"], {"shapes"}),
        (["collect_callstack"], {"callstack"}),
        (["collect_chakra"], set()),
        (["profile_memory"], {"memory"}),
        # torch computes them from the shapes
        (["with_flops"], {"flops", "shapes"}),
        (["with_modules"], {"modules"}),
        (["collect_shapes", "collect_callstack", "collect_chakra"], {"shapes", "callstack"}),
    ],
)
def test_each_option_adds_what_it_says_and_nothing_else(out: Path, asked: list[str], there: set[str]) -> None:
    kineto = _kineto(out, **dict.fromkeys(asked, True))
    assert _what(kineto) == there
    assert {name for name, on in kineto["lightning_chakra"]["options"].items() if on} == set(asked)
    if "collect_chakra" in asked:
        check_pair(out, 0, [2, 3])


def test_a_trace_describes_itself(out: Path) -> None:
    kineto = _kineto(out, profile_ranks="0")
    entry = kineto["lightning_chakra"]
    assert entry["world_size"] == kineto["distributedInfo"]["world_size"] == 1
    assert entry["profiled_ranks"] == [0]
    assert (entry["first_step"], entry["last_step"], entry["partial"]) == (2, 3, False)
    assert entry["schedule"] == {"skip_first": 0, "wait": 1, "warmup": 1, "active": 2, "repeat": 1}
    assert entry["step_unit"] == "optimizer_step"
    assert entry["strategy"] == "SingleDeviceStrategy"


# The schedule --------------------------------------------------------------------------------------------------------


def test_skip_first_and_no_warmup(out: Path) -> None:
    programs.train({"dirpath": out, "collect_chakra": True, "skip_first": 3, "wait": 0, "warmup": 0})
    check_pair(out, 0, [3, 4])


def test_a_step_of_an_accumulation_holds_its_batches_also_the_short_one_at_the_end_of_an_epoch(out: Path) -> None:
    steps = [2, 3, 4]
    trainer = {"accumulate_grad_batches": 4, "max_epochs": 2}  # 14 batches in groups of 4, 4, 4 and 2
    result = programs.train({"dirpath": out, "collect_chakra": True, **EARLY, "active": 3}, trainer)
    assert result["global_step"] == 8
    assert files(out) == PAIR
    kineto, _ = check_pair(out, 0, steps)
    assert _per_step(kineto, steps, BATCH) == [4, 2, 4]
    assert _per_step(kineto, steps, OPTIMIZER) == [1, 1, 1]


def test_a_batch_that_moves_the_global_step_by_two_is_one_step(out: Path) -> None:
    result = programs.train({"dirpath": out, "collect_chakra": True}, model=programs.TwoOptimizers())
    assert result["global_step"] == 28
    kineto, _ = check_pair(out, 0, [20, 22])
    assert _per_step(kineto, [20, 22], BATCH) == _per_step(kineto, [20, 22], OPTIMIZER) == [2, 2]
    assert _spans(result)[0] == ("kineto", 20, 22, False)


class _EveryThird(programs.Model):
    """Manual optimization that steps on every third batch."""

    def __init__(self) -> None:
        super().__init__(14)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(self.layer(batch)))
        if batch_idx % 3 == 2:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layer.parameters(), lr=0.01)


def test_manual_accumulation(out: Path) -> None:
    programs.train({"dirpath": out, "collect_chakra": True, **EARLY}, model=_EveryThird())
    kineto, _ = check_pair(out, 0, [2, 3])
    assert _per_step(kineto, [2, 3], BATCH) == [3, 3]
    assert _per_step(kineto, [2, 3], OPTIMIZER) == [1, 1]


def test_batches_as_steps_count_on_over_epochs(out: Path) -> None:
    callback = {"dirpath": out, "collect_chakra": True, "step_unit": "batch"}
    programs.train(callback, {"max_epochs": 5}, programs.Model(3))
    kineto, _ = check_pair(out, 0, [10, 11])
    assert kineto["lightning_chakra"]["step_unit"] == "batch"


def test_batches_as_steps_of_an_accumulation(out: Path) -> None:
    callback = {"dirpath": out, "collect_chakra": True, "step_unit": "batch"}
    programs.train(callback, {"accumulate_grad_batches": 4})
    kineto, _ = check_pair(out, 0, [10, 11])
    assert _per_step(kineto, [10, 11], BATCH) == [1, 1]
    assert _per_step(kineto, [10, 11], OPTIMIZER) == [0, 1]


@pytest.mark.parametrize(("repeat", "windows"), [(2, [[3, 4], [8, 9]]), (0, [[3, 4], [8, 9], [13, 14]])])
def test_each_window_has_a_folder_and_a_clean_pair(out: Path, repeat: int, windows: list[list[int]]) -> None:
    callback = {"dirpath": out, "collect_chakra": True, "wait": 2, "repeat": repeat}
    result = programs.train(callback, model=programs.Model(17))
    assert files(out) == [f"step-{first:08d}/{name}" for first, _ in windows for name in PAIR]
    for steps in windows:
        check_pair(out / f"step-{steps[0]:08d}", 0, steps)
    kinds = ("kineto", "chakra")
    assert _spans(result) == [(kind, first, last, False) for first, last in windows for kind in kinds]


def test_windows_without_a_pause(out: Path) -> None:
    callback = {"dirpath": out, "collect_chakra": True, "wait": 0, "warmup": 0, "repeat": 3}
    programs.train(callback, model=programs.Model(6))
    for steps in ([0, 1], [2, 3], [4, 5]):
        check_pair(out / f"step-{steps[0]:08d}", 0, steps)


def test_a_window_goes_on_over_the_end_of_an_epoch(out: Path) -> None:
    callback = {"dirpath": out, "collect_chakra": True, "wait": 3, "active": 3}
    programs.train(callback, {"max_epochs": 2}, programs.Model(5))
    assert files(out) == PAIR
    check_pair(out, 0, [4, 5, 6])


def test_a_window_cut_short_is_marked(out: Path) -> None:
    result = programs.train({"dirpath": out, "collect_chakra": True}, model=programs.Model(11))
    kineto, _ = check_pair(out, 0, [10])
    assert kineto["lightning_chakra"]["partial"] is True
    assert _spans(result) == [("kineto", 10, 10, True), ("chakra", 10, 10, True)]


# Validation ----------------------------------------------------------------------------------------------------------


def test_a_validation_in_a_window_has_a_range_and_no_step(out: Path) -> None:
    trainer = {"limit_val_batches": 2, "val_check_interval": 11}  # between steps 10 and 11
    programs.train({"dirpath": out, "collect_chakra": True}, trainer)
    kineto, et = check_pair(out, 0, [10, 11])
    validation = _mark(kineto, "validation")
    assert _inside(kineto, validation).count(BATCH) == 2
    first, second = (_mark(kineto, f"ProfilerStep#{step}") for step in (10, 11))
    assert first["ts"] + first["dur"] <= validation["ts"]
    assert validation["ts"] + validation["dur"] <= second["ts"]
    assert _per_step(kineto, [10, 11], BATCH) == [1, 1]
    (node,) = [node for node in et["nodes"] if node["name"] == "validation"]
    parents = {n["id"]: n["ctrl_deps"] for n in et["nodes"]}

    def below(child: int) -> bool:
        while child != parents[child] and child in parents:
            child = parents[child]
            if child == node["id"]:
                return True
        return False

    assert sum(n["name"] == BATCH and below(n["id"]) for n in et["nodes"]) == 2


def test_a_validation_between_the_batches_of_a_step(out: Path) -> None:
    trainer = {"accumulate_grad_batches": 4, "limit_val_batches": 2, "val_check_interval": 10, "max_epochs": 1}
    programs.train({"dirpath": out, "collect_chakra": True, "wait": 1, "warmup": 0, "active": 2}, trainer)
    kineto, _ = check_pair(out, 0, [1, 2])
    assert _per_step(kineto, [1, 2], BATCH) == [4, 4 + 2]
    assert _per_step(kineto, [1, 2], "validation") == [0, 1]
    assert _inside(kineto, _mark(kineto, "validation")).count(BATCH) == 2


def test_the_sanity_check_leaves_nothing(out: Path) -> None:
    trainer = {"limit_val_batches": 2, "num_sanity_val_steps": 2}
    programs.train({"dirpath": out, "collect_chakra": True, "wait": 0, "warmup": 0}, trainer)
    kineto, et = check_pair(out, 0, [0, 1])
    names = {event["name"] for event in operators(kineto)} | {node["name"] for node in et["nodes"]}
    assert "validation" not in names
    assert _per_step(kineto, [0, 1], BATCH) == [1, 1]


@pytest.mark.parametrize("run", ["validate", "test", "predict"])
def test_other_runs_than_fit_leave_nothing(out: Path, run: str) -> None:
    callback = ChakraProfilerCallback(out, wait=0, warmup=0, profile_ranks=[5])  # which only a fit refuses
    trainer = pl.Trainer(**{**programs.QUIET, "limit_val_batches": 2, "limit_test_batches": 2}, callbacks=[callback])
    getattr(trainer, run)(programs.Model(), **({"dataloaders": [torch.zeros(2, 32)]} if run == "predict" else {}))
    assert not out.exists()
    assert callback.traces == []


# Several fits --------------------------------------------------------------------------------------------------------


def _at_step_7(folder: Path) -> Path:
    """A checkpoint from within an epoch of 14 batches."""
    save = ModelCheckpoint(folder, filename="at-{step}", every_n_train_steps=7, save_top_k=-1)
    pl.Trainer(**{**programs.QUIET, "enable_checkpointing": True}, callbacks=[save]).fit(programs.Model())
    return folder / "at-step=7.ckpt"


@pytest.mark.parametrize("unit", ["optimizer_step", "batch"])
def test_after_a_resume_marks_continue_and_the_schedule_starts_afresh(out: Path, tmp_path: Path, unit: str) -> None:
    checkpoint = _at_step_7(tmp_path)
    callback = {"dirpath": out, "collect_chakra": True, **EARLY, "step_unit": unit}
    result = programs.train(callback, ckpt_path=checkpoint, **programs.TRUSTED)
    assert result["batches"] == 7
    assert files(out) == PAIR
    check_pair(out, 0, [9, 10])


def test_later_fits_of_one_callback_go_to_folders_of_their_own(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = ChakraProfilerCallback(out, collect_chakra=True, **EARLY)
    for _ in range(3):
        assert programs.train_with(callback, model=programs.Model(5))["offences"] == []
    assert files(out) == sorted([*PAIR, *(f"run-{n}/{name}" for n in (1, 2) for name in PAIR)])
    for root in (out, out / "run-1", out / "run-2"):
        check_pair(root, 0, [2, 3])
    assert [Path(trace.path) for trace in callback.traces] == [
        root / name for root in (out, out / "run-1", out / "run-2") for name in reversed(PAIR)
    ]
    starts = [message for message in caplog.messages if message.startswith("recording ")]
    assert ["holds earlier traces" in start for start in starts] == [False, True, True]


def test_a_second_fit_of_one_trainer_counts_on(out: Path) -> None:
    callback = ChakraProfilerCallback(out, collect_chakra=True, **EARLY)
    trainer = pl.Trainer(**programs.QUIET, callbacks=[callback])
    model = programs.Model(5)
    trainer.fit(model)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model)
    check_pair(out, 0, [2, 3])
    check_pair(out / "run-1", 0, [7, 8])


def test_what_lies_in_the_folder_is_left_alone(out: Path) -> None:
    (out / "chakra").mkdir(parents=True)
    (out / "chakra" / "rank-0.json.gz").write_text("mine")
    (out / "run-1" / "step-00000020").mkdir(parents=True)
    programs.train({"dirpath": out, "collect_chakra": True, **EARLY}, model=programs.Model(5))
    assert files(out) == ["chakra/rank-0.json.gz", *(f"run-2/{name}" for name in PAIR)]
    assert (out / "chakra" / "rank-0.json.gz").read_text() == "mine"


# Copies --------------------------------------------------------------------------------------------------------------


class _CopyDuring(pl.Callback):
    """Copies another callback on each batch; the copies are the test's."""

    def __init__(self, callback: ChakraProfilerCallback) -> None:
        self.callback = callback
        self.copies: list[ChakraProfilerCallback] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.copies += _copies(self.callback)


def _copies(callback: ChakraProfilerCallback) -> list[ChakraProfilerCallback]:
    return [pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback), copy.copy(callback)]


def test_copies_made_before_during_and_after_a_fit_are_whole_and_independent(out: Path) -> None:
    callback = ChakraProfilerCallback(out, collect_chakra=True, **EARLY)
    before = _copies(callback)
    during = _CopyDuring(callback)
    programs.train_with(callback, {"callbacks": [during]}, programs.Model(5))
    check_pair(out, 0, [2, 3])
    after = _copies(callback)
    assert len(during.copies) == 15
    assert [copied.traces for copied in before] == [[]] * 3
    assert [copied.traces for copied in after] == [callback.traces] * 3
    del during.copies[:9]  # nothing of a copy that is dropped touches the original
    for number, copied in enumerate([*before, during.copies[0], *after], 1):
        earlier = len(copied.traces)
        programs.train_with(copied, model=programs.Model(5))
        check_pair(out / f"run-{number}", 0, [2, 3])
        assert len(copied.traces) == earlier + 2
    assert len(callback.traces) == 2


# Where it goes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logger", [CSVLogger, TensorBoardLogger])
def test_the_default_folder_is_the_one_of_the_logger(tmp_path: Path, logger: Any) -> None:
    if logger is TensorBoardLogger:
        pytest.importorskip("tensorboard", reason="the logger needs tensorboard")
    programs.train(
        {"collect_chakra": True, **EARLY},
        {"logger": logger(tmp_path / "logs", name="job"), "default_root_dir": tmp_path / "root"},
        programs.Model(5),
    )
    check_pair(tmp_path / "logs" / "job" / "version_0", 0, [2, 3])
    assert not (tmp_path / "root").exists()


def test_without_a_logger_it_is_the_root_of_the_trainer(tmp_path: Path) -> None:
    programs.train({"collect_chakra": True, **EARLY}, {"default_root_dir": tmp_path}, programs.Model(5))
    assert files(tmp_path) == PAIR


def test_folders_stay_where_they_are_wherever_the_training_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wanders(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                monkeypatch.chdir("/")

    monkeypatch.chdir(tmp_path)
    arguments = {"dirpath": "out", "scratch_dir": "scratch", **EARLY}
    result = programs.train(arguments, {"callbacks": [Wanders()]}, programs.Model(5))
    assert files(tmp_path) == ["out/pytorch_profile/rank-0.json.gz"]
    assert result["traces"][0]["path"] == str(tmp_path / "out" / "pytorch_profile" / "rank-0.json.gz")


def test_raw_files_go_to_the_scratch_folder_and_vanish(out: Path, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                seen.append(files(tmp_path / "scratch"))

    arguments = {"dirpath": out, "scratch_dir": tmp_path / "scratch", "collect_chakra": True, **EARLY}
    programs.train(arguments, {"callbacks": [Look()]}, programs.Model(5))
    (during,) = seen
    assert any(name.endswith("step-00000002/chakra/rank-0.json") for name in during)
    assert files(tmp_path / "scratch") == []
    check_pair(out, 0, [2, 3])


# What the user sees --------------------------------------------------------------------------------------------------


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "lightning_chakra"]


def test_one_line_at_the_start_and_one_at_the_end(
    out: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    callback = ChakraProfilerCallback(out, collect_chakra=True, profile_ranks=[0])
    programs.train_with(callback)
    start, end = _lines(caplog)
    assert start == (f"recording steps 10 to 11 on rank 0 of 1: Kineto traces and Chakra execution traces, to {out}")
    size = sum(trace.bytes for trace in callback.traces)
    assert end.startswith(f"wrote 2 traces, {size / 1000:.1f} kB, to {out}. Open those in pytorch_profile with https:")
    assert {record.levelno for record in caplog.records if record.name == "lightning_chakra"} == {logging.INFO}
    assert capfd.readouterr().out == ""


def test_the_start_line_tells_how_to_get_execution_traces(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    programs.train({"dirpath": out, **EARLY}, model=programs.Model(5))
    start, end = _lines(caplog)
    assert "Kineto traces (collect_chakra=True adds execution traces)" in start
    assert end.startswith("wrote 1 trace, ")


@pytest.mark.parametrize("unit", ["optimizer_step", "batch"])
def test_the_start_line_tells_the_steps_of_a_resumed_fit(
    out: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, unit: str
) -> None:
    checkpoint = _at_step_7(tmp_path)
    callback = {"dirpath": out, **EARLY, "step_unit": unit}
    programs.train(callback, ckpt_path=checkpoint, **programs.TRUSTED)
    assert _lines(caplog)[0].startswith("recording steps 9 to 10 on ")


@pytest.mark.parametrize(
    ("trainer", "model"), [({}, programs.Model(5)), ({"max_steps": 3}, programs.Model()), ({}, programs.Model(10))]
)
def test_a_fit_too_short_for_a_window_is_told_once(out: Path, trainer: dict[str, Any], model: programs.Model) -> None:
    with pytest.warns(ChakraProfilerWarning, match="no trace: .*wait=9.*needs 12 steps") as caught:
        programs.train({"dirpath": out}, trainer, model)
    assert len([w for w in caught if issubclass(w.category, ChakraProfilerWarning)]) == 1
    assert not out.exists()


# Refusals ------------------------------------------------------------------------------------------------------------

_OLD = Version(pytorch_lightning.__version__) < Version("2.6")
_OTHER = pytest.mark.skipif(_OLD, reason="pytorch_lightning before 2.6 takes no callback of lightning.pytorch")
TRAINERS = pytest.mark.parametrize("trainer", [pl.Trainer, pytest.param(pytorch_lightning.Trainer, marks=_OTHER)])


def _module(trainer: Any) -> Any:
    if trainer is pl.Trainer:
        return programs.Model(5)
    from pytorch_lightning.demos.boring_classes import BoringModel

    return BoringModel()


@TRAINERS
def test_a_pytorch_lightning_trainer_is_as_good(out: Path, trainer: Any) -> None:
    callback = ChakraProfilerCallback(out, collect_chakra=True, **EARLY)
    trainer(**programs.QUIET, limit_train_batches=5, callbacks=[callback]).fit(_module(trainer))
    assert files(out) == PAIR
    check_pair(out, 0, [2, 3])


@TRAINERS
def test_a_second_owner_of_the_profiler_is_refused(out: Path, trainer: Any) -> None:
    callback = ChakraProfilerCallback(out)
    other = trainer(**programs.QUIET, default_root_dir=out, profiler="pytorch", callbacks=[callback])
    with pytest.raises(MisconfigurationException, match=r"PyTorchProfiler.*Remove one of them"):
        other.fit(_module(trainer))
    assert offences() == []
    other.profiler.profiler = None  # one that never recorded raises when it is dropped


@TRAINERS
def test_two_callbacks_are_refused(out: Path, trainer: Any) -> None:
    callbacks = [ChakraProfilerCallback(out), ChakraProfilerCallback(out / "2")]
    with pytest.raises(MisconfigurationException, match=r"2 `ChakraProfilerCallback`s.*Keep one"):
        trainer(**programs.QUIET, callbacks=callbacks).fit(_module(trainer))
    assert not out.exists()


@pytest.mark.parametrize("profiler", ["simple", "advanced"])
def test_the_other_profilers_go_well_with_it(out: Path, tmp_path: Path, profiler: str) -> None:
    trainer = {"profiler": profiler, "default_root_dir": tmp_path}
    programs.train({"dirpath": out, "collect_chakra": True, **EARLY}, trainer, programs.Model(5))
    check_pair(out, 0, [2, 3])


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"dirpath": 3}, TypeError, "`dirpath=3` must be a path or None"),
        ({"dirpath": b"traces"}, TypeError, "`dirpath=b'traces'` must be a path or None"),
        ({"dirpath": ""}, ValueError, "`dirpath` is empty; leave it out (None) for the default folder"),
        ({"scratch_dir": []}, TypeError, "`scratch_dir=[]` must be a path or None"),
        ({"scratch_dir": "s3://b/x"}, ValueError, "`scratch_dir='s3://b/x'` must be a local folder"),
        ({"profile_ranks": [-1]}, ValueError, "`profile_ranks=[-1]`: rank -1 is negative"),
        ({"profile_ranks": "0-"}, ValueError, "`profile_ranks='0-'`: cannot read '0-'"),
        ({"profile_ranks": None}, TypeError, "`profile_ranks=None` must be a list"),
        ({"wait": -1}, ValueError, "`wait=-1` must be at least 0"),
        ({"active": 0}, ValueError, "`active=0` must be at least 1"),
        ({"repeat": 1.5}, TypeError, "`repeat` must be an integer number of steps, got 1.5"),
        ({"step_unit": "epoch"}, ValueError, "`step_unit='epoch'` must be one of 'optimizer_step', 'batch'"),
        ({"step_unit": None}, ValueError, "`step_unit=None` must be one of"),
        ({"on_error": "ignore"}, ValueError, "`on_error='ignore'` must be one of 'warn', 'raise'"),
        ({"collect_shapes": 1}, TypeError, "`collect_shapes=1` must be True or False"),
        ({"collect_callstack": "yes"}, TypeError, "`collect_callstack='yes'` must be True or False"),
        ({"collect_chakra": None}, TypeError, "`collect_chakra=None` must be True or False"),
        ({"profile_memory": 0}, TypeError, "`profile_memory=0` must be True or False"),
        ({"with_flops": []}, TypeError, "`with_flops=[]` must be True or False"),
        ({"with_modules": "no"}, TypeError, "`with_modules='no'` must be True or False"),
        ({"barrier_timeout": 0}, ValueError, "`barrier_timeout=0` must be more than 0 seconds"),
        ({"barrier_timeout": float("nan")}, ValueError, "`barrier_timeout=nan` must be more than 0 seconds"),
        ({"barrier_timeout": float("inf")}, ValueError, "`barrier_timeout=inf` must be more than 0 seconds"),
        ({"barrier_timeout": "30"}, TypeError, "`barrier_timeout='30'` must be a number of seconds"),
        ({"barrier_timeout": True}, TypeError, "`barrier_timeout=True` must be a number of seconds"),
    ],
)
def test_a_wrong_argument_is_told_with_its_value_and_the_rule(
    arguments: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error) as caught:
        ChakraProfilerCallback(**arguments)
    assert told in str(caught.value)


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="colect_shapes"):
        ChakraProfilerCallback(colect_shapes=True)  # type: ignore[call-arg]


def test_its_text_tells_all_its_arguments() -> None:
    callback = ChakraProfilerCallback("traces", profile_ranks=range(2), active=3)
    assert eval(repr(callback)).settings == callback.settings
    for name in inspect.signature(ChakraProfilerCallback).parameters:
        assert f"{name}={getattr(callback, name)!r}" in repr(callback)


def test_a_folder_that_is_no_text(out: Path) -> None:
    name = os.fsdecode(os.fsencode(out) + b"-\xff")
    with pytest.raises(ValueError, match=r"`scratch_dir=.*must be UTF-8"):
        ChakraProfilerCallback(out, scratch_dir=name)
    # apart: the log of such a name cannot be sent between the processes of the tests
    harness.succeed(harness.run(programs.train, {"dirpath": name, **EARLY}, {"max_steps": 5}))
    assert files(Path(name)) == ["pytorch_profile/rank-0.json.gz"]


def test_a_folder_of_an_unknown_protocol_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="nosuch"):
        programs.train({"dirpath": "nosuch://bucket/traces"})


def test_a_rank_beyond_the_world_is_told_before_anything_is_made(out: Path) -> None:
    with pytest.raises(ValueError, match=r"profile_ranks.*rank 1.*world_size=1"):
        programs.train({"dirpath": out, "profile_ranks": [1]})
    assert not out.exists()


def test_the_callback_makes_nothing_before_a_fit(out: Path) -> None:
    callback = ChakraProfilerCallback(out, scratch_dir=out / "scratch")
    assert not out.exists()
    assert callback.traces == []
    assert all(not isinstance(value, torch.nn.Module) for value in vars(callback).values())
    assert dataclasses.is_dataclass(callback.schedule)
