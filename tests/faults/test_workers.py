"""Loaders whose worker processes start inside the window."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.faults.trainings import SHORT, check_clean, check_files, fitting
from tests.programs import Model
from tests.reading import check_pair


class Marked(Dataset):
    """Runs an operator that nothing else runs, so that a node of a worker would be seen."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((32,), float(index)).erfinv().nan_to_num(0.0, 0.0, 0.0)


class Workers(Model):
    """Epochs of two batches from two workers, so that an epoch begins in the middle of the window."""

    def __init__(self, **loader: Any) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> Any:
        return DataLoader(Marked(), num_workers=2, **self.loader)


class Endless(Model):
    """The same from a stream, whose workers are still busy when the fit stops."""

    def train_dataloader(self) -> Any:
        return DataLoader(MarkedStream(), num_workers=2, prefetch_factor=2)


class MarkedStream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield Marked()[0]


WINDOW = {**SHORT, "wait": 1, "active": 4}  # steps 2 to 5: the workers of the second and third epoch start in it


def check_no_foreign_node(out: Path, steps: list[int]) -> None:
    kineto, et = check_pair(out, 0, steps)  # node ids are unique, and every node has its Kineto event
    names = {node["name"] for node in et["nodes"]} | {str(event.get("name")) for event in kineto["traceEvents"]}
    assert "aten::addmm" in names
    assert "aten::erfinv" not in names
    assert len([node for node in et["nodes"] if "[pytorch|profiler|execution_trace|process]" in node["name"]]) == 1


@pytest.mark.parametrize(
    "loader",
    [
        {},
        {"persistent_workers": True},
        pytest.param({"multiprocessing_context": "spawn"}, id="spawn"),
        pytest.param({"multiprocessing_context": "spawn", "persistent_workers": True}, id="spawn persistent"),
    ],
)
def test_workers_started_in_the_window(out: Path, tmp_path: Path, loader: dict[str, Any]) -> None:
    result = fitting({**WINDOW, "dirpath": out}, {"max_epochs": 3}, Workers(**loader))
    assert (result["error"], result["batches"], result["warnings"]) == (None, 6, [])
    check_clean(result)
    check_files(out, result, [2, 3, 4, 5], partial=False)
    check_no_foreign_node(out, [2, 3, 4, 5])


def test_workers_that_outlive_the_window(out: Path) -> None:
    result = fitting({**SHORT, "dirpath": out}, {"max_steps": 7}, Endless())
    assert (result["error"], result["batches"], result["warnings"]) == (None, 7, [])
    check_clean(result)
    check_no_foreign_node(out, [3, 4])
