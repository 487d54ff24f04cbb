"""Threads that run operators during the window, and a training that is not in the main thread."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from tests.faults.trainings import PAIR, SHORT, check_clean, check_files, fit, fitting, outcome
from tests.programs import Model
from tests.reading import attribute, et_marks, files, kineto_marks, load, operators


class Busy(Callback):
    """Runs ``work`` in threads, over and over, from one batch to another; meets them in each batch between."""

    def __init__(self, work: Callable[[], Any], first: int, last: int, threads: int = 3) -> None:
        self.work = work
        self.first = first
        self.last = last
        self.threads = threads
        self.rounds = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.first:
            self.stop = threading.Event()
            self.turn = threading.Semaphore(0)
            self.running = [threading.Thread(target=self._run) for _ in range(self.threads)]
            for thread in self.running:
                thread.start()
        if self.first <= batch_idx <= self.last:
            for _ in range(self.threads):
                assert self.turn.acquire(timeout=60)  # work was done since
                self.rounds += 1

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.last:
            self.stop.set()
            for thread in self.running:
                thread.join()

    def _run(self) -> None:
        while not self.stop.is_set():
            self.work()
            self.turn.release()


def forward() -> None:
    torch.ones(4, 4).erfinv()


def backward() -> None:
    """What an asynchronous evaluation does: autograd's own threads work for this one."""
    weight = torch.ones(4, 4, requires_grad=True)
    (weight.erf() @ weight).sum().backward()


def snapshot() -> None:
    """What an asynchronous checkpoint does."""
    with torch.no_grad():
        torch.ones(64, 64).clone().mul_(2).to(torch.bfloat16)


def check_ours_is_whole(out: Path, steps: list[int]) -> None:
    """Both files are valid, and each operator of the training thread is in both."""
    kineto, et = load(out / PAIR[1]), load(out / PAIR[0])
    assert kineto_marks(kineto) == et_marks(et) == steps
    assert any(event["name"] == "aten::addmm" for event in operators(kineto))
    nodes = {attribute(node, "rf_id"): node["name"] for node in et["nodes"]}
    # Under load torch gave two nodes of other threads, of 2,600, an id twice. The training's own are unique.
    count = Counter(node["id"] for node in et["nodes"])
    ours = {event["args"]["Record function id"] for event in operators(kineto)}
    assert [node for node in et["nodes"] if attribute(node, "rf_id") in ours and count[node["id"]] > 1] == []
    for event in operators(kineto):
        assert nodes[event["args"]["Record function id"]] == event["name"]


def test_threads_that_work_through_the_whole_window(out: Path, tmp_path: Path) -> None:
    for name, work in (("forward", forward), ("backward", backward), ("snapshot", snapshot)):
        again = tmp_path / f"again-{name}"
        result = fitting({**SHORT, "dirpath": out / name}, {}, Model(8), before=[Busy(work, 1, 6)], again=again)
        assert (result["error"], result["batches"], result["warnings"]) == (None, 8, [])
        assert files(out / name) == PAIR
        check_ours_is_whole(out / name, [3, 4])
        check_clean(result, again)


def test_threads_that_start_and_end_in_the_window(out: Path) -> None:
    result = fitting({**SHORT, "dirpath": out}, {}, Model(8), before=[Busy(backward, 3, 4)])
    assert (result["error"], result["warnings"]) == (None, [])
    check_ours_is_whole(out, [3, 4])
    check_clean(result)


def test_training_outside_the_main_thread(out: Path, tmp_path: Path) -> None:
    """As notebooks and servers do it. Signals cannot be held back there, and nothing else differs."""
    again = tmp_path / "again"
    result = outcome(out, again, program=_train_in_thread)
    assert (result["error"], result["warnings"]) == (None, [])
    check_files(out, result, [3, 4], partial=False)
    check_clean(result, again)


def _train_in_thread(out: Path, again: Path) -> Any:
    results: list[Any] = []

    def run() -> None:
        results.append(fit({**SHORT, "dirpath": out}, {}, Model(8), again=again))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]
