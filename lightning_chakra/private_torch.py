"""Every use of torch that torch does not promise to keep, each with what happens where it is missing."""

import functools
import os
from collections.abc import Callable
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


def before_others(call: Callable[[], None]) -> Callable[[], None]:
    """Let ``call`` run each time before a profiler is prepared or started, until the returned function is called.

    Where torch has no such place nothing is called, and who starts a second profiler gets what torch does then.
    """
    module: Any = torch.autograd.profiler
    originals = {name: getattr(module, name) for name in _BEGINNINGS if hasattr(module, name)}
    wrappers = {name: _calling_first(call, original) for name, original in originals.items()}
    for name, wrapper in wrappers.items():
        setattr(module, name, wrapper)

    def restore() -> None:
        for name, wrapper in wrappers.items():
            if getattr(module, name) is wrapper:
                setattr(module, name, originals[name])

    return restore


_BEGINNINGS = ("_prepare_profiler", "_enable_profiler")


def _calling_first(call: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def both(*args: Any, **kwargs: Any) -> Any:
        call()
        return function(*args, **kwargs)

    return both


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
