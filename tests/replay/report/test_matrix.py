"""One matrix of kernels and kinds of call, and the answer that follows from it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from capture.call.batch import Batch
from replay.report.answer import answer
from replay.report.matrix import matrix
from replay.rows.row import Row
from replay.timing.statistics import paired_speedup
from tests.factories import accuracy, call_facts, errors, row, speedup_over

BASE = (1.0,) * 10
BUSY = "unconfirmed: other programs interrupted its blocks; run this again"


def on(call: str, kernel: str, ms: float | Sequence[float] = 1.0, **fields: Any) -> Row:
    """Return a kernel's row on a call of its own kind, paired with a baseline of 1 ms."""
    times = [ms] * 10 if isinstance(ms, float) else ms
    if kernel != "base":
        fields = {
            "speedup": speedup_over("base", paired_speedup(BASE[: len(times)], times)),
            **fields,
        }
    fields.setdefault("accuracy_class", "exact")
    kv_len = {"a": 64, "b": 128, "c": 256}[call]
    return row(kernel, call_facts(call, kv_len=kv_len, model="flux"), times, **fields)


def quantised(call: str, kernel: str, ms: float) -> Row:
    found = accuracy(replace(errors(), relative_l1=0.031))
    return on(call, kernel, ms, accuracy=found, accuracy_class="quantised")


@pytest.mark.parametrize(
    ("outcome", "of_row"),
    [
        ("faster", {"ms": 0.5}),
        ("slower", {"ms": 2.0}),
        ("same", {}),
        ("inconclusive", {"ms": (0.95, 1.05) * 5}),
        ("inconclusive", {"ms": (0.4, 5.0) * 5}),
        ("inconclusive", {"ms": 0.5, "flags": (BUSY,)}),
        ("wrong", {"ms": 0.1, "status": "inaccurate", "reason": "exceeds"}),
        ("wrong", {"ms": 0.1, "changed_inputs": ("attn_mask",)}),
        ("wrong", {"status": "error", "reason": "TypeError: …"}),
        ("cannot", {"status": "unsupported", "reason": "no masks"}),
    ],
)
def test_cell_has_the_outcome_of_its_rows(outcome: str, of_row: dict[str, Any]) -> None:
    rows = [on("a", "base"), on("a", "mine", **of_row), on("b", "base")]
    found = matrix(rows)
    mine = next(kernel for kernel in found.kernels if kernel.name == "mine")
    here, elsewhere = found.row(mine)
    assert here.outcome == outcome
    assert elsewhere.outcome == "cannot"
    assert bool(here.reason) == (outcome in ("wrong", "cannot", "inconclusive"))


def test_fastest_correct_kernels_come_first() -> None:
    rows = [
        on("a", "unable", status="unavailable"),
        on("a", "wrong", 0.1, status="inaccurate"),
        on("a", "noisy", (0.1, 5.0) * 5),
        on("a", "slow", 2.0),
        on("a", "base"),
        on("a", "fast", 0.5),
    ]
    names = [kernel.name for kernel in matrix(rows).kernels]
    assert names == ["fast", "base", "slow", "noisy", "wrong", "unable"]


FAST = [on("a", "mine", 0.5), on("b", "mine", 0.8)]


