"""Fits of every length around the first window: no trace and one warning, a partial pair, or exactly the window."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, Timer
from lightning.pytorch.demos.boring_classes import RandomDataset
from torch.utils.data import DataLoader

from tests.faults.trainings import SHORT, Unsized, check_clean, check_files, fitting
from tests.programs import Model


class Stream(Model):
    """Its length is not known before it ends."""

    def train_dataloader(self) -> Any:
        return DataLoader(Unsized(self.batches))


class Growing(Model):
    """Each epoch is longer than the one before."""

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 2 + 4 * self.trainer.current_epoch))


class OutOfTime(Callback):
    """Puts the clock of ``max_time`` forward in the middle of a batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            (timer,) = (callback for callback in trainer.callbacks if isinstance(callback, Timer))
            timer._offset = 1e9


def check_too_short(result: dict[str, Any], text: str) -> None:
    (warning,) = result["warnings"]
    assert "no trace" in warning
    assert "wait=2, warmup=1, active=2 needs 5 steps" in warning
    assert text in warning


class RawOptimizer(Model):
    """Steps an optimizer that Lightning knows nothing of."""

    def __init__(self, batches: int) -> None:
        super().__init__(batches)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.loss(self.layer(batch)))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layer.parameters(), lr=0.01)


@pytest.mark.parametrize("batches", [6, 31, 32, 40])
def test_raw_optimizers_are_told_the_way_out(out: Path, batches: int) -> None:
    result = fitting({**SHORT, "dirpath": out}, {}, RawOptimizer(batches))
    (warning,) = result["warnings"]
    assert f"no step in {min(batches, 32)} batches" in warning
    assert 'step_unit="batch"' in warning
    check_files(out, result, [], partial=False)
    check_clean(result)


def test_raw_optimizers_with_batches_as_steps(out: Path) -> None:
    result = fitting({**SHORT, "dirpath": out, "step_unit": "batch"}, {}, RawOptimizer(6))
    assert result["warnings"] == []
    check_files(out, result, [3, 4], partial=False)


@pytest.mark.parametrize("batches", range(8))
def test_ladder(out: Path, batches: int) -> None:
    result = fitting({**SHORT, "dirpath": out}, {}, Model(batches))
    assert result["batches"] == batches
    check_clean(result)
    if batches < 4:
        check_files(out, result, [], partial=False)
        check_too_short(result, "this fit will have at most" if batches else "this fit had 0")
    else:
        check_files(out, result, [3, 4][: batches - 3], partial=batches == 4)
        assert result["warnings"] == []


@pytest.mark.parametrize(
    ("trainer", "model", "steps", "text"),
    [
        ({"max_epochs": 2}, Model(3), [3, 4], None),
        ({"max_epochs": 2}, Model(2), [3], None),
        ({"max_steps": 3}, Model(9), [], "will have at most 3"),
        ({"max_epochs": 1}, Stream(3), [], "this fit had 3"),
        ({"max_epochs": 1}, Stream(4), [3], None),
        ({"max_epochs": 2}, Stream(3), [3, 4], None),
        ({"fast_dev_run": True}, Model(9), [], "will have at most 1"),
        ({"fast_dev_run": 5}, Model(9), [3, 4], None),
        ({"max_time": {"hours": 1}, "max_epochs": -1, "callbacks": [OutOfTime(2)]}, Model(9), [], "this fit had 3"),
        ({"max_time": {"hours": 1}, "callbacks": [OutOfTime(3)]}, Model(9), [3], None),
        ({"accumulate_grad_batches": 2}, Model(6), [], "will have at most 3"),
        ({"accumulate_grad_batches": 2}, Model(7), [3], None),
        ({"accumulate_grad_batches": 4, "max_epochs": 5}, Model(5), [3, 4], None),
        ({"callbacks": [GradientAccumulationScheduler({0: 4, 1: 1})], "max_epochs": 2}, Model(4), [3, 4], None),
        ({"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}, Growing(), [3, 4], None),
    ],
)
def test_other_ways_to_end(
    out: Path, trainer: dict[str, Any], model: Model, steps: list[int], text: str | None
) -> None:
    result = fitting({**SHORT, "dirpath": out}, trainer, model)
    check_clean(result)
    check_files(out, result, steps, partial=len(steps) == 1)
    if text is None:
        assert result["warnings"] == []
    else:
        check_too_short(result, text)


def test_batches_are_counted_when_they_are_the_unit(out: Path) -> None:
    callback = {**SHORT, "dirpath": out, "step_unit": "batch"}
    result = fitting(callback, {"accumulate_grad_batches": 4}, Model(4))
    check_clean(result)
    check_files(out, result, [3], partial=True)
    assert result["warnings"] == []


def test_second_window_cut_short_does_not_touch_the_first(out: Path) -> None:
    result = fitting({**SHORT, "dirpath": out, "repeat": 2}, {}, Model(9))
    check_clean(result)
    spans = [(t["first_step"], t["last_step"], t["partial"]) for t in result["traces"]]
    assert spans == [(3, 4, False)] * 2 + [(8, 8, True)] * 2
