"""``profile_window`` in plain loops and in Fabric."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile

from lightning_chakra import profile_window
from tests import harness, loops
from tests.faults.trainings import PAIR, SHORT
from tests.reading import check_pair, files


def test_one_process(out: Path) -> None:
    result = loops.plain({"dirpath": out})
    assert files(out) == PAIR
    check_pair(out, 0, [3, 4])
    assert [trace["kind"] for trace in result["traces"]] == ["kineto", "chakra"]
    assert result["warnings"] == []


def test_two_loops_one_after_the_other_with_the_same_object(out: Path) -> None:
    window = profile_window(out, **SHORT)
    for _ in range(2):
        with window:
            for _ in range(6):
                torch.ones(2).sum()
                window.step()
    assert files(out) == sorted([*PAIR, *(f"run-1/{name}" for name in PAIR)])
    assert len(window.traces) == 4


def test_a_loop_that_ends_where_its_window_begins_leaves_no_empty_trace(out: Path) -> None:
    result = loops.plain({"dirpath": out}, steps=3)
    assert files(out) == []
    (warning,) = result["warnings"]
    assert "needs 5 steps" in warning


def test_an_exception_in_the_window_saves_it_and_is_the_loops_own(out: Path) -> None:
    with pytest.raises(ArithmeticError, match="the loop's own error"):
        loops.plain({"dirpath": out}, raise_in=4)
    kineto, _ = check_pair(out, 0, [3, 4])
    assert kineto["lightning_chakra"]["partial"] is True


def test_an_exception_after_the_window_loses_nothing(out: Path) -> None:
    with pytest.raises(ArithmeticError):
        loops.plain({"dirpath": out}, raise_in=6)
    check_pair(out, 0, [3, 4])


def test_numbers_of_a_resumed_loop_and_accumulated_gradients(out: Path) -> None:
    window = profile_window(out, wait=0, warmup=1, active=2, collect_chakra=True)
    window.global_step = 1000
    with window:
        for batch in range(2, 12):
            torch.ones(2).sum()
            window.step(1000 + batch // 2)
    check_pair(out, 0, [1001, 1002])


def test_nested_windows_are_refused_by_name(out: Path) -> None:
    outer = profile_window(out / "outer", **SHORT)
    inner = profile_window(out / "inner")
    with outer:
        with pytest.raises(RuntimeError, match=r"`profile_window` to .*inner begins while `profile_window` to .*outer"):
            inner.__enter__()
        with pytest.raises(RuntimeError, match=r"`profile_window` to .*outer begins while"):
            outer.__enter__()
        for _ in range(6):
            outer.step()
    check_pair(out / "outer", 0, [3, 4])


def test_a_step_outside_of_the_with_statement_says_where_it_belongs(out: Path) -> None:
    with pytest.raises(RuntimeError, match="outside of its `with` statement"):
        profile_window(out).step()


def test_ranks_without_a_process_group_say_what_to_call(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"Call `torch\.distributed\.init_process_group\(\)`"), profile_window(out):
        pass


def test_a_profiler_of_the_user_in_the_window_ends_it(out: Path) -> None:
    with pytest.warns(UserWarning, match="another profiler was started"):
        _loop_with_a_profiler(profile_window(out, **SHORT))
    check_pair(out, 0, [3, 4])


def _loop_with_a_profiler(window: profile_window) -> None:
    with window:
        for step in range(8):
            torch.ones(2).sum()
            if step == 4:
                with profile():
                    torch.ones(2).sum()
            window.step()


def test_it_travels(out: Path) -> None:
    window = profile_window(out, active=3)
    for other in (copy.deepcopy(window), pickle.loads(pickle.dumps(window))):
        assert other.active == 3


@pytest.mark.parametrize("profiled", [[0], [1], []])
def test_two_ranks(profiled: list[int], out: Path) -> None:
    ranks = harness.run(loops.plain, {"dirpath": out, "profile_ranks": profiled}, ranks=2, env={"RANKS": "2"})
    for value in harness.succeed(ranks):
        assert value["offences"] == value["warnings"] == []
    recorded = profiled or [0, 1]
    assert files(out) == sorted(f"{kind}/rank-{r}.json.gz" for kind in ("chakra", "pytorch_profile") for r in recorded)
    for rank in recorded:
        assert check_pair(out, rank, [3, 4])[0]["lightning_chakra"]["world_size"] == 2


def test_an_export_beyond_the_timeout_of_the_group_that_trains(out: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    arguments: dict[str, Any] = {"dirpath": out, "profile_ranks": [0]}
    ranks = harness.run(loops.slow, arguments, marker, 8.0, ranks=2, env={"RANKS": "2"})
    harness.succeed(ranks)
    assert marker.exists()
    check_pair(out, 0, [3, 4])


@pytest.mark.parametrize("within", [True, False])
def test_fabric_on_two_ranks(within: bool, out: Path) -> None:
    ranks = harness.run(_fabric, {"dirpath": out}, within, ranks=2, env={"RANKS": "2"})
    assert [value["offences"] for value in harness.succeed(ranks)] == [[], []]
    for rank in range(2):
        assert check_pair(out, rank, [3, 4])[0]["lightning_chakra"]["strategy"] == "DDPStrategy"


def _fabric(arguments: dict[str, Any], within: bool) -> Any:
    return loops.fabric(arguments, within=within)


@pytest.mark.parametrize(("unit", "batches"), [("optimizer_step", 4), ("batch", 2)])
def test_fabric_with_accumulated_gradients(unit: str, batches: int, out: Path) -> None:
    loops.fabric({"dirpath": out, "step_unit": unit}, within=False, accumulate=2, batches=12)
    kineto, _ = check_pair(out, 0, [3, 4])
    assert kineto["lightning_chakra"]["step_unit"] == unit
    assert [event["name"] for event in kineto["traceEvents"]].count("aten::linear") == batches
