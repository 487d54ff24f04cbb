"""Execution traces of trainings in which exceptions leave operators, which torch writes with lost and wrong parents."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from lightning_chakra import analysis, cli
from tests.faults.trainings import SHORT, check_clean, fitting
from tests.programs import Model
from tests.reading import check_pair, load


class Leaves(Model):
    """Does something in each step that an exception leaves."""

    def __init__(self, act: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(6)
        self.act = act

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.act(batch.clone().requires_grad_())
        with record_function("after"):
            torch.relu(batch)
        return super().training_step(batch, batch_idx)


def block(x: torch.Tensor) -> torch.Tensor:
    with record_function("block"):
        return torch.relu(torch.sigmoid(torch.relu(torch.sigmoid(x))))


def checkpointed(x: torch.Tensor) -> None:
    checkpoint(block, x, use_reentrant=False).sum().backward()


def nested(x: torch.Tensor) -> None:
    checkpoint(lambda x: checkpoint(block, x, use_reentrant=False) * 2, x, use_reentrant=False).sum().backward()


def caught(x: torch.Tensor) -> None:
    with pytest.raises(RuntimeError), record_function("block"):
        torch.mm(x, torch.zeros(3, 3))


def caught_in_a_hook(x: torch.Tensor) -> None:
    def refuse(_: torch.Tensor) -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError), saved_tensors_hooks(refuse, lambda x: x), record_function("block"):
        torch.sigmoid(x)


def padded(x: torch.Tensor) -> None:
    with record_function("block"):
        torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)]).to_padded_tensor(0.0)


@pytest.mark.parametrize("act", [checkpointed, nested, caught, caught_in_a_hook, padded])
def test_nodes_get_their_true_parents(out: Path, act: Callable[[torch.Tensor], Any]) -> None:
    result = fitting({**SHORT, "dirpath": out}, {"max_steps": 6}, Leaves(act))
    assert result["warnings"] == []
    check_clean(result)
    trace = load(out / "chakra" / "rank-0.json.gz")
    nodes = {node["id"]: node for node in trace["nodes"]}
    assert [node["id"] for node in nodes.values() if node["ctrl_deps"] not in nodes] == []
    assert trace["lightning_chakra"]["mended_nodes"] > 0
    above = [(node["name"], nodes[node["ctrl_deps"]]["name"]) for node in nodes.values()]
    for step in (3, 4):
        (parent,) = (parent for name, parent in above if name == f"ProfilerStep#{step}")
        assert parent == "[pytorch|profiler|execution_trace|thread]"
    assert len([name for name, _ in above if name == "after"]) == 2
    assert {parent for name, parent in above if name == "after"} == {"Optimizer.step#SGD.step"}
    (capture,) = analysis.captures(str(out))
    answer = analysis.check(capture)
    told = [(problem.severity, problem.what.split(" ", 1)[1]) for problem in answer.problems]
    assert ("note", "nodes mended") in told
    assert answer.good, answer.problems
    assert cli.main(["check", str(out)]) == 0


def test_a_trace_in_which_nothing_is_wrong_is_left_as_it_is(out: Path) -> None:
    fitting({**SHORT, "dirpath": out}, {"max_steps": 6})
    with gzip.open(out / "chakra" / "rank-0.json.gz") as file:
        assert "lightning_chakra" not in json.load(file)
    check_pair(out, 0, [3, 4])
