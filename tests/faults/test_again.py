"""The same callback in several fits, in other runs of the trainer, in copies and in checkpoints."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import RandomDataset
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from lightning_chakra import ChakraProfilerCallback
from tests import police
from tests.faults.trainings import PAIR, SHORT, Boom, fit, outcome, recorded
from tests.programs import QUIET, Model
from tests.reading import check_pair, files


class Tuned(Model):
    """What the tuner needs: a learning rate and a batch size to change."""

    def __init__(self, batches: int = 12) -> None:
        super().__init__(batches)
        self.lr = 0.01
        self.batch_size = 1

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 32), batch_size=self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class RaisesIn(Model):
    """Raises in a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 4:
            raise Boom("in a step")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("fails", [False, True], ids=["whole", "failed"])
def test_second_fit_of_the_same_callback(out: Path, fails: bool) -> None:
    first, second = outcome(out, fails, program=_fit_twice)
    assert (first["error"] is not None) is fails
    assert second["error"] is None
    assert [result["offences"] for result in (first, second)] == [[], []]
    assert [result["warnings"] for result in (first, second)] == [[], []]
    # the traces of the first one are not overwritten, and the list names all
    assert files(out) == [*PAIR, *(f"run-1/{name}" for name in PAIR)]
    kineto, _ = check_pair(out, 0, [3, 4])
    assert kineto["lightning_chakra"]["partial"] is fails
    check_pair(out / "run-1", 0, [3, 4])
    assert len(second["traces"]) == 4
    assert second["traces"][:2] == first["traces"]


def _fit_twice(out: Path, fails: bool) -> Any:
    callback = ChakraProfilerCallback(**{**SHORT, "dirpath": out})
    return fit(callback, {}, RaisesIn() if fails else Model(8)), fit(callback, {}, Model(8))


def test_fit_that_goes_on_counts_its_steps_from_its_start(out: Path) -> None:
    """The same trainer, trained for longer: marks carry the global step, the schedule counts anew."""
    assert outcome(out, program=_fit_on) == (None, [])
    check_pair(out, 0, [3, 4])
    check_pair(out / "run-1", 0, [9, 10])


def _fit_on(out: Path) -> Any:
    with recorded() as told:
        trainer = Trainer(**QUIET, callbacks=[ChakraProfilerCallback(**{**SHORT, "dirpath": out})])
        model = Model(6)
        trainer.fit(model)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model)
    return None, told + police.offences()


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_nothing_happens_without_a_fit(out: Path, verb: str) -> None:
    assert outcome(out, verb, program=_evaluate) == []
    assert not out.exists()


def _evaluate(out: Path, verb: str) -> list[str]:
    with recorded() as told:
        callback = ChakraProfilerCallback(**{**SHORT, "wait": 0, "warmup": 0, "dirpath": out})
        trainer = Trainer(**{**QUIET, "limit_val_batches": 3}, callbacks=[callback])
        getattr(trainer, verb)(Model())
    return told + police.offences() + [str(trace) for trace in callback.traces]


@pytest.mark.parametrize("how", ["Tuner.lr_find", "Tuner.scale_batch_size", "LearningRateFinder", "BatchSizeFinder"])
def test_steps_of_the_tuner_are_not_recorded(out: Path, how: str) -> None:
    between, told = outcome(out, how, program=_tune)
    assert between == []  # the tuner alone left and said nothing
    assert told == []
    assert files(out) == PAIR
    kineto, _ = check_pair(out, 0, [3, 4])
    assert kineto["lightning_chakra"]["partial"] is False


