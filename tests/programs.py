"""Trainings that the tests run, in this process or as ranks."""

import dataclasses
import inspect
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from lightning_chakra import ChakraProfilerCallback
from tests import police

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
    "limit_val_batches": 0,
}
# A checkpoint of our own making may hold anything; Lightning asks since 2.6.
TRUSTED = {"weights_only": False} if "weights_only" in inspect.signature(Trainer.fit).parameters else {}


class Count(Callback):
    """Counts the batches that really ran."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1


class Model(BoringModel):
    """Small, with as many batches as asked for."""

    def __init__(self, batches: int = 14) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> Any:
        # DistributedSampler divides the samples among the ranks
        world_size = self.trainer.world_size if self._trainer is not None else 1
        return DataLoader(RandomDataset(32, self.batches * world_size))


class TwoOptimizers(Model):
    """Manual optimization; a batch moves the global step by two."""

    def __init__(self, batches: int = 14) -> None:
        super().__init__(batches)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            loss = self.loss(self.layer(batch))
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.layer.parameters(), lr=0.01) for _ in range(2)]


def train(
    callback: dict[str, Any],
    trainer: dict[str, Any] | None = None,
    model: LightningModule | None = None,
    **fit: Any,
) -> dict[str, Any]:
    """One quiet fit with the callback; what a test wants to know of it."""
    profiler = ChakraProfilerCallback(**callback)
    return train_with(profiler, trainer, model, **fit)


def train_with(
    profiler: ChakraProfilerCallback,
    trainer: dict[str, Any] | None = None,
    model: LightningModule | None = None,
    **fit: Any,
) -> dict[str, Any]:
    options = {**QUIET, **(trainer or {})}
    count = Count()
    options["callbacks"] = [*options.get("callbacks", []), profiler, count]
    lightning = Trainer(**options)
    began = time.monotonic()
    lightning.fit(model or Model(), **fit)
    seconds = time.monotonic() - began
    lightning.strategy.teardown()
    return {
        "batches": count.batches,
        "global_step": lightning.global_step,
        "rank": lightning.global_rank,
        "traces": [dataclasses.asdict(trace) for trace in profiler.traces],
        "offences": police.offences(process_group=False),
        "seconds": seconds,
    }
