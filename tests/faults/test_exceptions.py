"""Trainings that raise, and faults of the profiling that are to be raised."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_chakra import ChakraProfilerCallback
from lightning_chakra.recording.barrier import BarrierError, StrategyBarrier
from tests import harness, police
from tests.faults.trainings import LIMIT, PAIR, SHORT, Boom, Unsized, check_clean, check_files, fit, fitting, recorded
from tests.programs import QUIET, Model
from tests.reading import check_pair, files, kineto_marks, load


class Raises(Model):
    """Raises in one of its hooks at a global step, as a model, an optimizer, a validation or a loader does."""

    def __init__(self, where: str, step: int, batches: int = 12) -> None:
        super().__init__(batches)
        self.where = where
        self.at = step

    def maybe_raise(self, where: str, step: int | None = None) -> None:
        if where == self.where and (self.trainer.global_step if step is None else step) == self.at:
            raise Boom(f"in {where} at step {self.at}")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.maybe_raise("training_step")
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.maybe_raise("optimizer_step")
        super().optimizer_step(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        self.maybe_raise("backward")
        super().backward(loss)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.maybe_raise("validation")
        return super().validation_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        return DataLoader(Faulty(self))


class Faulty(Unsized):
    """A stream that ends with an exception; Lightning asks for each of its batches one batch early."""

    def __init__(self, model: Raises) -> None:
        super().__init__(model.batches)
        self.model = model

    def __iter__(self) -> Any:
        for index, batch in enumerate(super().__iter__()):
            self.model.maybe_raise("loader", index - 1)
            yield batch


class RaisingCallback(Callback):
    """Raises at the start or the end of a batch."""

    def __init__(self, where: str, step: int) -> None:
        self.where = where
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.where == "start" and batch_idx == self.step:
            raise Boom(f"at the start of batch {batch_idx}")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.where == "end" and batch_idx == self.step:
            raise Boom(f"at the end of batch {batch_idx}")


VALIDATING = {
    "limit_val_batches": 1,
    "val_check_interval": 1,
    "check_val_every_n_epoch": None,
    "num_sanity_val_steps": 0,
}


@pytest.mark.parametrize(
    ("step", "kept", "partial"), [(1, [], False), (3, [3], True), (4, [3, 4], True), (7, [3, 4], False)]
)
@pytest.mark.parametrize("where", ["training_step", "backward", "optimizer_step", "loader"])
def test_training_raises(out: Path, tmp_path: Path, where: str, step: int, kept: list[int], partial: bool) -> None:
    if where == "loader":  # the batch before the one that cannot be had is not trained either
        kept, partial = {3: ([], False), 4: ([3], True)}.get(step, (kept, partial))
    again = tmp_path / "again" if step == 4 else None
    result = fitting({**SHORT, "dirpath": out}, {}, Raises(where, step), again=again)
    assert result["error"] == f"tests.faults.trainings.Boom: in {where} at step {step}"
    assert result["warnings"] == []
    check_clean(result, again)
    check_files(out, result, kept, partial=partial)


@pytest.mark.parametrize(("step", "kept", "partial"), [(1, [], False), (4, [3], True), (5, [3, 4], False)])
def test_validation_raises(out: Path, step: int, kept: list[int], partial: bool) -> None:
    result = fitting({**SHORT, "dirpath": out}, VALIDATING, Raises("validation", step))
    assert result["error"] == f"tests.faults.trainings.Boom: in validation at step {step}"
    assert result["warnings"] == []
    check_clean(result)
    check_files(out, result, kept, partial=partial)


def test_validation_raises_between_two_windows(out: Path) -> None:
    result = fitting({**SHORT, "dirpath": out, "repeat": 2}, VALIDATING, Raises("validation", 7))
    assert "Boom" in result["error"]
    assert result["warnings"] == []
    check_clean(result)
    assert files(out) == [f"step-00000003/{name}" for name in PAIR]
    check_pair(out / "step-00000003", 0, [3, 4])


@pytest.mark.parametrize("first", [True, False], ids=["before ours", "after ours"])
@pytest.mark.parametrize(
    ("where", "step", "kept", "partial"),
    [
        ("start", 2, [], False),
        ("start", 3, [3], True),
        ("end", 3, [3], True),
        ("end", 4, [3, 4], True),
        ("end", 6, [3, 4], False),
    ],
)
def test_another_callback_raises(
    out: Path, tmp_path: Path, first: bool, where: str, step: int, kept: list[int], partial: bool
) -> None:
    if first and (where, step) == ("start", 3):
        kept = []  # the window had not begun
    if not first and (where, step) == ("end", 4):
        partial = False  # it had ended
    raiser = RaisingCallback(where, step)
    trainer, more = ({}, {"before": [raiser]}) if first else ({"callbacks": [raiser]}, {})
    again = tmp_path / "again" if step in (3, 4) else None
    result = fitting({**SHORT, "dirpath": out}, trainer, Model(9), again=again, **more)
    assert result["error"] == f"tests.faults.trainings.Boom: at the {where} of batch {step}"
    assert result["warnings"] == []
    check_clean(result, again)
    check_files(out, result, kept, partial=partial)


def test_exit_code_and_traceback_are_those_of_the_training(out: Path) -> None:
    (rank,) = harness.run(_raise, out, timeout=LIMIT)
    assert rank.exitcode == 1
    assert rank.err.rstrip().endswith("tests.faults.trainings.Boom: in training_step at step 4")
    assert "lightning_chakra" not in rank.err.rsplit("Traceback", 1)[1]
    assert "During handling" not in rank.err
    check_pair(out, 0, [3, 4])


def _raise(out: Path) -> None:
    fit({**SHORT, "dirpath": out}, {}, Raises("training_step", 4), swallow=False)


# --- on_error="raise" ---------------------------------------------------------------------------------------------


class Broken(StrategyBarrier):
    """A barrier at which the others do not arrive."""

    def __init__(self) -> None:
        super().__init__(lambda: None, lambda value: value)

    def wait(self, what: str) -> None:
        raise BarrierError(f"rank 0 waited 1 s for ranks [1] to {what} before the flush; they did not arrive")


class BrokenBarrierCallback(ChakraProfilerCallback):
    """Cannot meet the other ranks."""

    def _barrier(self, trainer: Trainer) -> Any:
        return Broken()


def _block(path: Path) -> None:
    """Make it impossible to have a folder there, also for root."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("not a folder")


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_recorder_fault(out: Path, tmp_path: Path, on_error: str) -> None:
    _block(tmp_path / "scratch")
    callback = {**SHORT, "dirpath": out, "scratch_dir": tmp_path / "scratch" / "below", "on_error": on_error}
    again = tmp_path / "again"
    result = fitting(callback, {}, Model(9), again=again)
    _check_told_once(result, on_error, "RuntimeError: rank 0, step 3: ", str(tmp_path / "scratch"), "not recorded")
    assert result["batches"] == (9 if on_error == "warn" else 3)
    check_clean(result, again)
    check_files(out, result, [], partial=False)


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_writer_fault(out: Path, tmp_path: Path, on_error: str) -> None:
    again = tmp_path / "again"
    callback = {**SHORT, "dirpath": out, "on_error": on_error, "scratch_dir": tmp_path / "scratch"}
    result = fitting(callback, {"callbacks": [Spoiler(out, 0)]}, Model(9), again=again)
    final = str(out / "pytorch_profile" / "rank-0.json.gz")
    _check_told_once(result, on_error, "RuntimeError: rank 0, steps 3-4: ", final, "not overwritten", "recover")
    assert Path(final).read_text() == "not a folder"
    check_clean(result, again)
    # what could not be published is kept where the message says
    (raw,) = (tmp_path / "scratch").rglob("rank-0.json")
    assert kineto_marks(load(raw)) == [3, 4]


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_barrier_fault(out: Path, tmp_path: Path, on_error: str) -> None:
    callback = BrokenBarrierCallback(**{**SHORT, "dirpath": out, "repeat": 0, "on_error": on_error})
    again = tmp_path / "again"
    result = fitting(callback, {}, Model(12), again=again)
    _check_told_once(result, on_error, "RuntimeError: rank 0 ", "export steps 3-4", "Nothing more is recorded")
    check_clean(result, again)
    assert files(out) == [f"step-00000003/{name}" for name in PAIR]  # recorded before, and kept
    check_pair(out / "step-00000003", 0, [3, 4])


