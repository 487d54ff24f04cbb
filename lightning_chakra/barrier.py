"""The barrier at which all ranks meet after the export and before the flush, on a group with its own timeout."""

import itertools
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lightning_chakra import private_torch
from lightning_chakra.messages import info
from lightning_chakra.ranks import format_ranks

_FIRST_NOTICE = 10.0
_NEXT_NOTICE = 60.0
_SLICE = timedelta(seconds=1)  # between two looks at pending signals
_SETUP_TIMEOUT = 120.0
_STORE_PATIENCE = 5.0

_generation = itertools.count()  # the same on every rank: all of them build their groups in the same order


class BarrierError(RuntimeError):
    """Not all ranks passed the barrier."""


class FlushBarrier(Protocol):
    """What the ranks of one fit agree on, and where they wait for each other's exports."""

    def wait(self, what: str) -> None:
        """Wait until all ranks are here; ``what`` says what they do before, such as "export steps 10-11".

        Raises:
            BarrierError: Some did not come in time, or are gone.
        """

    def maximum(self, value: int) -> int:
        """The largest ``value`` of all ranks."""

    def total(self, values: list[int]) -> list[int]:
        """The element-wise sums of ``values`` over all ranks."""

    def close(self) -> None:
        """Give the connections back. Not a collective."""


class StrategyBarrier:
    """For one process, and for strategies without ``torch.distributed``: the strategy's own barrier.

    Args:
        barrier: ``trainer.strategy.barrier``.
        broadcast: ``trainer.strategy.broadcast``; rank 0 decides where a sum or a maximum cannot be had.
    """

    def __init__(self, barrier: Callable[[], None], broadcast: Callable[[int], int]) -> None:
        self._barrier = barrier
        self._broadcast = broadcast

    def wait(self, what: str) -> None:
        """See :class:`FlushBarrier`."""
        self._barrier()

    def maximum(self, value: int) -> int:
        """See :class:`FlushBarrier`."""
        return self._broadcast(value)

    def total(self, values: list[int]) -> list[int]:
        """See :class:`FlushBarrier`."""
        return values

    def close(self) -> None:
        """See :class:`FlushBarrier`."""


class GlooBarrier:
    """A gloo group of its own beside the groups that train.

    The group that trains has the training's timeout, and whoever waits on it while another rank exports is killed by
    that timeout. This group has its own. It is not registered with ``torch.distributed``: it appears in no trace, and
    dropping it is not a collective. Its connections are made on first use, so a rank of a large job holds those few
    that the barrier's algorithm needs (two for each doubling of the number of ranks) and not one for each other rank.

    Args:
        timeout: Seconds a rank waits for the others.

    Raises:
        RuntimeError: The group could not be built on this rank.
    """

    def __init__(self, timeout: float) -> None:
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        self._timeout = timeout
        self._entered = 0
        self._group, self._store = private_torch.gloo_group(f"lightning_chakra/{next(_generation)}", timeout)

    def wait(self, what: str) -> None:
        """See :class:`FlushBarrier`. Says every now and then who is waited for."""
        self._arrive()
        began = time.monotonic()
        notice = _FIRST_NOTICE
        work = self._group.barrier()
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                if work.is_completed():
                    # The slice may have ended in the same moment as the barrier; without a timeout wait() tells which.
                    failure = _failure(work)
                    if failure is None:
                        return
                    raise BarrierError(self._explain(what, time.monotonic() - began, failure)) from error
            waited = time.monotonic() - began
            if waited >= notice:
                notice += _NEXT_NOTICE
                missing = self._missing()
                who = f"ranks [{format_ranks(missing)}]" if missing else "the other ranks"
                info(f"rank {self._rank} waits for {who} to {what}, {waited:.0f} s")

    def maximum(self, value: int) -> int:
        """See :class:`FlushBarrier`."""
        return self._reduce([value], dist.ReduceOp.MAX)[0]

    def total(self, values: list[int]) -> list[int]:
        """See :class:`FlushBarrier`."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def close(self) -> None:
        """See :class:`FlushBarrier`."""
        del self._group, self._store

    def _reduce(self, values: list[int], operation: Any) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        private_torch.reduce_in_place(self._group, tensor, operation, min(self._timeout, _SETUP_TIMEOUT))
        return [int(value) for value in tensor.tolist()]

    def _arrive(self) -> None:
        """Leave this rank's number in the store, for those who want to know whom they wait for."""
        self._entered += 1
        try:
            self._store.append(self._key(), struct.pack("<I", self._rank))
            if self._rank == 0 and self._entered > 1:
                self._store.delete_key(f"arrived/{self._entered - 1}")
        except RuntimeError:
            pass  # a store without append, or one that is gone: the barrier itself does not need it

    def _key(self) -> str:
        return f"arrived/{self._entered}"

    def _missing(self) -> list[int]:
        """The ranks that have not arrived at the current barrier; empty if that cannot be found out soon."""
        found: list[list[int]] = []

        def look() -> None:
            # In a thread because a store behind a broken link answers only after a timeout of minutes.
            try:
                arrived = self._store.get(self._key())
                here = {rank for (rank,) in struct.iter_unpack("<I", arrived)}
                found.append([rank for rank in range(self._world_size) if rank not in here])
            except (RuntimeError, struct.error):
                pass

        thread = threading.Thread(target=look, name="lightning-chakra-store", daemon=True)
        thread.start()
        thread.join(_STORE_PATIENCE)
        return found[0] if found else []

    def _explain(self, what: str, waited: float, error: str) -> str:
        missing = self._missing()
        timed_out = waited >= self._timeout
        if timed_out and missing:
            return (
                f"rank {self._rank} waited {waited:.0f} s for ranks [{format_ranks(missing)}] to {what} before the "
                f"flush; they did not arrive. If they are only slow, raise `barrier_timeout` (now "
                f"{self._timeout:g} s) or record less (`active`, `collect_shapes`, `collect_callstack`)"
            )
        if timed_out:
            return (
                f"rank {self._rank} waited {waited:.0f} s for the other ranks to {what} before the flush. If "
                f"they are only slow, raise `barrier_timeout` (now {self._timeout:g} s)"
            )
        who = f"ranks [{format_ranks(missing)}] had not arrived" if missing else "a rank is gone or gave up waiting"
        return f"rank {self._rank} lost a peer after {waited:.1f} s while the ranks {what}: {who} ({error})"


def _failure(work: Any) -> str | None:
    try:
        work.wait()
    except RuntimeError as error:
        return str(error).splitlines()[0][:200]
    return None
