"""Replayed calls are matched to the counted calls that they represent."""

from typing import Any

import pytest
import torch

from capture.call.batch import Batch
from capture.call.shape import Shape
from capture.hooks.census import Census
from capture.hooks.interceptor import Arguments
from capture.hooks.modules import CallSite
from replay.plan.call_matching import CensusError, match
from replay.plan.cells import by_length, cells_of, cost_of
from replay.plan.plan import Budget
from replay.rows.row import CallFacts, Mask
from tests.factories import row

ALIKE: dict[str, Any] = {
    "query": (1, 4, 1, 32),
    "key": (1, 2, 64, 32),
    "value": (1, 2, 64, 16),
    "mask": None,
    "is_causal": False,
}


def census(*calls: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    """Return a capture's census of calls given as (module, phase, differences from `ALIKE`)."""
    made = Census()
    for module, phase, unlike in calls:
        sizes = {**ALIKE, **unlike}
        query, key, value = (torch.empty(sizes[name]) for name in ("query", "key", "value"))
        mask = None if sizes["mask"] is None else torch.ones(sizes["mask"], dtype=torch.bool)
        arguments = Arguments(query, key, value, mask, 0.0, sizes["is_causal"], None, True)
        made.add(CallSite(module, 0, phase), arguments)
    return made.to_json()


def call(
    name: str = "call", module: str = "layers.0", kv_len: int = 64, **unlike: Any
) -> CallFacts:
    fields: dict[str, Any] = {
        "phase": "decode",
        "shape": Shape(1, 4, 2, 1, kv_len, 32, 16),
        "dtype": "float32",
        **unlike,
    }
    return CallFacts(name, module=module, **fields)


def lengths(*kv_lens: int, module: str = "layers.0") -> dict[str, Any]:
    return census(
        *(
            (module, "decode", {"key": (1, 2, kv_len, 32), "value": (1, 2, kv_len, 16)})
            for kv_len in kv_lens
        )
    )


@pytest.mark.parametrize(
    "unlike",
    [
        {"phase": "prefill"},
        {"dtype": "bfloat16"},
        {"is_causal": True},
        {"mask": Mask("bool", (1, 1, 1, 64))},
        {"shape": Shape(1, 4, 2, 1, 64, 64, 16)},
        {"shape": Shape(1, 4, 4, 1, 64, 32, 16)},
        {"shape": Shape(1, 4, 2, 2, 64, 32, 16)},
    ],
)
def test_only_like_calls_stand_for_one_another(unlike: dict[str, Any]) -> None:
    assert match(lengths(64), [call()])[0].shares == {"call": 1}
    assert match(lengths(64), [call(**unlike)])[0].shares == {}


def test_a_mask_is_of_one_kind_and_size() -> None:
    masked = census(("layers.0", "decode", {"mask": (1, 1, 1, 64)}))
    assert match(masked, [call(mask=Mask("bool", (1, 1, 1, 64)))])[0].shares == {"call": 1}
    shorter = call(kv_len=60, mask=Mask("bool", (1, 1, 1, 60)))  # a mask grows with the keys
    assert match(masked, [shorter])[0].shares == {"call": 1}
    for mask in (None, Mask("float", (1, 1, 1, 64)), Mask("bool", (1, 4, 1, 64))):
        assert match(masked, [call(mask=mask)])[0].shares == {}


def test_the_module_itself_comes_before_the_others() -> None:
    calls = [call(name, f"layers.{layer}") for layer, name in enumerate("abc")]
    assert match(lengths(64), calls)[0].shares == {"a": 1}
    third = 1 / 3
    everyone = pytest.approx({"a": third, "b": third, "c": third})
    assert match(lengths(64, module="layers.7"), calls)[0].shares == everyone
    assert match(lengths(64), calls, own_first=False)[0].shares == everyone


def test_key_length_is_interpolated_and_never_extrapolated() -> None:
    calls = [call("short", kv_len=100), call("long", kv_len=200)]
    shares = [each.shares for each in match(lengths(100, 125, 240, 260, 81, 79), calls)]
    assert shares[0] == {"short": 1}
    assert shares[1] == pytest.approx({"short": 0.75, "long": 0.25})
    assert shares[2:] == [{"long": 1}, {}, {"short": 1}, {}]


def test_lengths_around_it_in_other_modules_come_before_a_near_one_in_its_own() -> None:
    calls = [call("own", kv_len=100), call("less", "layers.1", 88), call("more", "layers.2", 92)]
    assert match(lengths(90), calls)[0].shares == pytest.approx({"less": 0.5, "more": 0.5})
    assert match(lengths(80), calls)[0].shares == {"own": 1}


def batches(*lengths: int) -> dict[str, Any]:
    """Return the census of a layer that decodes two tokens over pages at each step."""
    made, table = Census(), torch.zeros(2, 1, dtype=torch.int32)
    pool = torch.zeros(1, 2, 4096, 32)
    for keys in lengths:
        arguments = Arguments.of(
            torch.zeros(1, 4, 2, 32),
            pool,
            pool[..., :16],
            None,
            cu_seqlens_q=torch.arange(3),
            seqused_k=torch.tensor([keys, keys]),
            page_table=table,
        )
        site = CallSite("layers.0", 0, "decode")
        made.add(site, arguments)
        found = Batch.of(arguments)
        assert found is not None
        made.add_batch(site.phase, made.count_of(site, arguments), found)
    return made.to_json()


def test_a_batch_takes_the_time_of_the_nearest_one_by_its_work() -> None:
    census = batches(100, 100, 150, 1000, 2000)
    calls = [
        call(
            name,
            f"layers.{keys}",
            8192,
            shape=Shape(1, 4, 2, 2, 8192, 32, 16),
            beyond="packed sequences, pages of 4096",
            batch=Batch((1, 1), (keys, keys)).size,
            has_window=False,
        )
        for name, keys in (("short", 100), ("long", 1000))
    ]
    (counted,) = match(census, calls)
    assert counted.shares == pytest.approx({"short": 3.5 / 5, "long": 3 / 5})
    rows = [row(name, call, ms) for call in calls for name, ms in (("old", 1.0), ("new", 0.5))]
    (cell,) = cells_of(rows, census, "old")
    assert by_length(cell) == [cell]
    cost = cost_of(cell, "new", Budget("cosine", 0.9))
    assert (cost.saved_ms, cost.choice.kv_lens) == (pytest.approx(5 * 1.3 * 0.5), None)
    assert cost.choice.has_window is False
    without_lengths = {**census, "batches": []}
    assert match(without_lengths, calls)[0].shares == {"short": 0.5, "long": 0.5}


def test_calls_that_no_row_can_be_like() -> None:
    """Recorded calls are four-dimensional, so no row is like a three-dimensional call."""
    counted = census(
        ("layers.0", "decode", {"query": (4, 1, 32), "key": (4, 64, 32), "value": (4, 64, 16)})
    )
    assert match(counted, [call()])[0].shares == {}
    with pytest.raises(CensusError, match="capture it again"):
        match({}, [call()])