def _check_told_once(result: dict[str, Any], on_error: str, begin: str, *parts: str) -> None:
    """One error that names all of it, or one warning that does."""
    if on_error == "raise":
        assert result["warnings"] == []
        message = result["error"]
    else:
        assert result["error"] is None
        (warning,) = result["warnings"]
        message = f"RuntimeError: {warning}"
    assert message.startswith(begin)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("faulty", [0, 1])
def test_raised_on_the_rank_that_has_it(out: Path, faulty: int, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    env = {"TMPDIR": str(scratch)}
    values = harness.succeed(harness.run(_raise_on_one_rank, out, faulty, ranks=2, env=env, timeout=LIMIT))
    assert [value["error"] is not None for value in values] == [rank == faulty for rank in range(2)]
    assert values[faulty]["error"].startswith(f"rank {faulty}, steps 3-4: ")
    assert [value["warnings"] for value in values] == [[], []]
    assert [value["batches"] for value in values] == [5, 5]
    # clean but for the raw file that could not be published and is kept; both ranks see it
    assert [value["offences"] for value in values] == [[f"scratch {name}" for name in os.listdir(scratch)]] * 2
    check_pair(out, 1 - faulty, [3, 4])


def _raise_on_one_rank(out: Path, faulty: int) -> dict[str, Any]:
    """The faulty rank cannot publish; it says so at the end of the training, where nobody waits for it any more."""
    callback = ChakraProfilerCallback(**{**SHORT, "dirpath": out, "on_error": "raise"})
    spoiler = Spoiler(out, faulty)
    error = None
    with recorded() as told:
        trainer = Trainer(
            **{**QUIET, "devices": 2, "strategy": "ddp", "max_steps": 5, "callbacks": [callback, spoiler]}
        )
        try:
            trainer.fit(Model(9))
        except RuntimeError as caught:
            error = str(caught)
        trainer.strategy.teardown()
    return {
        "error": error,
        "warnings": told,
        "offences": police.offences(process_group=False),
        "batches": trainer.fit_loop.epoch_loop.total_batch_idx + 1,
    }


class Spoiler(Callback):
    """Puts a file under the final name of a rank's Kineto trace before it is published."""

    def __init__(self, out: Path, rank: int) -> None:
        self.path = out / "pytorch_profile" / f"rank-{rank}.json.gz"
        self.rank = rank

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_rank == self.rank:
            _block(self.path)


def test_one_rank_of_two_raises(out: Path) -> None:
    """The other one fails in a collective of the training, as it would without us; neither waits for the other."""
    zero, one = harness.succeed(harness.run(_raise_on_rank_one, out, ranks=2, timeout=LIMIT))
    assert one["error"] == "tests.faults.trainings.Boom: in training_step at step 4"
    assert "Error" in zero["error"]
    assert "barrier" not in zero["error"]
    for rank, result in enumerate((zero, one)):
        assert result["warnings"] == []
        # the ranks share the temporary folder, and one may end before the other: the guard looks at it later
        assert [offence for offence in result["offences"] if not offence.startswith("scratch")] == []
        kineto, _ = check_pair(out, rank, [3, 4])
        assert kineto["lightning_chakra"]["partial"] is True


def _raise_on_rank_one(out: Path) -> dict[str, Any]:
    rank = int(os.environ["LOCAL_RANK"])
    return fit({**SHORT, "dirpath": out}, {"devices": 2, "strategy": "ddp"}, RaisesOnRankOne(rank))


class RaisesOnRankOne(Raises):
    """The same model on both ranks, and a fault on one."""

    def __init__(self, rank: int) -> None:
        super().__init__("training_step", 4 if rank == 1 else -1)

    def train_dataloader(self) -> Any:
        return Model.train_dataloader(self)
