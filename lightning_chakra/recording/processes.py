"""Where this process stands in its job, for those who have no trainer to ask: ``torch.distributed`` knows it."""

import os

import torch.distributed as dist

from lightning_chakra.recording import private_torch
from lightning_chakra.recording.barrier import FlushBarrier, GlooBarrier, StrategyBarrier
from lightning_chakra.recording.opening import Place


def place_here(barrier_timeout: float, strategy: str = "") -> Place:
    """This process as ``torch.distributed`` has it; the only one where no process group is.

    Args:
        barrier_timeout: Seconds a rank waits for the others.
        strategy: What the trace says of how the job is distributed; empty: that it is by ``torch.distributed``.

    Raises:
        RuntimeError: A launcher started several processes, and no process group is initialized yet.
    """
    grouped = dist.is_available() and dist.is_initialized()
    promised = os.environ.get("WORLD_SIZE", "1")
    if not grouped and promised != "1":
        raise RuntimeError(
            f"a launcher set WORLD_SIZE={promised}, and there is no process group yet: this process cannot know its "
            "rank. Call `torch.distributed.init_process_group()` (with Fabric: `fabric.launch()`) before."
        )
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)

    def make_barrier() -> FlushBarrier:
        return GlooBarrier(barrier_timeout) if world_size > 1 else StrategyBarrier(lambda: None, lambda value: value)

    return Place(
        global_rank=rank,
        world_size=world_size,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        ranks_here=int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1,
        strategy=strategy or ("torch.distributed" if grouped else "none"),
        make_barrier=make_barrier,
        all_agree=private_torch.all_agree if world_size > 1 else bool,
    )
