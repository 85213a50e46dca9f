"""Kernels that depend on the batch, or on chunks, are told from kernels that do not."""

import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attention_replay as ar
from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import FEATURES, AttentionVariant
from replay.diagnosis.agreements import CASES
from replay.diagnosis.derived_batches import alone, lengths, of_sequences
from replay.diagnosis.invariance import Case, Verdict, difference, examine_invariance
from replay.isolation.process_state import ProcessState
from replay.kernels.registry import Kernel
from tests.factories import normal, random_call, save_calls, settings
from tests.replay.diagnosis.test_examinations import BAD, RunCli
from tests.variant_calls import CALLS, bounded, mla_call, paged_call

ONE = {
    "one": random_call(q_len=7, origin={"module": "layers.3", "step": 2}),
    "one, sinks": random_call(q_len=5, kv_len=9, is_causal=True, sinks=normal(2)),
    "one, window": random_call(q_len=7, kv_len=9, variant=bounded(2, 0)),
    "one in pages": paged_call([9], 4, q_len=5),
}
SEVERAL = {
    "causal": random_call(batch=3, q_len=5, kv_len=5, is_causal=True, q_heads=4, kv_heads=2),
    "masked": random_call(batch=2, q_len=5, kv_len=7, attn_mask=normal(2, 1, 5, 7) > 0),
    "packed": CALLS["packed"],
    "packed, causal": CALLS["packed, causal bottom right"],
    "pages": paged_call([9, 3, 5], 4),
    "packed in pages": CALLS["paged, packed, bottom right, window"],
    "lengths": CALLS["key-lengths, bottom right"],
}
WHOLE = {
    "decode": random_call(q_len=1),
    "window both ways": CALLS["window both ways"],
    "mla": mla_call(16, q_len=1, dtype=torch.float32),
}
"""Calls whose queries are not divided into chunks."""
ALL = ONE | SEVERAL | WHOLE
SINGLE = {name for name, call in ALL.items() if len(lengths(call)) == 1}
UNEQUAL = {"packed", "packed, causal", "packed in pages"}
"""Calls whose sequences have different numbers of queries."""


def call_of(given: dict[str, Any]) -> AttentionCall:
    names = AttentionVariant().__dict__.keys() & given.keys()
    variant = AttentionVariant(**{name: given.pop(name) for name in names})
    return AttentionCall(**given, variant=variant)


