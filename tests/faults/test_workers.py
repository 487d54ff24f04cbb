"""Loaders whose worker processes start inside the window."""

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.faults.datasets import Marked, MarkedStream
from tests.faults.trainings import SHORT, check_clean, check_files, fitting
from tests.programs import Model
from tests.reading import check_pair


class Workers(Model):
    """Epochs of two batches from workers, so that an epoch begins in the middle of the window."""

    def __init__(self, **loader: Any) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> Any:
        return DataLoader(Marked(), **self.loader)


class Endless(Model):
    """The same from a stream, whose workers are still busy when the fit stops."""

    def train_dataloader(self) -> Any:
        return DataLoader(MarkedStream(), num_workers=2, prefetch_factor=2, multiprocessing_context="fork")


WINDOW = {**SHORT, "wait": 1, "active": 4}  # steps 2 to 5: the workers of the second and third epoch start in it


def check_no_foreign_node(out: Path, steps: list[int]) -> None:
    kineto, et = check_pair(out, 0, steps)  # node ids are unique, and every node has its Kineto event
    names = {node["name"] for node in et["nodes"]} | {str(event.get("name")) for event in kineto["traceEvents"]}
    assert "aten::addmm" in names
    assert "aten::erfinv" not in names
    assert len([node for node in et["nodes"] if "[pytorch|profiler|execution_trace|process]" in node["name"]]) == 1


@pytest.mark.parametrize("persistent", [False, True], ids=["restarted", "persistent"])
def test_forked_workers(out: Path, persistent: bool) -> None:
    # named, because the processes that run the tests have another default than applications on Linux
    workers = Workers(num_workers=2, multiprocessing_context="fork", persistent_workers=persistent)
    result = fitting({**WINDOW, "dirpath": out}, {"max_epochs": 3}, workers)
    assert (result["error"], result["batches"], result["warnings"]) == (None, 6, [])
    check_clean(result)
    check_files(out, result, [2, 3, 4, 5], partial=False)
    check_no_foreign_node(out, [2, 3, 4, 5])


def test_spawned_workers(out: Path) -> None:
    """One at a time: it loads torch for seconds, and has no copy of anything of ours."""
    callback = {**WINDOW, "wait": 0, "active": 3, "dirpath": out}  # the second epoch begins with step 2
    result = fitting(callback, {"max_epochs": 2}, Workers(num_workers=1, multiprocessing_context="spawn"))
    assert (result["error"], result["batches"], result["warnings"]) == (None, 4, [])
    check_clean(result)
    check_no_foreign_node(out, [1, 2, 3])


def test_workers_that_outlive_the_window(out: Path) -> None:
    result = fitting({**SHORT, "dirpath": out}, {"max_steps": 7}, Endless())
    assert (result["error"], result["batches"], result["warnings"]) == (None, 7, [])
    check_clean(result)
    check_no_foreign_node(out, [3, 4])
