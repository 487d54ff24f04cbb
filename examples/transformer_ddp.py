"""Train a small transformer with DDP and record two of its steps, on two CPU ranks or on the GPUs of a cluster.

python transformer_ddp.py                       # Lightning starts the second rank by running this file again
python transformer_ddp.py --accelerator gpu --devices 8 --ranks 0
torchrun.sh and slurm.sh start it on several machines.
"""

import argparse
from collections.abc import Sequence
from typing import Any

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
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross entropy of each next token; a batch is one int64 tensor of shape (batch, LENGTH + 1)."""
        (tokens,) = batch
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=tokens.device)
        logits = self.head(self.encoder(self.embedding(tokens[:, :-1]), mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """512 random sequences; Lightning shares them out among the ranks."""
        return DataLoader(TensorDataset(torch.randint(VOCABULARY, (512, LENGTH + 1))), batch_size=8)


def parse_arguments(description: str | None, output: str, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line that these examples share; ``output`` is the default folder for the traces."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default=output, help="folder for the traces, or a URL such as s3://bucket/traces")
    parser.add_argument("--ranks", default="", help='ranks to profile, such as "0-255:8"; default: all')
    parser.add_argument("--scratch", help="local folder for raw files; default: the system's temporary folder")
    parser.add_argument("--accelerator", default="cpu", help="cpu or gpu")
    parser.add_argument("--devices", type=int, default=2, help="ranks on each machine")
    parser.add_argument("--nodes", type=int, default=1, help="machines")
    return parser.parse_args(arguments)


def train(model: LightningModule, options: argparse.Namespace, strategy: Any = "ddp") -> ChakraProfilerCallback:
    """Train for 15 steps and record global steps 10 and 11."""
    torch.set_num_threads(1)
    profiler = ChakraProfilerCallback(
        options.output, profile_ranks=options.ranks, collect_chakra=True, scratch_dir=options.scratch
    )
    Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.nodes,
        strategy=strategy,
        max_steps=15,
        callbacks=[profiler],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    ).fit(model)
    return profiler


if __name__ == "__main__":
    for trace in train(TinyTransformer(), parse_arguments(__doc__, "traces")).traces:
        print(f"{trace.kind}: steps {trace.first_step}-{trace.last_step}, {trace.bytes} bytes, {trace.path}")
