"""The barrier at which all ranks meet after the export and before the flush, on a group with its own timeout."""

import contextlib
import itertools
import os
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lightning_chakra.recording import private_torch
from lightning_chakra.recording.messages import info
from lightning_chakra.recording.ranks import format_ranks

_FIRST_NOTICE = 10.0
_NEXT_NOTICE = 60.0
_SLICE = timedelta(seconds=1)  # between two looks at pending signals
_TALK_TIMEOUT = 120.0  # for what takes no longer than the network: nobody exports meanwhile
_STORE_PATIENCE = 5.0
_GAVE_UP = "gave_up"
_NUMBER = struct.Struct("<I")

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

    def of_rank(self, rank: int, text: str) -> str:
        """The ``text`` of a rank."""

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

    def __init__(self, barrier: Callable[[], None], broadcast: Callable[[Any], Any]) -> None:
        self._barrier = barrier
        self._broadcast = broadcast

    def wait(self, what: str) -> None:
        """See :class:`FlushBarrier`."""
        self._barrier()

    def maximum(self, value: int) -> int:
        """See :class:`FlushBarrier`."""
        return int(self._broadcast(value))

    def of_rank(self, rank: int, text: str) -> str:
        """See :class:`FlushBarrier`. There is but rank 0's here."""
        return str(self._broadcast(text))

    def total(self, values: list[int]) -> list[int]:
        """See :class:`FlushBarrier`."""
        return values

    def close(self) -> None:
        """See :class:`FlushBarrier`."""


