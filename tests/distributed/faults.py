"""The trainings of these tests, with one part of the callback replaced by a faulty one."""

import ctypes
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lightning_chakra import callback
from lightning_chakra.recording import barrier, opening, recorder
from lightning_chakra.recording.barrier import GlooBarrier
from lightning_chakra.recording.layout import RawWindow
from lightning_chakra.recording.observer import ExecutionTrace
from lightning_chakra.recording.private_torch import KinetoProfile
from lightning_chakra.recording.writer import TraceWriter
from tests import programs

# Steps 2 and 3 are recorded.
SCHEDULE: dict[str, Any] = {"wait": 1, "warmup": 1, "active": 2, "collect_chakra": True}


def rank() -> int:
    """Global rank; there is one rank per node, or one node."""
    if "RANK" in os.environ:
        return int(os.environ["RANK"])
    return int(os.environ["NODE_RANK"]) + int(os.environ["LOCAL_RANK"])


def _hold(marker: Path, seconds: float) -> None:
    """Take ``seconds`` with the GIL held, as torch's own export does, or until a file ``release`` lies beside."""
    marker.touch()
    until = time.monotonic() + seconds
    while time.monotonic() < until and not marker.with_name("release").exists():
        ctypes.PyDLL(None).usleep(100_000)


def _before_export(act: Callable[[], None]) -> None:
    class Slow(KinetoProfile):  # type: ignore[misc]
        def export_chrome_trace(self, path: str) -> Any:
            act()
            return super().export_chrome_trace(path)

    recorder.KinetoProfile = Slow


def slow_kineto(marker: Path, seconds: float) -> None:
    """Exporting the Kineto trace takes ``seconds`` longer; ``marker`` appears when it begins."""

    _before_export(lambda: _hold(marker, seconds))


def deaf_kineto(marker: Path, seconds: float) -> None:
    """Exporting takes ``seconds`` longer in one call, in the middle of which no Python handler of a signal can run."""

    def hold() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # one would end the call early
        marker.touch()
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())

    _before_export(hold)


def slow_execution_trace(marker: Path, seconds: float) -> None:
    """Finishing the execution trace takes ``seconds`` longer."""

    class Slow(ExecutionTrace):
        def close(self) -> None:
            _hold(marker, seconds)
            super().close()

    recorder.ExecutionTrace = Slow  # type: ignore[misc]


def slow_writer(marker: Path, seconds: float) -> None:
    """Publishing takes ``seconds`` longer, without the GIL."""

    class Slow(TraceWriter):
        def _publish_window(self, window: RawWindow) -> None:
            marker.touch()
            time.sleep(seconds)
            super()._publish_window(window)

    opening.TraceWriter = Slow  # type: ignore[misc]


def told_barrier(marker: Path | None) -> None:
    """Print each collective of the barrier when it is entered, and leave a file beside ``marker`` at a wait."""

    class Told(GlooBarrier):
        def wait(self, what: str) -> None:
            print("COLLECTIVE wait", what, flush=True)
            if marker is not None:
                marker.with_name(f"waiting-{rank()}").touch()
            super().wait(what)

        def _reduce(self, values: list[int], operation: Any) -> list[int]:
            print("COLLECTIVE reduce", flush=True)
            return super()._reduce(values, operation)

    callback.GlooBarrier = Told  # type: ignore[misc]


class Raises(programs.Model):
    """Raises on one rank in the middle of the window."""

    def __init__(self, on: int) -> None:
        super().__init__(8)
        self.on = on

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3 and rank() == self.on:
            print("RAISING", flush=True)
            raise ArithmeticError("the model's own error")
        return super().training_step(batch, batch_idx)


