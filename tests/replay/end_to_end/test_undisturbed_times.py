"""Times of a run computed from typical times of its forward passes."""

import pytest

from replay.end_to_end.model_clock import RunTimes
from replay.end_to_end.predicted_times import RUN
from replay.end_to_end.undisturbed_times import by_round, delayed


def test_delays_of_single_forwards_do_not_count() -> None:
    quiet = [2.0, 2.0, 2.0, 2.0]
    first, second = [9.0, 2.0, 2.0, 2.0], [2.0, 2.0, 7.0, 2.0]
    rounds = [RunTimes(sum(each) + 1, {"decode": each}) for each in (quiet, first, second)]
    assert by_round(rounds) == {"decode": [2, 2, 2], RUN: [9, 9, 9]}


def test_steady_slowdown_of_a_forward_counts() -> None:
    forwards = [2.0, 2.0, 10.0, 2.0, 2.0]
    rounds = [RunTimes(20.0, {"decode": forwards})] * 3
    assert by_round(rounds) == {"decode": [pytest.approx(3.6)] * 3, RUN: [pytest.approx(20)] * 3}


def test_a_slower_round_counts() -> None:
    forwards = [1.0, 3.0]
    rounds = [
        RunTimes(5 * pace, {"denoise": [pace * each for each in forwards]})
        for pace in (1.0, 1.5, 1.1, 1.0)
    ]
    found = by_round(rounds)
    assert found["denoise"] == pytest.approx([2, 3, 2.2, 2])
    assert found[RUN] == pytest.approx([5, 7.5, 5.5, 5])


@pytest.mark.parametrize("other", [[5.0], [0.0, 0.0]])
def test_forwards_that_cannot_be_compared_are_averaged(other: list[float]) -> None:
    rounds = [RunTimes(9.0, {"decode": each}) for each in ([1.0, 3.0], other, other)]
    found = by_round(rounds)
    mean = sum(other) / len(other)
    assert found == {"decode": [2, mean, mean], RUN: [9, 9, 9]}


def test_a_phase_that_not_every_round_has_is_left_out() -> None:
    rounds = [RunTimes(9.0, {"decode": [1.0], "encode": [1.0]}), RunTimes(7.0, {"decode": [1.0]})]
    assert by_round(rounds) == {"decode": [1, 1], RUN: [9, 7]}


def test_share_of_delays_is_reported() -> None:
    forwards = ([2.0, 2.0, 2.0, 2.0], [2.0, 2.0, 7.0, 2.0], [2.0, 2.0, 2.0, 2.0])
    assert delayed([RunTimes(sum(each) + 1, {"decode": each}) for each in forwards]) == 5 / 32
    assert delayed([RunTimes(9.0, {"decode": [1.0]}, waited=3.0)]) == 0.25
