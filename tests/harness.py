"""Running programs as real ranks: forked from a server that has torch and lightning loaded, or in new interpreters."""

import faulthandler
import multiprocessing
import multiprocessing.util
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent

# Forking from a server that has everything loaded starts a rank in a tenth of a second instead of ten.
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["tests.preload"])
multiprocessing.util.get_temp_dir()  # made now, so that it is not in the folder of the first test that forks


@dataclass(frozen=True)
class Rank:
    """How one rank ended. ``exitcode`` is negative for a signal; ``value`` is what the program returned."""

    exitcode: int
    out: str
    err: str
    value: Any


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(
    program: Callable[..., Any],
    *args: Any,
    ranks: int = 1,
    env: Mapping[str, str] | None = None,
    timeout: float = 90,
    fresh: bool = False,
    per_rank_env: Sequence[Mapping[str, str]] = (),
    while_running: Callable[[list[Any]], None] | None = None,
) -> list[Rank]:
    """Run ``program(*args)`` on each rank and wait for all of them.

    Args:
        program: A function that can be imported; it lives in a module of the tests.
        ranks: Number of processes. With more than one, Lightning finds the environment of an external launcher.
        env: Additional environment.
        timeout: Seconds after which everything is killed and the test fails with what the ranks printed.
        fresh: New interpreters, which end as interpreters do (exit handlers, finalization); else forks, which do not.
        per_rank_env: Additional environment of each rank.
        while_running: Called once with the processes (``pid`` attribute) after they started.
    """
    port = str(free_port())
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        environments = []
        for rank in range(ranks):
            own = {**os.environ, **(env or {})}  # the server that forks has the environment of an earlier time
            if ranks > 1:
                own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
            if per_rank_env:
                own |= per_rank_env[rank]
            environments.append(own)
        start = _start_fresh if fresh else _start_fork
        processes = [start(program, args, own, Path(folder), rank) for rank, own in enumerate(environments)]
        try:
            if while_running is not None:
                while_running(processes)
            hung = _wait(processes, time.monotonic() + timeout)
        finally:
            for process in processes:
                if _exitcode(process) is None:
                    process.kill()
        results = [_collect(process, Path(folder), rank) for rank, process in enumerate(processes)]
        if hung:
            raise AssertionError(f"still running after {timeout} s: ranks {hung}\n{describe(results)}")
        return results


def describe(results: Sequence[Rank]) -> str:
    return "\n".join(
        f"--- rank {rank}: exit {r.exitcode}\n{r.out[-3000:]}\n{r.err[-6000:]}" for rank, r in enumerate(results)
    )


def succeed(results: Sequence[Rank]) -> list[Any]:
    """The values of ranks that all must have ended well."""
    assert all(result.exitcode == 0 for result in results), describe(results)
    return [result.value for result in results]


def _start_fork(program: Callable[..., Any], args: Any, env: dict[str, str], folder: Path, rank: int) -> Any:
    process = _server.Process(target=_child, args=(program, args, env, str(folder), rank))
    process.start()
    return process


def _start_fresh(program: Callable[..., Any], args: Any, env: dict[str, str], folder: Path, rank: int) -> Any:
    job = folder / f"{rank}.job"
    job.write_bytes(pickle.dumps((program, args)))
    paths = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "tests.harness", str(job), str(folder), str(rank)],
        env={**os.environ, "PYTHONPATH": paths, **env},
        stdin=subprocess.DEVNULL,
        stdout=(folder / f"{rank}.out").open("wb"),
        stderr=(folder / f"{rank}.err").open("wb"),
    )


def _child(program: Callable[..., Any], args: Any, env: dict[str, str], folder: str, rank: int) -> None:
    for number, name in ((1, "out"), (2, "err")):
        fd = os.open(f"{folder}/{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(fd, number)
        os.close(fd)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ.update(env)
    tempfile.tempdir = None  # TMPDIR may have changed
    faulthandler.enable()
    try:
        _run(program, args, folder, rank)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _run(program: Callable[..., Any], args: Any, folder: str, rank: int) -> None:
    value = program(*args)
    Path(folder, f"{rank}.value").write_bytes(pickle.dumps(value))


def _exitcode(process: Any) -> int | None:
    return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode


def _wait(processes: Sequence[Any], deadline: float) -> list[int]:
    for process in processes:
        left = max(0.0, deadline - time.monotonic())
        if isinstance(process, subprocess.Popen):
            try:
                process.wait(left)
            except subprocess.TimeoutExpired:
                break
        else:
            process.join(left)
    return [rank for rank, process in enumerate(processes) if _exitcode(process) is None]


def _collect(process: Any, folder: Path, rank: int) -> Rank:
    if isinstance(process, subprocess.Popen):
        process.wait()
    else:
        process.join()

    def read(name: str) -> str:
        path = folder / f"{rank}.{name}"
        return path.read_text(errors="replace") if path.exists() else ""

    value = folder / f"{rank}.value"
    code = _exitcode(process)
    assert code is not None
    return Rank(code, read("out"), read("err"), pickle.loads(value.read_bytes()) if value.exists() else None)


if __name__ == "__main__":
    with open(sys.argv[1], "rb") as job:
        _program, _args = pickle.load(job)
    _run(_program, _args, sys.argv[2], int(sys.argv[3]))