class Sharded(programs.Model):
    """Sharded with FSDP2."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])


class AnswersUsr1(programs.Model):
    """Answers SIGUSR1 with a collective of the training, as Lightning does under SLURM before it requeues a job."""

    def on_train_start(self) -> None:
        signal.signal(signal.SIGUSR1, self._answer)

    def _answer(self, *_: Any) -> None:
        print("ANSWERING", flush=True)
        self.trainer.strategy.barrier("requeue")
        print("ANSWERED", flush=True)


class MeetsAtTheEnd(Callback):
    """Enters a collective of the training when that ends, as saving a last checkpoint does."""

    def on_fit_end(self, trainer: Any, *args: Any) -> None:  # after on_train_end of all callbacks
        trainer.strategy.barrier("last checkpoint")


def train(
    arguments: dict[str, Any],
    *,
    ranks: int = 2,
    batches: int = 8,
    group_timeout: float = 5,
    slow: Callable[[Path, float], None] | None = None,
    slow_rank: int = 0,
    seconds: float = 14,
    marker: Path | None = None,
    model: Callable[[int], Any] = programs.Model,
    num_nodes: int = 1,
    sharded: bool = False,
) -> dict[str, Any]:
    """A fit on a training group with a short timeout, one rank of which has a slow part."""
    torch.set_num_threads(1)
    if slow is not None and rank() == slow_rank:
        assert marker is not None
        slow(marker, seconds)
    if callback.GlooBarrier is GlooBarrier:  # not replaced by a faulty one
        told_barrier(marker)
    common: dict[str, Any] = {"process_group_backend": "gloo", "timeout": timedelta(seconds=group_timeout)}
    strategy: Any = ModelParallelStrategy(**common) if sharded else DDPStrategy(**common)
    trainer = {"devices": ranks // num_nodes, "num_nodes": num_nodes, "strategy": strategy}
    trainer |= {"callbacks": [MeetsAtTheEnd()], "limit_train_batches": batches}
    return programs.train({**SCHEDULE, **arguments}, trainer, (Sharded if sharded else model)(batches))


def train_in_namespace(arguments: dict[str, Any], **fit: Any) -> dict[str, Any]:
    """:func:`train` in the network namespace named by ``NETWORK``."""
    with open(os.environ["NETWORK"]) as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), "setns")
    return train(arguments, **fit)


def train_unlike(arguments: list[dict[str, Any]]) -> dict[str, Any]:
    """A fit for which each rank has arguments of its own."""
    return train(arguments[rank()], group_timeout=30)


def train_without_agreement(arguments: dict[str, Any], part: str) -> dict[str, Any]:
    """A fit in the setup of which one part fails on rank 1 only."""

    def fail(*_: Any) -> Any:
        raise OSError("injected")

    if part == "group":
        barrier._TALK_TIMEOUT = 3.0
    if rank() == 1:
        if part == "group":
            callback.GlooBarrier = fail  # type: ignore[assignment,misc]
        else:
            opening.storage.entries = fail
    return train(arguments, group_timeout=30)


def _group(timeout: float) -> GlooBarrier:
    os.environ["RANK"], os.environ["WORLD_SIZE"] = os.environ["LOCAL_RANK"], os.environ["RANKS"]
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    return GlooBarrier(timeout)


def meet_once(folder: Path) -> str:
    """Wait at a first barrier, to which rank 2 never comes; what the barrier says."""
    meeting = _group(600)
    (folder / f"ready-{rank()}").touch()
    if rank() == 2:
        signal.pause()
    try:
        meeting.wait("export step 1")
    except barrier.BarrierError as error:
        return str(error)
    finally:
        meeting.close()
    return "passed"


def _own() -> tuple[int, int]:
    """TCP sockets and threads of this process, those of C++ among them.

    Other sockets come and go: the server of the store looks up the name of each client.
    """
    descriptors = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    links = {os.readlink(path) for path in descriptors if os.path.islink(path)}
    tables = [Path("/proc/self/net", table).read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
    tcp = {f"socket:[{line.split()[9]}]" for table in tables for line in table}
    return len(links & tcp), len(os.listdir("/proc/self/task"))


def open_and_close() -> dict[str, tuple[int, int]]:
    """Sockets and threads before, during and after the life of a barrier."""
    first = _group(60)
    torch.distributed.barrier()  # the default group has all it will ever have
    first.close()
    torch.distributed.barrier()
    before = _settled()
    torch.distributed.barrier()
    meeting = GlooBarrier(60)
    meeting.maximum(1)
    meeting.wait("export step 1")
    during = _own()
    torch.distributed.barrier()
    meeting.close()
    torch.distributed.barrier()
    return {"before": before, "during": during, "after": _settled()}


def _settled() -> tuple[int, int]:
    """:func:`_own` once it rests: the server of the store drops a connection a moment after its other end did."""
    last = _own()
    while True:
        time.sleep(0.5)  # no event tells when a server of C++ has closed its end
        if last == (last := _own()):
            return last


if __name__ == "__main__":
    # One rank of torchrun: the folder for traces, values and the marker.
    root = Path(sys.argv[1])
    result = train(
        {"dirpath": root / "out", "profile_ranks": [0]},
        num_nodes=2,
        slow=slow_kineto,
        marker=root / "marker",
    )
    (root / f"{rank()}.value").write_bytes(pickle.dumps(result))
