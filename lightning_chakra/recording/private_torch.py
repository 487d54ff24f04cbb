"""Every use of torch that torch does not promise to keep, each with what happens where it is missing."""

import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.autograd.profiler
import torch.distributed
import torch.profiler

# Documented by torch under this name as its low-level profiler; torch.profiler.profile is built on it.
KinetoProfile: Any = torch.profiler._KinetoProfile  # type: ignore[attr-defined]  # not in __all__

_distributed: Any = torch.distributed


def profiler_enabled() -> bool:
    """Whether any Kineto profiler records in this process.

    C++ knows of the calling thread's only; Python notes those of all threads, and Kineto is one for all of them.
    """
    here = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]  # not in __all__
    return bool(here or getattr(torch.autograd.profiler, "_is_profiler_enabled", False))


def trace_only_config() -> Any:
    """A profiler configuration that skips the post-processing of events which only ``profile.events()`` needs.

    ``None`` where torch does not know it (before 2.13): then the events are processed, which takes longer.
    """
    config = torch._C._profiler._ExperimentalConfig
    return config(trace_only=True) if hasattr(config(), "trace_only") else None


# Who was last to start or stop a profiler, noted where torch keeps whether one runs. Every Python profiler writes True
# or False there, so a note of ours that is gone means that another one ran in the meantime. torch offers no other way
# to see that, and going on is a segmentation fault. The notes are true and false as torch expects.
PREPARED = 0
RUNNING = 1
NOBODY = False


def note_owner(note: int) -> None:
    """Leave ``PREPARED``, ``RUNNING`` or ``NOBODY``."""
    if hasattr(torch.autograd.profiler, "_is_profiler_enabled"):
        torch.autograd.profiler._is_profiler_enabled = note  # type: ignore[assignment]  # an int on purpose


def is_noted(note: int) -> bool:
    """Whether the note is still there. Without torch's place for it: whether C++ agrees that a profiler runs."""
    noted = getattr(torch.autograd.profiler, "_is_profiler_enabled", None)
    return profiler_enabled() == bool(note) if noted is None else noted is note


class OtherProfilers:
    """What the profilers of other people do in this process, seen in the three calls by which torch drives one.

    Two that overlap are a segmentation fault, also where one of them is only prepared (the warmup of its schedule), of
    which torch itself tells nobody. Where torch has not these calls nothing is seen, and who mixes profilers gets what
    torch does then.
    """

    def __init__(self) -> None:
        self.busy = False
        """Whether one is prepared or runs. One that was begun before :meth:`watch` is not seen."""
        self.before: list[Callable[[], None]] = []
        """Called before one is prepared or started, the last one first: a fit can lie within another one."""
        self._ours = threading.local()

    def watch(self) -> None:
        """Look at all such calls from now on. Does nothing the second time."""
        module: Any = torch.autograd.profiler
        for name, begins in (("_prepare_profiler", True), ("_enable_profiler", True), ("_disable_profiler", False)):
            function = getattr(module, name, None)
            if function is not None and not hasattr(function, "_of_others"):
                setattr(module, name, self._watched(function, begins))

    @contextlib.contextmanager
    def ours(self) -> Iterator[None]:
        """In this block the calls of this thread are our own."""
        self._ours.calls = True
        try:
            yield
        finally:
            self._ours.calls = False

    def _watched(self, function: Callable[..., Any], begins: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._ours, "calls", False):
                return function(*args, **kwargs)
            if begins:
                for make_way in reversed(self.before):
                    make_way()
            self.busy = begins
            return function(*args, **kwargs)

        watched._of_others = True  # type: ignore[attr-defined]  # marks what is watched
        return watched


others = OtherProfilers()


def gloo_group(name: str, timeout: float) -> tuple[Any, Any]:
    """A gloo group of all ranks that ``torch.distributed`` does not list, and the store it was built with.

    Args:
        name: Prefix of its keys in the store of the default group, the same on all ranks.
        timeout: Of building the group and of each collective, in seconds.

    Returns:
        The group and a store on a connection of its own, so that nobody waits behind our look-ups.
    """
    store = _distributed.distributed_c10d._get_default_store()
    if hasattr(store, "clone"):
        store = store.clone()
    store = _distributed.PrefixStore(name, store)
    gloo = _distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout)
    options._devices = _gloo_devices(gloo)
    return gloo(store, torch.distributed.get_rank(), torch.distributed.get_world_size(), options), store


def set_group_timeout(group: Any, timeout: float) -> None:
    """Let the collectives of a group of :func:`gloo_group` take ``timeout`` seconds from now on."""
    # not through the options of a barrier: torch 2.6 ignores their timeout
    group._set_default_timeout(timedelta(seconds=timeout))


def reduce_in_place(group: Any, tensor: torch.Tensor, operation: Any, timeout: float) -> None:
    """All-reduce ``tensor`` over a group of :func:`gloo_group`, within ``timeout`` seconds."""
    options = _distributed.AllreduceOptions()
    options.reduceOp = operation
    options.timeout = timedelta(seconds=timeout)
    group.allreduce([tensor], options).wait()


def _gloo_devices(gloo: Any) -> list[Any]:
    """Network devices as torch itself chooses them, connecting only on first use where torch can do that."""
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    try:
        return [gloo.create_device(interface=name, lazy_init=True) for name in interfaces] or [
            gloo.create_default_device(lazy_init=True)
        ]
    except TypeError:  # torch before lazy connections: each rank connects to each other one at once
        return [gloo.create_device(interface=name) for name in interfaces] or [gloo.create_default_device()]


_agreements = itertools.count()  # the same on every rank: all of them agree on the same things in the same order
_AGREEMENT_TIMEOUT = timedelta(seconds=120)


def all_agree(fine: bool) -> bool:
    """Whether ``fine`` is true on all ranks, by the store of the default group. A collective that needs no device.

    Raises:
        RuntimeError: A rank did not come in time.
    """
    store = _distributed.distributed_c10d._get_default_store()
    key = f"lightning_chakra/agreement-{next(_agreements)}"
    store.add(f"{key}/bad", int(not fine))
    if store.add(f"{key}/there", 1) == torch.distributed.get_world_size():
        store.set(f"{key}/all", b"1")
    store.wait([f"{key}/all"], _AGREEMENT_TIMEOUT)
    return bool(store.add(f"{key}/bad", 0) == 0)
