"""What the figures share: arguments, models, quiet fits, and tables."""

import argparse
import contextlib
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "3")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

KINETO_SHARE = 0.23
"""Share of the Kineto file in a raw pair of both kinds, about; only the number of steps hangs on it."""


def arguments(description: str | None, **extra: Any) -> argparse.Namespace:
    """The options of a figure. ``extra``: names and defaults of further ones."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each kind, of which the median is told")
    parser.add_argument("--quick", action="store_true", help="small and few: to see that it runs, not for figures")
    for name, default in extra.items():
        many = isinstance(default, tuple)
        kind = type(default[0] if many else default)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, nargs="+" if many else None)
    args, _ = parser.parse_known_args()  # `python -m benchmarks.flush` hands everything to everybody
    quiet()
    return args


def quiet() -> None:
    """Keep Lightning's and the callback's lines out of the tables."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning_chakra").setLevel(logging.ERROR)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)


def device(accelerator: str) -> torch.device:
    """Where the bare loops run."""
    return torch.device("cuda" if accelerator == "gpu" else "cpu")


class Tiny(LightningModule):
    """Many tiny operators: the worst case of every cost per operator.

    Args:
        layers: Linear layers of 8 x 8.
        batches: Batches in one epoch.
    """

    def __init__(self, layers: int = 600, batches: int = 20) -> None:
        super().__init__()
        self.batches = batches
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All layers, one after the other."""
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """A loss of no meaning."""
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        """One update for each parameter."""
        return torch.optim.SGD(self.parameters(), lr=1e-3, foreach=False)

    def train_dataloader(self) -> Any:
        """Random numbers."""
        return DataLoader(TensorDataset(torch.randn(4 * self.batches, 8)), batch_size=4)


class Transformer(nn.Module):
    """A transformer of ordinary width, some 9 million parameters; its input is the output of :meth:`batch`."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(512, 8, 1024, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The encoder's output."""
        return self.encoder(x)

    @staticmethod
    def batch() -> torch.Tensor:
        """Sequences of 128 tokens."""
        return torch.randn(8, 128, 512)


class Clock(Callback):
    """Times in seconds at which batches start; with the end of the fit, one more than batches."""

    def __init__(self, accelerator: str = "cpu") -> None:
        self.times: list[float] = []
        self._wait = torch.cuda.synchronize if accelerator == "gpu" else lambda: None

    def on_train_batch_start(self, *args: Any) -> None:
        """A batch starts."""
        self._wait()
        self.times.append(time.perf_counter())

    def fit_ended(self) -> None:
        """The fit has returned."""
        self._wait()
        self.times.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """From the start of each batch to that of the next one."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def fit(model: LightningModule, callbacks: Sequence[Callback], accelerator: str, **trainer: Any) -> Clock:
    """One quiet epoch; the clock runs before all other callbacks."""
    clock = Clock(accelerator)
    options = {
        "accelerator": accelerator,
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
        **trainer,
    }
    with contextlib.redirect_stdout(sys.stderr):  # torch and Lightning print there, in the middle of tables
        Trainer(callbacks=[clock, *callbacks], **options).fit(model)
    clock.fit_ended()
    return clock


def steps_for(megabytes: float, *, chakra: bool, layers: int, accelerator: str) -> int:
    """Active steps of :class:`Tiny` after which the raw files of a window together have this size."""
    from torch.profiler import profile

    model = Tiny(layers).to(device(accelerator))
    x = torch.randn(4, 8, device=device(accelerator))

    def step(optimizer: Any) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    optimizer = model.configure_optimizers()
    step(optimizer)
    with tempfile.TemporaryDirectory() as folder:
        with profile() as profiler:
            step(optimizer)
        profiler.export_chrome_trace(f"{folder}/one.json")
        size = os.path.getsize(f"{folder}/one.json") / 1e6
    return max(2, round(megabytes * (KINETO_SHARE if chakra else 1) / size))


def folder_size(folder: str) -> float:
    """Size of everything below ``folder``, in MB."""
    return sum(os.path.getsize(os.path.join(root, f)) for root, _, names in os.walk(folder) for f in names) / 1e6


def median(values: Sequence[float]) -> float:
    """The middle one."""
    return statistics.median(values)


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """The median with the range around it."""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def report(title: str, head: Sequence[str], rows: Sequence[Sequence[object]], accelerator: str, note: str = "") -> None:
    """Print a Markdown table and the machine it was made on."""
    print(f"\n### {title}\n")
    print("| " + " | ".join(head) + " |")
    print("|" + " --- |" * len(head))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")
    print(f"\n{note + ' ' if note else ''}{machine(accelerator)}", flush=True)


def machine(accelerator: str) -> str:
    """What it was measured on, and how busy that was with other things."""
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            name = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = f", {torch.cuda.get_device_name()}" if accelerator == "gpu" else ""
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"Machine: {name}, {cores} cores{gpu}; {platform.system()}, torch {torch.__version__}{load}."
