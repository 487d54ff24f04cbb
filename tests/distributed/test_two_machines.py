"""Two ranks in two network namespaces, as on two machines; the link between them is cut while one of them exports."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.distributed import faults
from tests.reading import check_pair

pytestmark = pytest.mark.namespaces

_BARRIER_TIMEOUT = {"cut": 8, "mended": 600}


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


class Link:
    """Two namespaces joined by a pair of virtual network interfaces."""

    def __init__(self, number: int) -> None:
        self.names = [f"chakra{os.getpid()}-{number}{side}" for side in "ab"]
        self.interfaces = [f"ch{os.getpid() % 100000}{number}{side}" for side in "ab"]
        self.addresses = [f"10.214.{number}.{host}" for host in (1, 2)]

    def make(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        a, b = self.interfaces
        _ip("link", "add", a, "netns", self.names[0], "type", "veth", "peer", "name", b, "netns", self.names[1])
        for name, interface, address in zip(self.names, self.interfaces, self.addresses, strict=True):
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", interface)
            _ip("-n", name, "link", "set", interface, "up")

    def switch(self, state: str) -> None:
        _ip("-n", self.names[1], "link", "set", self.interfaces[1], state)

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=20)


def _run(case: str, link: Link, folder: Path) -> list[harness.Rank]:
    marker = folder / "marker"

    def cut(processes: list[Any]) -> None:
        deadline = time.monotonic() + 60
        while not (marker.exists() and (folder / "waiting-1").exists()):
            assert time.monotonic() < deadline, "the flush never began"
            time.sleep(0.05)
        link.switch("down")
        if case == "mended":
            time.sleep(3)  # the fault: how long the link is down
            link.switch("up")

    env = {"MASTER_ADDR": link.addresses[0], "LOCAL_RANK": "0"}
    return harness.run(
        partial(faults.train_in_namespace, slow=faults.slow_kineto, marker=marker, num_nodes=2),
        {"dirpath": folder / "out", "profile_ranks": [0], "barrier_timeout": _BARRIER_TIMEOUT[case]},
        ranks=2,
        env={"TMPDIR": str(folder)},
        per_rank_env=[
            {**env, "NODE_RANK": str(rank), "NETWORK": f"/run/netns/{name}", "GLOO_SOCKET_IFNAME": interface}
            for rank, (name, interface) in enumerate(zip(link.names, link.interfaces, strict=True))
        ],
        timeout=60,  # counts from the cut
        while_running=cut,
    )


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, "Future[list[harness.Rank]]"]]]:
    """Both cases, run side by side."""
    if shutil.which("ip") is None:
        pytest.skip("needs the ip command of iproute2 to make network namespaces")
    links = [Link(number) for number in range(len(_BARRIER_TIMEOUT))]
    try:
        try:
            for link in links:
                link.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        with ThreadPoolExecutor() as pool:
            folders = {case: tmp_path_factory.mktemp(case) for case in _BARRIER_TIMEOUT}
            yield {
                case: (folder, pool.submit(_run, case, link, folder))
                for link, (case, folder) in zip(links, folders.items(), strict=True)
            }
    finally:
        for link in links:
            link.remove()


def test_a_cut_link_ends_both_ranks_by_the_training_timeout(ends: Any) -> None:
    folder, future = ends["cut"]
    results = future.result()
    shown = harness.describe(results)
    assert [result.exitcode for result in results] == [1, 1], shown
    # Rank 1 cannot ask the store, which lies beyond the cut; rank 0 can, and knows that rank 1 was there.
    assert "rank 1 waited 8 s for the other ranks to export steps 2-3 before the flush" in results[1].err, shown
    assert "rank 0 waited 8 s at the barrier before the flush, though all ranks" in results[0].err, shown
    assert all("`barrier_timeout` (now 8 s)" in result.err for result in results), shown
    # the training's own
    assert all(result.err.rstrip().endswith("Application timeout caused pair closure") for result in results), shown
    assert not any("BarrierError" in result.err for result in results), shown
    check_pair(folder / "out", 0, [2, 3])


def test_a_link_that_comes_back_is_not_noticed(ends: Any) -> None:
    folder, future = ends["mended"]
    values = harness.succeed(future.result())
    assert [value["batches"] for value in values] == [8, 8]
    check_pair(folder / "out", 0, [2, 3])
