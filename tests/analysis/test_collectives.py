"""Collectives of several ranks, matched without a clock."""

from lightning_chakra.analysis.collectives import Call, Series, match, waits

GROUP: Series = ("0", "all_reduce")


def test_the_one_with_the_shortest_call_came_last_and_the_others_waited() -> None:
    # the clocks differ by a second; both leave at the same moment
    matched = match({0: {GROUP: [Call(0, 33)]}, 1: {GROUP: [Call(1_000_030, 3)]}})
    assert matched.matched_by == "order"
    assert waits(matched.instances) == {0: [(0, 30)], 1: []}


def test_calls_in_flight_at_once_wait_once() -> None:
    first, second = {0: Call(0, 33), 1: Call(30, 3)}, {0: Call(1, 33), 1: Call(31, 3)}
    assert waits([first, second])[0] == [(0, 31)]


def test_numbers_match_what_the_edge_of_the_window_cut_off() -> None:
    matched = match({0: {GROUP: [Call(0, 5, 7), Call(10, 9, 8)]}, 1: {GROUP: [Call(10, 2, 8)]}})
    assert matched.matched_by == "seq"
    assert matched.instances == ({0: Call(10, 9, 8), 1: Call(10, 2, 8)},)


def test_kernels_of_one_coalesced_collective_are_one() -> None:
    matched = match({0: {GROUP: [Call(0, 5, 7), Call(6, 3, 7)]}, 1: {GROUP: [Call(2, 1, 7)]}})
    assert matched.instances[0][0] == Call(0, 9, 7)


def test_differing_counts_without_numbers_are_told_not_guessed() -> None:
    matched = match({0: {GROUP: [Call(0, 5), Call(10, 5)]}, 1: {GROUP: [Call(0, 5)]}})
    assert matched.instances == ()
    assert matched.unmatched == ("0 all_reduce: rank 1 recorded 1 calls, rank 0 2, without numbers",)


def test_a_series_of_one_rank_is_told() -> None:
    matched = match({0: {GROUP: [Call(0, 5)]}, 1: {}})
    assert matched.unmatched == ("0 all_reduce: only rank 0 recorded it",)
