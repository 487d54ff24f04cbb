"""Trainings whose batch hooks do not come in pairs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from tests.faults.trainings import SHORT, check_clean, check_files, fitting
from tests.programs import Model


class SkipsRestOfEpoch(Model):
    """Ends each epoch at a batch, from the hook that has no counterpart then."""

    def __init__(self, batches: int, skip: int) -> None:
        super().__init__(batches)
        self.skip = skip

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.skip else None


class Gaps(Model):
    """Its loader yields ``None`` in some places."""

    def __init__(self, batches: int, gaps: tuple[int, ...]) -> None:
        super().__init__(batches)
        self.gaps = gaps

    def train_dataloader(self) -> Any:
        def collate(indices: list[int]) -> torch.Tensor | None:
            return None if indices[0] in self.gaps else torch.randn(1, 32)

        return DataLoader(range(self.batches), collate_fn=collate)


class NoLoss(Model):
    """Skips the optimization of some batches."""

    def __init__(self, batches: int, without: tuple[int, ...]) -> None:
        super().__init__(batches)
        self.without = without

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in self.without else super().training_step(batch, batch_idx)


class StopsAt(Callback):
    """Ends the training in a hook of a batch."""

    def __init__(self, batch: int, hook: str) -> None:
        self.batch = batch
        self.hook = hook

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._stop(trainer, "start", batch_idx)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._stop(trainer, "end", batch_idx)

    def _stop(self, trainer: Trainer, hook: str, batch_idx: int) -> None:
        if (hook, batch_idx) == (self.hook, self.batch):
            trainer.should_stop = True


@pytest.mark.parametrize(
    ("trainer", "model", "steps", "partial", "batches"),
    [
        # the step that the hook opened goes on with the next epoch, or has a mark and no batch if there is none
        ({"max_epochs": 4}, SkipsRestOfEpoch(4, 2), [3, 4], False, 8),
        ({"max_epochs": 4}, SkipsRestOfEpoch(4, 1), [3, 4], True, 4),
        ({}, SkipsRestOfEpoch(9, 4), [3, 4], True, 4),
        ({}, Gaps(9, (0, 3, 5)), [3, 4], False, 9),
        ({"accumulate_grad_batches": 2}, Gaps(12, (1, 6)), [3, 4], False, 12),
        ({}, Gaps(5, (4,)), [3], True, 5),
        ({}, NoLoss(9, (1, 3, 4)), [3, 4], False, 9),
        ({"accumulate_grad_batches": 3, "max_epochs": 2}, Model(7), [3, 4], False, 14),
    ],
)
def test_hooks_without_a_counterpart(
    out: Path, trainer: dict[str, Any], model: Model, steps: list[int], partial: bool, batches: int
) -> None:
    result = fitting({**SHORT, "dirpath": out}, trainer, model)
    assert result["error"] is None
    assert result["batches"] == batches
    assert result["warnings"] == []
    check_clean(result)
    check_files(out, result, steps, partial=partial)


@pytest.mark.parametrize("first", [True, False], ids=["before ours", "after ours"])
@pytest.mark.parametrize("hook", ["start", "end"])
def test_training_stopped_inside_the_window(out: Path, first: bool, hook: str) -> None:
    stopper = StopsAt(3, hook)
    more = {"before": [stopper]} if first else {}
    result = fitting({**SHORT, "dirpath": out}, {"callbacks": [] if first else [stopper]}, Model(9), **more)
    assert result["batches"] == 4
    assert result["warnings"] == []
    check_clean(result)
    check_files(out, result, [3], partial=True)


def test_recording_changes_no_weight(out: Path) -> None:
    results = [fitting({**SHORT, "wait": wait, "dirpath": out / str(wait)}, {}, Seeded(9)) for wait in (2, 100)]
    assert [result["error"] for result in results] == [None, None]
    assert results[0]["weights"] == results[1]["weights"]
    assert [result["global_step"] for result in results] == [9, 9]


class Seeded(Model):
    """Starts from the same weights every time."""

    def configure_model(self) -> None:
        torch.manual_seed(1)
        self.layer.reset_parameters()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        # drawn during the steps too: a recorder that draws random numbers would be noticed
        return super().training_step(batch + torch.randn_like(batch), batch_idx)
