"""What must be true of a process after every fit, however it went."""

import gc
import os
import tempfile
import threading

import torch
import torch.autograd.profiler
import torch.distributed
from torch.profiler import ExecutionTraceObserver

from lightning_chakra.recording.private_torch import others

_register_callback = ExecutionTraceObserver.register_callback


def offences(*, process_group: bool = True) -> list[str]:
    """What a fit left behind in this process and in the temporary folder; empty when all is clean."""
    gc.collect()  # a profile of the user's own is a cycle, and holds its observer until it is found
    found = []
    if torch.autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled is not False:
        found.append("Kineto is on")
    if ExecutionTraceObserver.register_callback is not _register_callback:
        found.append("observers cannot be registered")
    if others.before:
        found.append("other profilers are listened to")
    if not _slot_is_free():
        found.append("the observer slot is taken")
    found += [f"thread {thread.name}" for thread in threading.enumerate() if thread.name.startswith("lightning-chakra")]
    if process_group and torch.distributed.is_initialized():
        found.append("a process group is alive")
    found += [f"scratch {name}" for name in os.listdir(tempfile.gettempdir()) if name.startswith("lightning-chakra")]
    return found


def _slot_is_free() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "probe.json")
        observer = ExecutionTraceObserver()
        observer.register_callback(path)
        if not os.path.exists(path):
            observer._registered = False
            return False
        observer.unregister_callback()
        return True