@pytest.mark.parametrize(
    ("rivals", "expected"),
    [
        ([on("a", "mine"), on("b", "mine", 2.0)],
         "Keep base: no kernel tested is faster in any of 3 kinds of call."),
        ([quantised("a", "sage", 2.0)],
         "Keep base: no other exact kernel was tested."),
        ([on("a", "mine", status="error")],
         "Keep base: no other exact kernel tested ran correctly."),
        (FAST, "mine: 1.25× to 2.00× in 2 of 3 kinds of call; elsewhere keep base."),
        ([*FAST, on("c", "other", 0.5), on("a", "other", 0.9)],
         "mine: 1.25× to 2.00× in 2 of 3 kinds of call, other: 2.00× in 1 of 3 kinds of call, "
         "same output."),
        ([on("a", "mine", 0.5), on("b", "mine", 0.5, status="inaccurate")],
         "Keep base: mine is faster in 1 of 3 kinds of call, but wrong or failing in 1."),
        ([on("a", "mine", 0.5, flags=(BUSY,))],
         "Undecided in 1 of 3 kinds of call (busy machine): no exact kernel is shown to be faster "
         "than base."),
        ([on("a", "mine", (0.99, 1.05) * 5), on("b", "mine", 2.0)],
         "Keep base: no kernel tested is faster in any of 3 kinds of call."),
        ([on("a", "mine", 0.5, flags=(BUSY,)), quantised("a", "sage", 0.5)],
         "Keep base: no exact kernel is shown to be faster in any of 3 kinds of call. sage is "
         "2.00× in 1 of 3 kinds of call, quantised: relative error 3.1e-02."),
        ([on("a", "mine"), quantised("a", "sage", 2.0),
          on("a", "few", 0.1, accuracy_class="sparse")],
         "Keep base: no kernel tested is faster in any of 3 kinds of call."),
        ([*FAST, quantised("a", "sage", 0.6), quantised("b", "sage", 0.4)],
         "mine: 1.25× to 2.00× in 2 of 3 kinds of call; elsewhere keep base. sage is 2.50× in 1 of "
         "3 kinds of call, quantised: relative error 3.1e-02."),
    ],
)  # fmt: skip
def test_answer_names_only_kernels_that_gain(rivals: list[Row], expected: str) -> None:
    assert answer(matrix([*(on(call, "base") for call in "abc"), *rivals])) == expected


def test_answer_of_all_kinds_counts_none() -> None:
    def answered(calls: str, **times: float) -> str:
        kernels = {"base": 1.0, **times}
        return answer(matrix([on(call, *each) for call in calls for each in kernels.items()]))

    assert answered("ab", mine=0.8) == "mine: 1.25× in both kinds of call, same output."
    assert answered("abc", mine=0.8) == "mine: 1.25× in all 3 kinds of call, same output."
    assert answered("ab", mine=2.0) == (
        "Keep base: no kernel tested is faster in either kind of call."
    )


def test_answer_of_one_kind_names_its_model() -> None:
    assert answer(matrix([on("a", "base"), on("a", "mine", 0.8)])) == (
        "mine: 1.25× in flux, same output."
    )
    wrong = on("a", "mine", status="inaccurate", speedup=None)
    found = matrix([on("a", "base"), wrong])
    assert [cell.outcome for cell in found.cells.values()] == ["baseline", "wrong"]
    assert answer(found) == "Keep base: no other exact kernel tested ran correctly."
    failed = on("a", "torch-default", status="error", speedup=None)
    assert answer(matrix([failed, on("a", "mine", speedup=None)])) == (
        "Only mine ran correctly, so nothing is compared."
    )
    beyond = on("a", "torch-default", status="unsupported", speedup=None)
    assert [
        cell.outcome
        for cell in matrix([beyond, on("a", "torch-masked", speedup=None)]).cells.values()
    ] == ["cannot", "baseline"]
    assert answer(matrix([on("a", "mine", status="inaccurate")])) == (
        "No kernel tested ran correctly."
    )


def test_batches_of_an_engine_share_kinds_by_phase_and_figures() -> None:
    sizes = [  # phase, queries, keys
        ("mixed", (1, 1, 500), (90, 100, 500)),
        ("decode", (1,) * 14, (1000,) * 14),
        ("decode", (1,) * 16, (500, 1500) * 8),
        ("decode", (1,) * 17, (1000,) * 17),
        ("decode", (1,) * 14, (20_000,) * 14),
        ("prefill", (2048,), (2048,)),
        ("extend", (1,), (2049,)),
    ]
    rows = [
        row("mine", call_facts(f"{at}", "attn", phase, kv_len=at, batch=Batch(*lengths).size), 1.0)
        for at, (phase, *lengths) in enumerate(sizes)
    ]
    titles = [(kind.phase, kind.shape) for kind in matrix(rows).kinds]
    assert titles == [
        ("decode", "14…16 sequences × 1,000 keys, 2×32"),
        ("decode", "14 sequences × 20,000 keys, 2×32"),
        ("decode", "17 sequences × 1,000 keys, 2×32"),
        ("extend", "1 query × 2,049 keys, 2×32"),
        ("mixed", "3 sequences × 502 queries, 2×32"),
        ("prefill", "2,048 queries × 2,048 keys, 2×32"),
    ]