class GlooBarrier:
    """A gloo group of its own beside the groups that train.

    The group that trains has the training's timeout, and whoever waits on it while another rank exports is killed by
    that timeout. This group has its own. It is not registered with ``torch.distributed``: it appears in no trace, and
    dropping it is not a collective. It connects lazily, so a rank of a large job holds those few connections that the
    barrier's algorithm needs (two for each doubling of the number of ranks) and not one for each other rank.

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
        self._work: Any = None
        self._silent = False  # whether the store once did not answer
        self._group, self._store = private_torch.gloo_group(f"lightning_chakra/{next(_generation)}", _TALK_TIMEOUT)
        if self._rank == 0:
            for key in (_arrivals(0), _arrivals(1), _GAVE_UP):
                self._store.set(key, b"")  # a read of a key that nobody wrote blocks
        # This makes the connections that all later barriers use: a peer's death is only noticed over a connection.
        self._group.barrier().wait()
        private_torch.set_group_timeout(self._group, timeout)

    def wait(self, what: str) -> None:
        """See :class:`FlushBarrier`. Says every now and then who is waited for."""
        self._entered += 1
        self._arrive()
        began = time.monotonic()
        self._work = self._group.barrier()
        notice = _FIRST_NOTICE
        try:
            while not _ended(self._work):
                waited = time.monotonic() - began
                if waited >= notice:
                    notice += _NEXT_NOTICE
                    self._say_who_is_missing(what, waited)
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:200]
            raise BarrierError(self._explain(what, time.monotonic() - began, reason)) from error

    def maximum(self, value: int) -> int:
        """See :class:`FlushBarrier`."""
        return self._reduce([value], dist.ReduceOp.MAX)[0]

    def of_rank(self, rank: int, text: str) -> str:
        """See :class:`FlushBarrier`."""
        mine = os.fsencode(text) if self._rank == rank else b""  # a path may be no text
        mine = mine.ljust(self.maximum(len(mine)), b"\0")
        return os.fsdecode(bytes(self.total(list(mine))))

    def total(self, values: list[int]) -> list[int]:
        """See :class:`FlushBarrier`."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def close(self) -> None:
        """See :class:`FlushBarrier`."""
        work, self._work = self._work, None
        held = [work, self._group]  # each of them keeps the connections
        interrupted = work is not None and not work.is_completed()
        del work, self._group, self._store
        if interrupted:
            # The group's destructor waits until the wait ends, which nothing but its timeout can bring about.
            threading.Thread(target=held.clear, name="lightning-chakra-barrier", daemon=True).start()

    def _reduce(self, values: list[int], operation: Any) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        private_torch.reduce_in_place(self._group, tensor, operation, _TALK_TIMEOUT)
        return [int(value) for value in tensor.tolist()]

    def _arrive(self) -> None:
        """Leave this rank's number in the store, for those who want to know whom they wait for."""
        if self._rank == 0:
            # The other key was last read in the barrier before, and is next written once this one is over.
            self._tell(lambda store: store.set(_arrivals(self._entered + 1), b""))
        self._tell(lambda store: store.append(_arrivals(self._entered), _NUMBER.pack(self._rank)))

    def _tell(self, request: Callable[[Any], None]) -> None:
        """Send the store a request without an answer; one with an answer can take minutes behind a broken link."""
        # A look-up that got no answer still holds the connection, and another request would wait behind it.
        if not self._silent:
            with contextlib.suppress(RuntimeError):  # the barrier itself does not need the store
                request(self._store)

    def _notes(self) -> tuple[list[int], list[int]] | None:
        """The ranks missing at the current barrier and those that gave up waiting; ``None`` if the store is silent."""
        if self._silent:
            return None
        found: list[tuple[list[int], list[int]]] = []
        store, key = self._store, _arrivals(self._entered)

        def look() -> None:
            with contextlib.suppress(RuntimeError, struct.error):
                arrived, gave_up = ({rank for (rank,) in _NUMBER.iter_unpack(store.get(k))} for k in (key, _GAVE_UP))
                found.append(([rank for rank in range(self._world_size) if rank not in arrived], sorted(gave_up)))

        thread = threading.Thread(target=look, name="lightning-chakra-store", daemon=True)
        thread.start()
        thread.join(_STORE_PATIENCE)
        self._silent = not found
        return found[0] if found else None

    def _say_who_is_missing(self, what: str, waited: float) -> None:
        missing, _ = self._notes() or ([], [])
        first = next((rank for rank in range(self._world_size) if rank not in missing), self._rank)
        if missing and self._rank != first:
            return  # one line for all: thousands of waiting ranks would fill the log
        who = f"ranks [{format_ranks(missing)}]" if missing else "the other ranks"
        info(f"rank {self._rank} waits for {who} to {what}, {waited:.0f} s")

    def _explain(self, what: str, waited: float, reason: str) -> str:
        timed_out = waited >= self._timeout
        if timed_out:
            self._tell(lambda store: store.append(_GAVE_UP, _NUMBER.pack(self._rank)))
        notes = self._notes()
        missing, gave_up = notes or ([], [])
        advice = (
            f"If they are only slow, raise `barrier_timeout` (now {self._timeout:g} s) or record less (`active`, "
            "`collect_shapes`, `collect_callstack`)"
        )
        if timed_out:
            if notes is not None and not missing:
                return (
                    f"rank {self._rank} waited {waited:.0f} s at the barrier before the flush, though all ranks came "
                    "to it: the network between them seems broken. `barrier_timeout` (now "
                    f"{self._timeout:g} s) ended the wait"
                )
            who = f"ranks [{format_ranks(missing)}]" if missing else "the other ranks"
            return (
                f"rank {self._rank} waited {waited:.0f} s for {who} to {what} before the flush; they did not arrive. "
                f"{advice}"
            )
        late = f" for ranks [{format_ranks(missing)}]" if missing else ""
        if gave_up:
            return (
                f"rank {self._rank} found at the barrier before the flush, when the ranks {what}, that ranks "
                f"[{format_ranks(gave_up)}] had given up waiting{late}. {advice}"
            )
        who = f"ranks [{format_ranks(missing)}] had not arrived" if missing else "a rank is gone"
        return f"rank {self._rank} lost a peer after {waited:.1f} s while the ranks {what}: {who} ({reason})"


def _arrivals(barrier: int) -> str:
    """The store's key for the ranks that arrived at a barrier. Two take turns, so that nothing grows."""
    return f"arrived/{barrier % 2}"


def _ended(work: Any) -> bool:
    """Wait for a slice of time; whether ``work`` is done.

    Raises:
        RuntimeError: It failed.
    """
    try:
        work.wait(_SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # the slice may have ended in the same moment as the work; without a timeout wait() tells which
    return True
