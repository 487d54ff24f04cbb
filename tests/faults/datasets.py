"""Data sets of loader workers. Nothing but torch is imported here: a spawned worker loads all of this module."""

from collections.abc import Iterator

import torch
from torch.utils.data import Dataset


class Marked(Dataset):
    """Runs an operator that nothing else runs, so that a node of a worker would be seen."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        item = torch.full((32,), index / 4)
        for _ in range(100):  # more than what a worker would keep in a buffer and take with it
            item = item.erfinv().clamp(-0.5, 0.5)
        return item


class MarkedStream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield Marked()[0]
