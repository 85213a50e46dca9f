"""Tests of the order in which one or several takers get calls."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from replay.workloads.random_calls import Spec
from replay.workloads.recorded import from_directory
from replay.workloads.schedule import Schedule
from replay.workloads.sources import CounterpartSource
from replay.workloads.workload import Workload, random_workload
from tests.factories import made_workload


def calls(lengths: Sequence[int]) -> list[Workload]:
    """Return calls of these lengths, named by place and length; each length is a form."""
    return [
        random_workload(f"{place}:{length}", "random", Spec(1, 2, 2, length, length, 32, 32), 0)
        for place, length in enumerate(lengths)
    ]


def taken(schedule: Schedule, takers: str) -> list[str]:
    """Return the names of the calls that takers get; each letter is a taker."""
    found = (schedule.take(taker) for taker in takers)
    return ["" if each is None else each.name for each in found]


def test_takers_keep_their_forms_and_then_help_others() -> None:
    schedule = Schedule(calls([64, 64, 64, 512, 4096, 4096]))
    assert taken(schedule, "abab") == ["0:64", "3:512", "1:64", "4:4096"]
    assert taken(schedule, "bb") == ["5:4096", "2:64"]
    assert taken(schedule, "ab") == ["", ""]


def test_long_calls_come_before_short_ones() -> None:
    schedule = Schedule(calls([64, 64, 512, 512, 4096]), seconds=[1, 1, 3, 3, 2])
    schedule.prefer(schedule.calls[0], "a")
    schedule.prefer(schedule.calls[2], "a")
    assert taken(schedule, "abab") == ["2:512", "4:4096", "3:512", "0:64"]


def test_taker_helps_with_the_form_that_takes_longest() -> None:
    schedule = Schedule(calls([64, 64, 64, 512, 512]), seconds=[1, 1, 1, 5, 5])
    assert taken(schedule, "abc") == ["3:512", "0:64", "4:512"]


def ends(schedule: Schedule, seconds: dict[str, float], takers: str) -> dict[str, float]:
    """Return the time at which each taker is done, if calls take the expected seconds."""
    at = dict.fromkeys(takers, 0.0)
    working = set(takers)
    while working:
        taker = min(working, key=lambda each: (at[each], each))
        call = schedule.take(taker)
        if call is None:
            working.remove(taker)
        else:
            at[taker] += seconds[call.name]
    return at


def test_long_calls_of_one_form_do_not_keep_one_taker_busy_at_the_end() -> None:
    some = calls([512, 4096, 1024, 2048] * 6)
    each = [7.5 if call.name.endswith("4096") else 2.2 for call in some]
    schedule = Schedule(some, seconds=each)
    for call, taker in zip(some, "abaa", strict=False):  # takers that compiled for each form
        schedule.prefer(call, taker)
    at = ends(schedule, {call.name: long for call, long in zip(some, each, strict=True)}, "ab")
    assert abs(at["a"] - at["b"]) <= 2.2


def test_lower_tier_comes_first() -> None:
    schedule = Schedule(calls([64, 64, 512, 512]), tiers=[0, 1, 0, 1])
    assert taken(schedule, "aaaa") == ["0:64", "2:512", "1:64", "3:512"]


def test_call_that_is_too_late_is_left_out() -> None:
    schedule = Schedule(calls([64, 512, 64]), is_in_time=lambda call: not call.name.endswith("512"))
    assert [each.name for each in schedule] == ["0:64", "2:64"]
    assert [each.name for each in schedule.left_out] == ["1:512"]
    assert schedule.waiting == 0


def test_returned_call_goes_to_another_taker() -> None:
    schedule = Schedule(calls([64]))
    call = schedule.take("a")
    schedule.give_back(call, "a")
    assert schedule.waiting == 1
    assert taken(schedule, "aba") == ["", "0:64", ""]


@pytest.mark.parametrize(
    ("change", "is_alike"),
    [
        ({"q_len": 80}, True),
        ({"q_len": 72}, False),
        ({"q_len": 144}, False),
        ({"head_dim": 64}, False),
        ({"is_causal": True}, False),
        ({"mask": "padding"}, False),
        ({"dtype": torch.float16}, False),
        ({"distribution": "sink"}, True),
    ],
)
def test_equal_forms_compile_alike(change: dict[str, object], is_alike: bool) -> None:
    spec = Spec(1, 2, 2, 64, 64, 32, 32)
    one, other = (
        random_workload("call", "random", each, 0).source.metadata()
        for each in (spec, replace(spec, **change))  # type: ignore[arg-type]
    )
    assert (one.form == other.form) == is_alike


def test_metadata_of_a_recorded_call_follow_from_its_header(recorded: object) -> None:
    found, _ = from_directory(str(recorded))
    first, second = (each.source.metadata() for each in found[:2])
    assert first.form == second.form
    assert (first.shape, first.module, second.module) == (
        found[0].load(torch.device("cpu")).shape,
        "layers.0",
        "layers.1",
    )
    assert CounterpartSource(found[0].source, "random", 0).metadata() == first


def test_unknown_calls_have_different_forms() -> None:
    one, other = (made_workload(name, lambda device: pytest.fail("loaded")) for name in ("a", "b"))
    assert one.source.metadata().shape is None
    assert one.source.metadata().form != other.source.metadata().form
