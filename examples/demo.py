"""Train a small transformer on two CPU ranks, record two of its steps, and show what was written.

Run by ``make demo``. Lightning starts the second rank by running this file again.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_chakra import ChakraProfilerCallback

VOCABULARY, LENGTH, WIDTH = 1000, 64, 128


class TinyTransformer(LightningModule):
    """A next-token predictor on random tokens."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, batch_first=True)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross entropy of each next token; a batch is one int64 tensor of shape (batch, LENGTH + 1)."""
        (tokens,) = batch
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        logits = self.head(self.encoder(self.embedding(tokens[:, :-1]), mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """512 random sequences; Lightning shares them out among the ranks."""
        return DataLoader(TensorDataset(torch.randint(VOCABULARY, (512, LENGTH + 1))), batch_size=8)


def main() -> None:
    """Train, then let the command line of the package judge and sum up the traces."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="demo", help="folder for the traces")
    parser.add_argument("--devices", type=int, default=2, help="number of CPU ranks")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    profiler = ChakraProfilerCallback(arguments.output, collect_chakra=True)
    trainer = Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        strategy="ddp",
        max_steps=15,
        callbacks=[profiler],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(TinyTransformer())
    if trainer.global_rank == 0:
        folder = Path(profiler.traces[0].path).parents[1]
        for file in sorted(folder.glob("*/rank-*.json.gz")):
            print(f"{file.stat().st_size / 1e6:6.2f} MB  {file}")
        for command in ("check", "summary"):
            subprocess.run([sys.executable, "-m", "lightning_chakra.cli", command, str(folder)], check=True)


if __name__ == "__main__":
    main()
