"""A rank whose export takes nearly three times the timeout of the group that trains runs nobody into that timeout.

All jobs of this module mostly sleep, so the selected ones run side by side before the first test looks at them.
"""

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.distributed import faults
from tests.reading import check_pair, files

_AT_ONCE = 4  # more would let ranks starve for longer than the short timeout while they start
_LIMIT = 150


@dataclass(frozen=True)
class Job:
    """A fit, and what must lie on the disk afterwards."""

    profiled: list[int]
    slow_rank: int = 0
    slow: Callable[..., None] = faults.slow_kineto
    ranks: int = 2
    windows: tuple[tuple[str, list[int]], ...] = (("", [2, 3]),)
    arguments: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    batches: int = 8


JOBS = {
    "rank 0 of 2": Job([0]),
    "rank 1 of 2": Job([1], slow_rank=1),
    "all, rank 1 slow": Job([0, 1], slow_rank=1),
    "rank 2 of 4": Job([2], slow_rank=2, ranks=4),
    "window ends on the last batch": Job([0], batches=4),
    "two windows": Job(
        [0], windows=(("step-00000002", [2, 3]), ("step-00000006", [6, 7])), arguments={"repeat": 2}, batches=10
    ),
    "FSDP2": Job([0], fit={"sharded": True}),
    "execution trace": Job([0], slow=faults.slow_execution_trace),
    "writer": Job([0], slow=faults.slow_writer),
    "writer of rank 1": Job([1], slow_rank=1, slow=faults.slow_writer, batches=4),
    "short barrier_timeout": Job([0], arguments={"barrier_timeout": 3}, fit={"group_timeout": 60}),
    "both timeouts short": Job([0], arguments={"barrier_timeout": 3}),
}
TORCHRUN = "two nodes under torchrun"


def _start(job: Job, folder: Path) -> list[harness.Rank]:
    program = partial(
        faults.train,
        ranks=job.ranks,
        batches=job.batches,
        slow=job.slow,
        slow_rank=job.slow_rank,
        marker=folder / "marker",
        **job.fit,
    )
    arguments = {"dirpath": folder / "out", "profile_ranks": job.profiled, **job.arguments}
    # a temporary folder for each rank: what one has left at its end is not another one's
    own = [{"TMPDIR": str(folder / f"tmp-{rank}")} for rank in range(job.ranks)]
    for env in own:
        Path(env["TMPDIR"]).mkdir()
    return harness.run(program, arguments, ranks=job.ranks, per_rank_env=own, timeout=_LIMIT)


def _torchrun(folder: Path) -> list[harness.Rank]:
    port = str(harness.free_port())
    root = str(harness.TESTS.parent)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    command += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    nodes = [
        subprocess.Popen(
            [*command, f"--node-rank={node}", "-m", "tests.distributed.faults", str(folder)],
            env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": root},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    try:
        printed = [node.communicate(timeout=_LIMIT)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    values = [folder / f"{rank}.value" for rank in range(2)]
    loaded = [pickle.loads(value.read_bytes()) if value.exists() else None for value in values]
    return [harness.Rank(n.returncode, "", p, v) for n, p, v in zip(nodes, printed, loaded, strict=True)]


@pytest.fixture(scope="module")
def jobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, "Future[list[harness.Rank]]"]]:
    """Each selected job's folder and the ends of its ranks."""
    selected = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    started = {}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        # the longest ones first
        for name in sorted(selected, key=lambda name: (name != "two windows", name != TORCHRUN)):
            folder = tmp_path_factory.mktemp("job")
            if name == TORCHRUN:
                started[name] = (folder, pool.submit(_torchrun, folder))
            else:
                started[name] = (folder, pool.submit(_start, JOBS[name], folder))
    return started


@pytest.mark.parametrize("name", [name for name in JOBS if name != "both timeouts short"])
def test_all_ranks_end_well_and_all_files_are_there(name: str, jobs: Any) -> None:
    folder, future = jobs[name]
    job = JOBS[name]
    results = future.result()
    values = harness.succeed(results)
    assert (folder / "marker").exists()  # the slow part was really there
    assert [value["batches"] for value in values] == [job.batches] * job.ranks
    assert [value["offences"] for value in values] == [[]] * job.ranks
    names = [
        str(Path(window, kind, f"rank-{rank}.json.gz"))
        for window, _ in job.windows
        for kind in ("chakra", "pytorch_profile")
        for rank in job.profiled
    ]
    assert files(folder / "out") == sorted(names)
    for window, steps in job.windows:
        for rank in job.profiled:
            check_pair(folder / "out" / window, rank, steps)


@pytest.mark.parametrize("name", [TORCHRUN])
def test_two_nodes(name: str, jobs: Any) -> None:
    folder, future = jobs[name]
    values = harness.succeed(future.result())
    assert (folder / "marker").exists()
    assert [(value["rank"], value["batches"], value["offences"]) for value in values] == [(0, 8, []), (1, 8, [])]
    check_pair(folder / "out", 0, [2, 3])


@pytest.mark.parametrize("name", ["rank 2 of 4"])
def test_one_rank_says_who_is_waited_for(name: str, jobs: Any) -> None:
    results = jobs[name][1].result()
    line = r"rank (\d) waits for ranks \[2\] to export steps 2-3, 1\d s"
    assert [rank for result in results for rank in re.findall(line, result.err)] == ["0"], harness.describe(results)


@pytest.mark.parametrize("name", ["writer"])
def test_the_wait_at_the_end_says_what_it_is_for(name: str, jobs: Any) -> None:
    results = jobs[name][1].result()
    assert re.search(r"rank 1 waits for ranks \[0\] to publish the last traces, 1\d s", results[1].err)


@pytest.mark.parametrize("name", ["short barrier_timeout", "both timeouts short"])
def test_who_gives_up_names_the_flush_the_rank_and_the_argument(name: str, jobs: Any) -> None:
    folder, future = jobs[name]
    results = future.result()
    waiting, late = (result.err for result in reversed(results))
    shown = harness.describe(results)
    assert "rank 1 waited 3 s for ranks [0] to export steps 2-3 before the flush" in waiting, shown
    assert "raise `barrier_timeout` (now 3 s)" in waiting, shown
    # The late rank does not call the one that gave up dead.
    assert "rank 0 found at the barrier before the flush, when the ranks export steps 2-3, that ranks [1] had" in late
    assert "BarrierError" not in "".join(re.findall(r"^\S*Error.*", waiting + late, re.MULTILINE)), shown
    check_pair(folder / "out", 0, [2, 3])
