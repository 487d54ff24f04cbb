"""One training of some gloo ranks with one planted cause of lateness."""

import gc
import os
import sys
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import record_function
from torch.utils.data import DataLoader, Dataset

from lightning_chakra import ChakraProfilerCallback

PLANTS = ("none", "data", "host", "more_work", "gc", "range", "wander")


class Rows(Dataset[torch.Tensor]):
    """Random rows; fetching the first of a batch may take ``delay`` seconds longer."""

    def __init__(self, delay: float) -> None:
        self.delay = delay

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.delay)
        return torch.randn(256)


class Model(LightningModule):
    """Linear layers; ``busy`` seconds of Python between operators, the body ``times`` as often."""

    def __init__(self, busy: float = 0.0, times: int = 1) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(8))
        self.busy = busy
        self.times = times

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Forward."""
        end = time.perf_counter() + self.busy
        while time.perf_counter() < end:
            pass
        x = batch
        for _ in range(self.times):
            for layer in self.layers:
                x = torch.relu(layer(x))
        return x.sum()

    def configure_optimizers(self) -> Any:
        """Plain descent."""
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Slow(Callback):
    """A callback that is slow in a range of its own, collects garbage, or sleeps on a rank that changes."""

    def __init__(self, plant: str, delay: float) -> None:
        self.plant = plant
        self.delay = delay
        self.garbage: list[Any] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Be slow."""
        if self.plant == "range":
            with record_function("slow_callback"):
                time.sleep(self.delay)
        elif self.plant == "wander" and trainer.global_step % trainer.world_size == trainer.global_rank:
            time.sleep(self.delay)
        elif self.plant == "gc":
            self.garbage = [[i] for i in range(int(self.delay * 5e5))]
            gc.collect()


def train(folder: str, plant: str, delay: float, ranks: int, victim: int = 1) -> None:
    """Train with ``plant`` on rank ``victim``, ``delay`` seconds a step, steps 10 to 17 recorded."""
    mine = int(os.environ["RANK"]) == victim
    torch.set_num_threads(1)
    rows = Rows(delay / 4 if plant == "data" and mine else 0.0)
    model = Model(delay if plant == "host" and mine else 0.0, 2 if plant == "more_work" and mine else 1)
    callbacks = [
        ChakraProfilerCallback(folder, wait=9, warmup=1, active=8),
        *([Slow(plant, delay)] if (plant in ("range", "gc") and mine) or plant == "wander" else []),
    ]
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp", max_steps=20, callbacks=callbacks, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(rows, batch_size=4))


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
