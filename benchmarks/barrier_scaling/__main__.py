"""Set-up and one barrier for 2, 4, 8, 16, 32 processes on this machine, connecting lazily and eagerly.

All processes share the cores, so the time on the clock grows with the work of all of them together; the processor time
of one rank is what a cluster would see, where each rank has a core of its own. Both are printed, with a fit of the
processor time (a + b log2 n where connections are made lazily, a + b n for the full mesh) carried on to large jobs.

The server of torch's store looks up the name of each client that connects. Where name servers are slow, this waits for
them; `unshare --net sh -c "ip link set lo up; python -m benchmarks.barrier_scaling"` measures without them.
"""

import argparse
import math
import multiprocessing
import os
import socket
import statistics
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_chakra.recording import private_torch
from lightning_chakra.recording.barrier import GlooBarrier

SIZES = (2, 4, 8, 16, 32)
LARGE = (1024, 4096)
REPEAT = 50
Figures = dict[str, float]


def sockets() -> int:
    """Sockets of this process."""
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.path.islink(path) and os.readlink(path).startswith("socket:") for path in paths)


def measure(rank: int, size: int, port: int, eager: bool, results: Any) -> None:
    """One rank."""
    torch.set_num_threads(1)
    if eager:
        private_torch._gloo_devices = lambda gloo: [gloo.create_default_device(lazy_init=False)]
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    dist.barrier()

    before = sockets()
    clock, processor = time.perf_counter(), time.process_time()
    barrier = GlooBarrier(600)
    figures = {"setup": time.perf_counter() - clock, "setup_cpu": time.process_time() - processor}
    dist.barrier()
    clock, processor = time.perf_counter(), time.process_time()
    for _ in range(REPEAT):
        barrier.wait("export")
    figures |= {
        "wait": (time.perf_counter() - clock) / REPEAT,
        "wait_cpu": (time.process_time() - processor) / REPEAT,
        "sockets": sockets() - before,
    }
    dist.barrier()

    clock = time.perf_counter()
    for _ in range(200):
        barrier._store.get("gave_up")
    figures["requests"] = 200 / (time.perf_counter() - clock)  # of this rank, while all ranks ask
    results.put((rank, figures))

    # The store lives in rank 0, which must not end before the others have said that they need it no more.
    barrier.close()
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < size:
        time.sleep(0.01)


def run(size: int, eager: bool) -> Figures:
    """One job: the clock of the slowest rank, a typical rank's processor time and sockets, all ranks' requests."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    forks = multiprocessing.get_context("fork")  # torch is loaded once for all
    results = forks.Queue()
    ranks = [forks.Process(target=measure, args=(rank, size, port, eager, results)) for rank in range(size)]
    for process in ranks:
        process.start()
    figures = [results.get(timeout=120)[1] for _ in ranks]
    for process in ranks:
        process.join(60)
    assert all(process.exitcode == 0 for process in ranks), [process.exitcode for process in ranks]
    row = {name: max(own[name] for own in figures) for name in ("setup", "wait")}
    row |= {name: statistics.mean(own[name] for own in figures) for name in ("setup_cpu", "wait_cpu")}
    row["sockets"] = statistics.median(own["sockets"] for own in figures)  # rank 0 has those of the store's server too
    row["requests"] = sum(own["requests"] for own in figures)
    return row


def fit(xs: list[float], ys: list[float]) -> tuple[float, float]:
    """Intercept and slope of the least-squares line."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)
    return mean_y - slope * mean_x, slope


def main() -> None:
    """Print the table and the fits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each job; the median counts")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, median of {options.runs} runs.\n")
    print("| ranks | connections | set-up, ms | set-up, ms of processor per rank | barrier, ms | per rank | sockets |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    table: dict[str, list[Figures]] = {"lazy": [], "eager": []}
    for size in SIZES:
        for kind, rows in table.items():
            runs = [run(size, kind == "eager") for _ in range(options.runs)]
            row = {name: statistics.median(own[name] for own in runs) for name in runs[0]}
            rows.append(row)
            times = " | ".join(f"{1e3 * row[name]:.2f}" for name in ("setup", "setup_cpu", "wait", "wait_cpu"))
            print(f"| {size} | {kind} | {times} | {row['sockets']:.0f} |", flush=True)
    print(f"\nThe store answered {max(row['requests'] for row in table['lazy']):,.0f} requests a second.\n")
    print("| | fit, n ranks | " + " | ".join(f"{n:,} ranks" for n in LARGE) + " |")
    print("| --- | --- |" + " --- |" * len(LARGE))
    for kind, x, text in (("lazy", math.log2, "log2 n"), ("eager", float, "n")):
        for name, unit, scale, title in (
            ("setup_cpu", "ms", 1e3, "set-up, processor time per rank"),
            ("wait_cpu", "ms", 1e3, "one barrier, processor time per rank"),
            ("sockets", "", 1.0, "sockets per rank"),
        ):
            of = math.log2 if name == "wait_cpu" else x
            a, b = fit([of(size) for size in SIZES], [scale * row[name] for row in table[kind]])
            formula = f"{a:.3g} + {b:.3g} {'log2 n' if of is math.log2 else text}"
            cells = " | ".join(f"{a + b * of(n):.3g} {unit}".rstrip() for n in LARGE)
            print(f"| {kind}: {title} | {formula} | {cells} |")


if __name__ == "__main__":
    main()