def _tune(out: Path, how: str) -> Any:
    callback = ChakraProfilerCallback(**{**SHORT, "dirpath": out})
    finders: list[Callback] = {
        "LearningRateFinder": [LearningRateFinder(num_training_steps=8, update_attr=True)],
        "BatchSizeFinder": [BatchSizeFinder(max_trials=2, steps_per_trial=8)],
    }.get(how, [])
    model = Tuned()
    between = []
    with recorded() as told:
        options = {**QUIET, "max_epochs": 3, "limit_val_batches": 1}
        trainer = Trainer(**options, callbacks=[callback, *finders])
        if how == "Tuner.lr_find":
            Tuner(trainer).lr_find(model, num_training=8)
        if how == "Tuner.scale_batch_size":
            Tuner(trainer).scale_batch_size(model, max_trials=2, steps_per_trial=8)
        if not finders:
            between = [*police.offences(), *told, *files(out), *(str(trace) for trace in callback.traces)]
        trainer.fit(model)
    return between, told + police.offences()


class Copies(Callback):
    """Copies the callback in the middle of a fit."""

    def __init__(self, callback: ChakraProfilerCallback, batch: int) -> None:
        self.callback = callback
        self.batch = batch
        self.copies: list[ChakraProfilerCallback] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            self.copies = copies(self.callback)


def copies(callback: ChakraProfilerCallback) -> list[ChakraProfilerCallback]:
    return [copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))]


def test_copies_before_during_and_after_a_fit(out: Path) -> None:
    """A copy is idle, has the same arguments, and records a fit of its own; the original does not notice."""
    results = outcome(out, program=_copy)
    assert results["problems"] == []
    assert results["copies"] == 8
    check_pair(out, 0, [3, 4])
    for run in range(1, 4):
        check_pair(out / f"run-{run}", 0, [3, 4])
    assert not (out / "run-4").exists()


def _copy(out: Path) -> dict[str, Any]:
    callback = ChakraProfilerCallback(**{**SHORT, "dirpath": out})
    made = copies(callback)
    during = []
    problems: list[Any] = []
    for batch in (2, 4):  # prepared; recording
        copier = Copies(callback, batch)
        result = fit(callback, {"callbacks": [copier]}, Model(8))
        problems += [*result["warnings"], *result["offences"]]
        during += copier.copies
    made += during + copies(callback)
    arguments = vars(ChakraProfilerCallback(**{**SHORT, "dirpath": out}))
    for other in made:
        if {**vars(other), "_traces": []} != arguments:  # the model is reachable from none of them
            problems.append(f"differs: {vars(other)}")
    for other in (made[0], during[-1]):
        result = fit(other, {}, Model(8))
        problems += [*result["warnings"], *result["offences"]]
    return {"problems": problems, "copies": len(made)}


def test_checkpoint_holds_nothing_of_ours(out: Path, tmp_path: Path) -> None:
    path = tmp_path / "checkpoints"
    assert outcome(out, path, program=_checkpoint)[0] == []
    for file in path.glob("*.ckpt"):
        content = torch.load(file, weights_only=True)
        assert not [key for key in content["callbacks"] if "Chakra" in key]
    check_pair(out, 0, [3, 4])
    check_pair(out / "run-1", 0, [8, 9])


def _checkpoint(out: Path, path: Path) -> Any:
    """Save one in the middle of the window, and train on from it."""
    saver = ModelCheckpoint(path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trainer = {"enable_checkpointing": True, "callbacks": [saver]}
    first = fit({**SHORT, "dirpath": out}, trainer, Model(8))
    last = str(path / "step=5.ckpt")
    second = fit({**SHORT, "dirpath": out}, {"max_epochs": 2}, Model(8), ckpt_path=last)
    third = fit({**SHORT, "dirpath": out}, {"max_steps": 5}, Model(8), ckpt_path=last)
    expected = "no trace: the schedule skip_first=0, wait=2, warmup=1, active=2 needs 5 steps, this fit had 0. "
    problems = [*first["warnings"], *second["warnings"], first["error"], second["error"], third["error"]]
    problems += [*first["offences"], *second["offences"], *third["offences"]]
    problems += [text for text in third["warnings"] if not text.startswith(expected)]
    if len(third["warnings"]) != 1:
        problems.append(third["warnings"])
    return [problem for problem in problems if problem], None
