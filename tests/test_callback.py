"""The road from hook to file in one process."""

from pathlib import Path

import pytest

from tests import harness, programs
from tests.reading import check_pair, files


def test_defaults_record_global_steps_10_and_11(out: Path) -> None:
    result = programs.train({"dirpath": out, "collect_chakra": True})
    assert files(out) == ["chakra/rank-0.json.gz", "pytorch_profile/rank-0.json.gz"]
    check_pair(out, 0, [10, 11])
    assert [(t["kind"], t["first_step"], t["last_step"], t["partial"]) for t in result["traces"]] == [
        ("kineto", 10, 11, False),
        ("chakra", 10, 11, False),
    ]


@pytest.mark.parametrize(("ranks", "profiled"), [([1], [1]), ([], [0, 1]), ("0-1:2", [0]), ([0, 0], [0])])
def test_ranks_of_a_ddp_training(out: Path, ranks: list[int] | str, profiled: list[int]) -> None:
    callback = {"dirpath": out, "collect_chakra": True, "profile_ranks": ranks}
    results = harness.succeed(harness.run(programs.train, callback, {"devices": 2, "strategy": "ddp"}, ranks=2))
    assert [result["batches"] for result in results] == [14, 14]
    assert [result["offences"] for result in results] == [[], []]
    assert files(out) == sorted(f"{kind}/rank-{r}.json.gz" for kind in ("chakra", "pytorch_profile") for r in profiled)
    for rank in profiled:
        check_pair(out, rank, [10, 11])
