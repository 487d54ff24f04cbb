"""Reading `profile_ranks`."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_chakra.recording.ranks import format_ranks, parse_ranks, resolve_ranks


@pytest.mark.parametrize(
    ("value", "world_size", "ranks"),
    [
        ([], 3, (0, 1, 2)),
        ("", 2, (0, 1)),
        (" ", 2, (0, 1)),
        ([1], 2, (1,)),
        ((0, 1), 2, (0, 1)),
        ({3, 1}, 4, (1, 3)),
        (frozenset([2]), 4, (2,)),
        (range(0, 8, 4), 8, (0, 4)),
        (range(0), 2, (0, 1)),
        ([3, 0, 3], 4, (0, 3)),
        (0, 2, (0,)),
        ("0", 2, (0,)),
        ("0,8-15", 16, (0, *range(8, 16))),
        (" 0 , 2 - 3", 4, None),
        (" 0 , 2-3 ", 4, (0, 2, 3)),
        ("0-255:8", 256, tuple(range(0, 256, 8))),
        ("0-10:4", 9, (0, 4, 8)),  # 9 and 10 are not among the named ones
        ("1-2,2-3,1", 4, (1, 2, 3)),
        ("5-5", 6, (5,)),
        ("0-100000000000:100000000000", 10**12, (0, 10**11)),
    ],
)
def test_values(value: Any, world_size: int, ranks: tuple[int, ...] | None) -> None:
    if ranks is None:
        with pytest.raises(ValueError, match="cannot read"):
            parse_ranks(value)
    else:
        assert resolve_ranks(parse_ranks(value), world_size) == ranks


@pytest.mark.parametrize(
    "value", ["-1", "0,-1", "a", "0;1", "0,", ",", "0..3", "1-", "-3", "0-3:", "0-3:-1", "0:2", "1.0", "٣"]
)
def test_a_malformed_string_is_told_with_the_rule(value: str) -> None:
    with pytest.raises(ValueError, match="cannot read") as caught:
        parse_ranks(value)
    message = str(caught.value)
    assert f"`profile_ranks={value!r}`" in message
    assert '"0-255:8"' in message  # the way out


@pytest.mark.parametrize(
    ("value", "error", "told"),
    [
        ("3-1", ValueError, "the range '3-1' ends before it begins"),
        ("0-3:0", ValueError, "the stride of '0-3:0' must be at least 1"),
        ([0, -1], ValueError, "rank -1 is negative"),
        (-1, ValueError, "rank -1 is negative"),
        ([0, "1"], TypeError, "a list of global ranks such as [0, 8]"),
        ([0.0], TypeError, "a list of global ranks"),
        ([True], TypeError, "a list of global ranks"),
        (True, TypeError, "a list of global ranks"),
        (None, TypeError, "empty means all ranks"),
        ({0: 1}, TypeError, "a list of global ranks"),
        ({"0"}, TypeError, "a list of global ranks"),
        (b"0", TypeError, "a list of global ranks"),
    ],
)
def test_other_wrong_values_are_told(value: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error) as caught:
        parse_ranks(value)
    assert told in str(caught.value)
    assert f"`profile_ranks={value!r}`" in str(caught.value)


@pytest.mark.parametrize("value", [[0, 7], "7", "0-7", "0-1,7-63:8"])
def test_a_rank_that_this_training_does_not_have(value: Any) -> None:
    with pytest.raises(ValueError, match="profile_ranks") as caught:
        resolve_ranks(parse_ranks(value), 4)
    assert "world_size=4" in str(caught.value)
    assert "0 to 3" in str(caught.value)
    assert ("rank 63" if "63" in value else "rank 7") in str(caught.value)


@given(st.sets(st.integers(0, 64)))
def test_formatting_is_the_inverse_of_reading(ranks: set[int]) -> None:
    text = format_ranks(sorted(ranks))
    if ranks:
        assert resolve_ranks(parse_ranks(text), 65) == tuple(sorted(ranks))
    else:
        assert text == ""


@pytest.mark.parametrize(
    ("ranks", "text"), [([0, 1], "0,1"), ([0, 1, 2], "0-2"), ([0, 8, 16, 24], "0-24:8"), ([0, 4, 5, 6], "0,4-6")]
)
def test_formatting_is_short(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text
