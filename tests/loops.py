"""Loops without a Trainer that the tests run, in this process or as ranks."""

import dataclasses
import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from lightning_chakra import profile_window
from tests import police
from tests.distributed.faults import slow_kineto
from tests.faults.trainings import SHORT


def group(timeout: float = 20) -> int:
    """Join the process group if this is one of several ranks; the rank."""
    if "MASTER_ADDR" in os.environ:
        os.environ["RANK"], os.environ["WORLD_SIZE"] = os.environ["LOCAL_RANK"], os.environ["RANKS"]
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        return torch.distributed.get_rank()
    return 0


def plain(arguments: dict[str, Any], *, steps: int = 8, raise_in: int = -1, **group_options: float) -> dict[str, Any]:
    """A plain loop. The window is built before there is a process group."""
    torch.set_num_threads(1)
    window = profile_window(**{**SHORT, **arguments})
    rank = group(**group_options)
    model: Any = torch.nn.Linear(32, 2)
    if torch.distributed.is_initialized():
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with window:
            for step in range(steps):
                model(torch.randn(4, 32)).sum().backward()
                if step == raise_in:
                    raise ArithmeticError("the loop's own error")
                optimizer.step()
                optimizer.zero_grad()
                window.step()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return {
        "rank": rank,
        "traces": [dataclasses.asdict(trace) for trace in window.traces],
        "warnings": [str(warning.message) for warning in caught],
        "offences": police.offences(),
    }


def slow(arguments: dict[str, Any], marker: Path, seconds: float) -> dict[str, Any]:
    """A plain loop on a training group with a short timeout; the export of rank 0 takes longer than that."""

    if os.environ["LOCAL_RANK"] == "0":
        slow_kineto(marker, seconds)
    return plain(arguments, timeout=3)


def fabric(arguments: dict[str, Any], *, within: bool, accumulate: int = 1, batches: int = 8) -> dict[str, Any]:
    """Fabric, its hooks called around each batch; with the window entered as well, or with ``on_train_end``."""
    torch.set_num_threads(1)
    window = profile_window(**{**SHORT, **arguments})
    ranks = int(os.environ.get("RANKS", "1"))
    runner = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", callbacks=[window])
    runner.launch()
    model, optimizer = runner.setup(torch.nn.Linear(32, 2), torch.optim.SGD([torch.zeros(1)], lr=0.01))

    def loop() -> None:
        for index in range(batches):
            batch = torch.randn(4, 32)
            runner.call("on_train_batch_start", batch, index)
            runner.backward(model(batch).sum())
            if (index + 1) % accumulate == 0:
                optimizer.step()
            runner.call("on_train_batch_end", None, batch, index)
        runner.call("on_train_end")

    if within:
        with window:
            loop()
    else:
        loop()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return {
        "rank": runner.global_rank,
        "traces": [dataclasses.asdict(trace) for trace in window.traces],
        "offences": police.offences(),
    }
