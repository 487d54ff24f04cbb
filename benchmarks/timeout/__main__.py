"""Two ranks, rank 0 profiled, a flush of several times the training group's timeout, three ways to go about it.

Prints a Markdown table: how each rank ended, how many batches it ran, which files are complete, what is left behind.
Nothing is slowed down: the flush takes long because many operators are recorded.
"""

import argparse
import contextlib
import gzip
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_chakra import ChakraProfilerCallback

SCHEMES = {
    "plain": "torch.profiler as Megatron-LM drives it",
    "barrier": "the same, then a barrier on the training group",
    "ours": "ChakraProfilerCallback",
}
RECORDED = 40  # steps; many short ones, since recording a long one would itself outlast the timeout
LATER = 5  # batches after the window


class Model(BoringModel):
    """A training step of many small operators."""

    def __init__(self, operators: int) -> None:
        super().__init__()
        self.operators = operators

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """A loss, after some work that only makes events."""
        number = torch.zeros(1)
        with torch.no_grad():
            for _ in range(self.operators):
                number.add_(1)
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        """More batches than are used."""
        return DataLoader(RandomDataset(32, 1000))


class PlainProfiler(Callback):
    """What Megatron-LM does: the profiled ranks step a `torch.profiler.profile`, whose handler writes both traces.

    Args:
        folder: Where the traces go.
        barrier: Whether all ranks then meet on the training group.
    """

    def __init__(self, folder: Path, barrier: bool) -> None:
        self.folder = folder
        self.barrier = barrier
        self.steps = 0
        self.profile: torch.profiler.profile | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start on rank 0."""
        if trainer.global_rank != 0:
            return
        for name in ("pytorch_profile", "chakra"):
            (self.folder / name).mkdir(parents=True)
        observer = torch.profiler.ExecutionTraceObserver()
        observer.register_callback(str(self.folder / "chakra" / "rank-0.json.gz"))
        self.profile = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=1, warmup=1, active=RECORDED, repeat=1),
            on_trace_ready=lambda p: p.export_chrome_trace(str(self.folder / "pytorch_profile" / "rank-0.json.gz")),
            execution_trace_observer=observer,
        )
        self.profile.start()

    def on_train_batch_end(self, *args: Any) -> None:
        """Step, which flushes at the end of the window."""
        self.steps += 1
        if self.profile is not None:
            self.profile.step()
        if self.barrier and self.steps == 2 + RECORDED:
            torch.distributed.barrier()

    def on_train_end(self, *args: Any) -> None:
        """Finish the execution trace."""
        if self.profile is not None:
            self.profile.stop()
            self.profile.execution_trace_observer.unregister_callback()


class Log(Callback):
    """Notes for the table what this rank got done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.batches = 0
        self.longest = 0.0
        self.last = time.monotonic()

    def on_train_batch_end(self, *args: Any) -> None:
        """Count."""
        self.batches += 1
        self._note()

    def on_exception(self, *args: Any) -> None:
        """The wait that ended in an error counts, too."""
        self._note()

    def _note(self) -> None:
        now = time.monotonic()
        self.longest, self.last = max(self.longest, now - self.last), now
        self.path.write_text(json.dumps({"batches": self.batches, "longest": self.longest}))


def train(scheme: str, folder: Path, operators: int, timeout: float) -> None:
    """One rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if scheme == "ours":
        profiler: Callback = ChakraProfilerCallback(
            folder / "out", profile_ranks=[0], wait=1, warmup=1, active=RECORDED, collect_chakra=True
        )
    else:
        profiler = PlainProfiler(folder / "out", barrier=scheme == "barrier")
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=timeout))
    Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=2 + RECORDED + LATER,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[profiler, Log(folder / f"rank-{os.environ['LOCAL_RANK']}.log")],
    ).fit(Model(operators))


def run(scheme: str, operators: int, timeout: float) -> str:
    """Both ranks of a scheme; its line of the table."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as probe:
        folder = Path(name)
        scratch = folder / "tmp"
        scratch.mkdir()
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        command = [sys.executable, "-m", "benchmarks.timeout", f"--operators={operators}", f"--timeout={timeout}"]
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TMPDIR": str(scratch)}
        ranks = []
        for rank in range(2):
            with open(folder / f"rank-{rank}.err", "wb") as err:
                ranks.append(
                    subprocess.Popen(
                        [*command, f"--rank-of={scheme}", f"--folder={folder}"],
                        env={**env, "LOCAL_RANK": str(rank), "NODE_RANK": "0"},
                        stdout=subprocess.DEVNULL,
                        stderr=err,
                    )
                )
        for process in ranks:
            process.wait(600)
        logs = [json.loads((folder / f"rank-{rank}.log").read_text()) for rank in range(2)]
        for rank, process in enumerate(ranks):
            lines = (folder / f"rank-{rank}.err").read_text(errors="replace").strip().splitlines()
            print(
                f"{scheme}, rank {rank}: exit {process.returncode}; {lines[-1][:180] if lines else ''}", file=sys.stderr
            )
        left = sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file())
        exits = ", ".join(str(process.returncode) for process in ranks)
        batches = ", ".join(f"{log['batches']} of {2 + RECORDED + LATER}" for log in logs)
        files = ", ".join(complete(folder / "out")) or "none"
        blocked = f"{logs[0]['longest']:.0f} s"
        return f"| {SCHEMES[scheme]} | {exits} | {batches} | {blocked} | {files} | {left / 1e6:.0f} MB |"


def complete(out: Path) -> list[str]:
    """The trace files that unpack to their end and close as a JSON object does; parsing takes too much memory."""
    names = []
    for path in sorted(out.rglob("*.json.gz")):
        with contextlib.suppress(OSError, EOFError), gzip.open(path) as file:
            tail = b""
            while piece := file.read(1 << 20):
                tail = (tail + piece)[-64:]
            if tail.rstrip().endswith(b"}"):
                names.append(f"`{path.relative_to(out)}`")
    return names


def main() -> None:
    """All schemes, or one rank of one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", type=int, default=4_000, help="small operators per step")
    parser.add_argument("--timeout", type=float, default=5, help="of the group that trains, in seconds")
    parser.add_argument("--rank-of", choices=SCHEMES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        train(options.rank_of, options.folder, options.operators, options.timeout)
        return
    print(
        f"Two ranks, rank 0 profiled, timeout of the training group {options.timeout:g} s; "
        f"{RECORDED} recorded steps of {options.operators} operators; torch {torch.__version__}, "
        f"{os.cpu_count()} cores.\n"
    )
    print("| scheme | exit of ranks 0, 1 | batches | rank 0 blocked | complete files | left in scratch |")
    print("| --- | --- | --- | --- | --- | --- |")
    for scheme in SCHEMES:
        print(run(scheme, options.operators, options.timeout), flush=True)


if __name__ == "__main__":
    main()