def row_by_row(**given: Any) -> Tensor:
    """Attend with each query on its own, so that no bit depends on any other query."""
    call = call_of(given).without_pages()
    group, scale = call.shape.q_heads // call.shape.kv_heads, call.softmax_scale
    output = torch.zeros(*call.query.shape[:3], call.shape.v_head_dim)
    for b, h, i in itertools.product(*map(range, call.query.shape[:3])):
        first, end = (int(each[i]) for each in call.key_ranges.of(b))
        keys = torch.arange(first, end)
        if call.attn_mask is not None:
            keys = keys[call.attn_mask.expand(-1, call.shape.q_heads, -1, -1)[b, h, i, keys]]
        scores = (call.key[b, h // group, keys] * call.query[b, h, i]).sum(-1) * scale
        sink = [] if call.sinks is None else [call.sinks[h, None]]
        weights = torch.cat([scores, *sink]).softmax(0)[: len(keys)]
        output[b, h, i] = (weights[:, None] * call.value[b, h // group, keys]).sum(0)
    return output


def sequences(call: AttentionCall) -> float:
    return len(lengths(call))


def queries(call: AttentionCall) -> float:
    return call.variant.max_seqlen_q or max(queries for queries, _ in lengths(call))


def largest(name: str, call: AttentionCall) -> float:
    return float(getattr(call.without_pages(), name).abs().max())


def verdicts(
    call: AttentionCall, fault: Callable[[AttentionCall], float], features: Any = FEATURES
) -> dict[Case, Verdict]:
    """Return the verdicts on a kernel that multiplies right outputs by 1 + a fault / 100."""

    def attention(**given: Any) -> Tensor:
        return row_by_row(**given) * (1 + fault(call_of(given)) / 100)

    kernel = Kernel("planted", attention, features=frozenset(features))
    return examine_invariance(kernel, call, settings(), ProcessState(), 2)


@pytest.mark.parametrize(
    ("fault", "differing"),
    [
        (lambda call: 0.0, {}),
        (sequences, {"alone": ALL.keys() - SINGLE, "company": SINGLE}),
        (queries, {"alone": UNEQUAL, "chunked": ALL.keys() - WHOLE.keys()}),
        (functools.partial(largest, "query"), {"company": ALL.keys()}),
        (functools.partial(largest, "key"), {"company": ALL.keys()}),
        (functools.partial(largest, "value"), {"company": ALL.keys()}),
    ],
    ids=["none", "sequences", "queries", "query", "key", "value"],
)
def test_fault_is_found_in_its_cases(fault: Any, differing: dict[Case, set[str]]) -> None:
    found = {name: verdicts(call, fault) for name, call in ALL.items()}
    for name, of_call in found.items():
        expected = {"repeated", "company"}
        expected |= set() if name in SINGLE else {"alone"}
        expected |= set() if name in WHOLE else {"chunked"}
        assert of_call.keys() == expected, name
    # The largest value may also be that of another chunk or sequence.
    is_of_values = isinstance(fault, functools.partial)
    for case in ("repeated", "company") if is_of_values else CASES:
        outcomes = {name: each[case].outcome for name, each in found.items() if case in each}
        wrong = set(differing.get(case, ()))
        assert outcomes == {n: "differs" if n in wrong else "equal" for n in outcomes}, case
        assert wrong <= outcomes.keys()


@pytest.mark.parametrize(("right", "repeated"), [(0, "differs"), (2, "equal")])
def test_random_kernel_is_not_called_dependent_on_the_batch(right: int, repeated: str) -> None:
    calls = itertools.count()
    found = verdicts(ONE["one"], lambda call: next(calls) * (next(calls) >= 2 * right))
    assert {case: each.outcome for case, each in found.items() if case != "alone"} == {
        "repeated": repeated,
        **dict.fromkeys(("company", "chunked"), "inconclusive"),
    }


def test_refused_causal_chunk_gets_a_mask() -> None:
    call = SEVERAL["causal"]
    assert verdicts(call, lambda call: 0.0, features=())["chunked"].outcome == "equal"
    found = verdicts(call, lambda call: float(call.attn_mask is not None), features=())
    place = "sequence 0 in a chunk from query 2 with a mask in place of causality: "
    assert found["chunked"].sentence.startswith(place)


def test_packed_call_with_a_mask_is_only_repeated() -> None:
    call = replace(CALLS["packed"], attn_mask=normal(1, 1, 16, 24) > 0)
    assert verdicts(call, sequences) == {"repeated": Verdict("equal")}


def test_whole_batch_is_the_recorded_call() -> None:
    for call in ALL.values():
        whole = of_sequences(call, range(len(lengths(call))))
        for name, tensor in call.tensors().items():
            assert torch.equal(getattr(whole, name), tensor)
        assert whole.variant == call.variant
    assert [trial.expected.position for trial in alone(SEVERAL["pages"])] == [0, 2]


def test_difference_names_the_first_element_and_the_largest_difference() -> None:
    expected = torch.zeros(2, 3, 4, 5)
    output = expected.clone()
    output[1, 0, 2, 3], output[1, 2, 0, 0] = 0.5, -2.0
    assert difference(output, expected) == (
        "first at sequence 1, head 0, query 2, element 3: 0.5 != 0, 2 of 120 elements, largest "
        "difference 2"
    )
    assert difference(-expected, expected)  # -0
    nan = torch.full_like(expected, torch.nan)
    assert not difference(nan, nan.clone())


def by_batch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Sum in an order that depends on the batch."""
    return torch.nn.functional.scaled_dot_product_attention(query, key, value) + len(query)


@pytest.mark.parametrize(
    ("kernel", "call", "code", "printed"),
    [
        (f"{__file__}:by_batch", "one", 1, "differs on 1 call: model-000000, layers.3, step 2: "),
        ("eager", "decode", 0, "1 of 1"),
        ("torch-math", "packed", 3, "repeated: refused on 1 call: "),
    ],
)
def test_exit_code_and_table(
    kernel: str, call: str, code: int, printed: str, tmp_path: Path, run_cli: RunCli
) -> None:
    directory, file = save_calls(tmp_path / "calls", [ALL[call]]), tmp_path / "verdicts.json"
    asked = f"agree --dir {directory} --kernels {kernel} --device cpu --in-process --json {file}"
    found, out, err = run_cli(*asked.split())
    assert (found, printed in out) == (code, True), out + err
    assert json.loads(file.read_text())[0]["kernel"] == kernel


@pytest.mark.slow
def test_crash_costs_one_row() -> None:
    found = ar.agree([ONE["one"]], [f"{BAD}:segfault", "eager"], device="cpu", progress=False)
    crash, other = found.found
    assert crash.verdicts["repeated"].outcome == "failed"
    assert {each.outcome for each in other.verdicts.values()} == {"equal"}
