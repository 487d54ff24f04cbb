"""Work on several ranks at a time, each in a process of its own that hands back a small result."""

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from lightning_chakra.traces.errors import CaptureError, ResultError

Task = TypeVar("Task")
Result = TypeVar("Result")

_MOST = 8
"""More processes than this by default would rather wait for the disk, and each holds a rank's working memory."""


def map_ranks(
    function: Callable[[Task], Result], tasks: Iterable[Task], jobs: int, executor: Executor | None = None
) -> list[Result]:
    """Apply ``function`` to each task, in order; with one job or one task in this process.

    Args:
        function: A function of a module: it is pickled.
        tasks: What it is called with.
        jobs: Processes at a time; 0: one per CPU that this process may use, at most 8.
        executor: What does the work instead of processes of this machine.

    Raises:
        CaptureError: ``jobs`` is negative.
        ResultError: A process was killed.
    """
    if jobs < 0:
        raise CaptureError("--jobs: at least 1, or 0 for one per CPU")
    todo = list(tasks)
    if executor is not None:
        return list(executor.map(function, todo))
    jobs = min(jobs if jobs > 0 else min(_cpus(), _MOST), len(todo))
    if jobs <= 1:
        return [function(task) for task in todo]
    # Not fork: fsspec's backends keep threads and connections that do not survive it.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        try:
            return list(pool.map(function, todo))
        except BrokenProcessPool:
            raise ResultError(
                f"a process that read a trace was killed, most likely for want of memory: try fewer than --jobs {jobs}"
            ) from None


def _cpus() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
