"""Choices of a plan, for hand-made censuses and rows."""

import math
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

import pytest

from replay.accuracy.errors import compare
from replay.plan.call_matching import CensusError
from replay.plan.cells import error_energy
from replay.plan.choose import choose
from replay.plan.plan import Budget, PlanError
from replay.plan.step_ranges import StepRange
from replay.plan.uniform import Uniform, uniform
from replay.rows.errors_of_output import Accuracy
from replay.rows.row import Machine, Row, Status
from replay.timing.statistics import paired_speedup
from tests.factories import accuracy, census, errors, normal, row, speedup_over
from tests.factories import call_facts as facts

COSINE = Budget("cosine", 0.99)
CALL = facts("a", "layers.0")
ONE_LAYER = census(("layers.0", "denoise", 64, 1))
TWO_LAYERS = census(("layers.0", "denoise", 64, 1), ("layers.1", "denoise", 64, 1))


def judged(**figures: float) -> Accuracy:
    return accuracy(errors(**figures))


def chosen(rows: Sequence[Row], counted: dict[str, Any], budget: Budget = COSINE) -> dict[str, str]:
    return {each.module: each.kernel for each in choose(rows, counted, budget, "old").choices}


def test_the_fastest_inside_the_budget_at_each_layer() -> None:
    a, b, c = facts("a", "layers.0"), facts("b", "layers.1"), facts("c", "layers.2")
    rows = []
    for call, fast, middling in ((a, 0.999, 0.999), (b, 0.98, 0.995), (c, 0.9, 0.9)):
        rows += [
            row("old", call, 10.0),
            row("middling", call, 8.0, accuracy=judged(cosine=middling)),
            row("fast", call, 5.0, accuracy=judged(cosine=fast)),
        ]
    counted = census(*((f"layers.{layer}", "denoise", 64, 10) for layer in range(3)))
    plan = choose(rows, counted, COSINE, "old")
    assert [each.kernel for each in plan.choices] == ["fast", "middling", "old"]
    assert [each.saved_ms for each in plan.choices] == pytest.approx([50, 20, 0])
    assert plan.saved_ms == pytest.approx(70)
    assert plan.kernels == ["fast", "middling"]
    assert all(each.covered and each.inside for each in plan.choices)
    first = plan.choices[0]
    assert (first.time_ms, first.baseline_ms) == pytest.approx((5, 10))
    assert (first.calls, first.captured) == (10, 1)
    assert first.worst is not None
    assert first.worst.cosine == 0.999
    assert plan.kernel_at("layers.1", "denoise", 64, 0) == "middling"
    assert plan.kernel_at("layers.1", "encode", 64, 0) == "old"


@pytest.mark.parametrize(
    ("short", "long", "expected"),
    [
        (0.999, 0.999, [("new", (4, 80))]),
        (0.9, 0.999, [("old", (4, 4)), ("new", (60, 80))]),
        (0.999, 0.9, [("new", (4, 4)), ("old", (60, 80))]),
    ],
)
def test_lengths_of_a_layer_have_their_own_kernels(
    short: float, long: float, expected: list[tuple[str, tuple[int, int]]]
) -> None:
    rows = []
    for name, kv_len, cosine in (("a", 4, short), ("b", 77, long)):
        call = facts(name, kv_len=kv_len)
        rows += [row("old", call, 10.0), row("new", call, 5.0, accuracy=judged(cosine=cosine))]
    counted = census(*(("layers.0", "denoise", kv_len, 3) for kv_len in (77, 4, 60, 80)))
    plan = choose(rows, counted, COSINE, "old")
    assert [(each.kernel, each.kv_lens) for each in plan.choices] == expected
    assert sum(each.calls for each in plan.choices) == 12
    for kernel, ends in expected:
        assert {plan.kernel_at("layers.0", "denoise", kv_len, 0) for kv_len in ends} == {kernel}


def test_baseline_of_a_layer_is_the_kernel_that_the_model_ran() -> None:
    """The first layer pins `math`, the second calls SDPA, and the third calls a library."""
    calls = [
        facts("a", "layers.0", pinned="math"),
        facts("b", "layers.1"),
        facts("c", "layers.2", pinned="fa2", entry_point="flash_attn"),
    ]
    times = {"old": 5.0, "new": 5.1, "math": 20.0, "fa2": 8.0}
    rows = [row(kernel, call, ms) for call in calls for kernel, ms in times.items()]
    counted = census(*((f"layers.{layer}", "denoise", 64, 1) for layer in range(3)))
    plan = choose(rows, counted, COSINE, "old")
    # Plain SDPA, `old`, would run `math` in the first layer.
    assert [each.kernel for each in plan.choices] == ["new", "old", "old"]
    assert [each.baseline for each in plan.choices] == ["math", "old", "fa2"]
    assert [each.saved_ms for each in plan.choices] == pytest.approx([14.9, 0, 3])
    assert plan.kernels == ["new", "old"]


@pytest.mark.parametrize(
    ("metric", "good", "bad", "limit"),
    [
        ("cosine", 0.999, 0.9, 0.95),
        ("relative_l1", 0.01, 0.2, 0.1),
        ("rmse", 0.01, 0.2, 0.1),
        ("cosine", 0.999, math.nan, 0.95),
        ("rmse", 0.01, math.nan, 0.1),
    ],
)
def test_the_worst_call_decides(metric: str, good: float, bad: float, limit: float) -> None:
    calls = [facts(name, "layers.0") for name in "ab"]
    counted = census(("layers.0", "denoise", 64, 2))
    budget = Budget(metric, limit)
    for figures, kernel in (((good, good), "new"), ((good, bad), "old"), ((bad, good), "old")):
        rows = [row("old", call, 10.0) for call in calls]
        rows += [
            row("new", call, 5.0, accuracy=judged(**{metric: figure}))
            for call, figure in zip(calls, figures, strict=True)
        ]
        assert chosen(rows, counted, budget) == {"layers.0": kernel}
        worst = uniform(rows, counted, budget, "old")[1].worst_figure
        assert worst == pytest.approx(good if kernel == "new" else bad, nan_ok=True)


@pytest.mark.parametrize("status", ["inaccurate", "unsupported", "crash", "error", "not-timed"])
def test_a_kernel_that_is_not_ok_on_one_call_is_not_chosen_there(status: Status) -> None:
    """The kernel may still be chosen for other calls."""
    a, b, other = facts("a", "layers.0"), facts("b", "layers.0"), facts("c", "layers.1")
    rows = [row("old", call, 10.0) for call in (a, b, other)]
    rows += [row("new", call, 5.0) for call in (a, other)]
    rows.append(row("new", b, 5.0 if status == "inaccurate" else None, status))
    counted = census(("layers.0", "denoise", 64, 2), ("layers.1", "denoise", 64, 1))
    assert chosen(rows, counted) == {"layers.0": "old", "layers.1": "new"}


def test_unconfirmed_kernel_is_not_chosen() -> None:
    claimed = row("new", CALL, 5.0)
    assert chosen([row("old", CALL, 10.0), claimed], ONE_LAYER) == {"layers.0": "new"}
    claimed = replace(claimed, flags=("unconfirmed: …",))
    assert chosen([row("old", CALL, 10.0), claimed], ONE_LAYER) == {"layers.0": "old"}


def test_ties_take_the_first_and_the_baseline_before_all() -> None:
    wide, narrow = (4.0, 6.0, 5.0, 3.9, 6.1) * 2, (5.0, 4.0, 6.0, 5.9, 4.0) * 2
    new, newer = row("new", CALL, wide), row("newer", CALL, narrow)
    old = row("old", CALL, 10.0)
    assert chosen([new, newer, old], ONE_LAYER) == {"layers.0": "new"}
    assert chosen([newer, new, old], ONE_LAYER) == {"layers.0": "newer"}
    old = row("old", CALL, (5.5, 4.4, 6.4, 3.8, 5.0) * 2)
    assert chosen([new, newer, old], ONE_LAYER) == {"layers.0": "old"}
    fast = row("fast", CALL, 1.0)
    *_, tied, faster = uniform([old, new, fast], ONE_LAYER, COSINE, "old")
    assert (tied.saved_ms, tied.undecided) == (0.0, 1)
    assert faster.saved_ms
    assert faster.undecided == 0


def test_choices_have_the_times_of_other_exact_kernels_that_may_run_there() -> None:
    """`coarse` is quantised, and `wrong` outside the budget; the second layer was not captured."""
    cosine = {"old": 1.0, "near": 1.0, "fast": 1.0, "coarse": 1.0, "wrong": 0.9}
    times = {"old": 10.0, "near": 9.0, "fast": 5.0, "coarse": 4.0, "wrong": 3.0}
    rows = [
        row(kernel, CALL, ms, accuracy=judged(cosine=cosine[kernel]), accuracy_class="exact")
        for kernel, ms in times.items()
    ]
    rows[3] = replace(rows[3], accuracy_class="quantised")
    first, second = choose(rows, TWO_LAYERS, COSINE, "old").choices
    assert (first.kernel, first.others) == ("coarse", {"near": 1.0, "fast": 5.0})
    assert (second.kernel, second.others) == ("old", {"near": 1.0, "fast": 5.0, "wrong": 7.0})
    rows[1] = row("near", CALL, 10.01, accuracy_class="exact")
    assert choose(rows, ONE_LAYER, COSINE, "old").choices[0].others == {"near": 0.0, "fast": 5.0}


def test_a_slower_kernel_of_another_process_does_not_tie() -> None:
    old = row("old", CALL, 10.0, accuracy_class="exact", process="one")
    rows = [
        row(
            *(kernel, CALL, ms),
            accuracy_class="exact",
            process="two",
            speedup=speedup_over("old", paired_speedup([10.0] * 10, [ms] * 10)),
        )
        for kernel, ms in (("slow", 20.0), ("same", 10.01))
    ]
    assert choose([old, *rows], ONE_LAYER, COSINE, "old").choices[0].others == {
        "slow": -10.0,
        "same": 0.0,
    }
    _, slow, same = uniform([old, *rows], ONE_LAYER, COSINE, "old")
    assert (slow.saved_ms, slow.undecided) == (-10.0, 0)
    assert (same.saved_ms, same.undecided) == (0.0, 1)


@pytest.mark.parametrize(
    ("ms", "fields"),
    [
        (None, {"status": "unsupported"}),
        (5.0, {"status": "inaccurate"}),
        (5.0, {"changed_inputs": ("query", "key")}),
    ],
)
def test_others_leave_out_kernels_that_must_not_run_the_calls_of_a_layer(
    ms: float | None, fields: dict[str, Any]
) -> None:
    """The second layer was not captured, so calls of the first one represent its calls."""
    call = facts("a", "layers.0", "decode")
    rows = [row("old", call, 10.0), row("new", call, ms, accuracy_class="exact", **fields)]
    counted = census(("layers.0", "decode", 64, 1), ("layers.1", "decode", 64, 1))
    assert [each.others for each in choose(rows, counted, COSINE, "old").choices] == [{}, {}]


def test_a_slower_kernel_is_chosen_where_the_baseline_is_outside() -> None:
    counted = census(("layers.0", "denoise", 64, 3))
    rows = [row("old", CALL, 10.0, accuracy=judged(cosine=0.9)), row("careful", CALL, 20.0)]
    plan = choose(rows, counted, COSINE, "old")
    assert plan.choices[0].kernel == "careful"
    assert plan.saved_ms == pytest.approx(-30)
    rows[1] = row("careful", CALL, 20.0, accuracy=judged(cosine=0.9))
    plan = choose(rows, counted, COSINE, "old")
    assert (plan.choices[0].kernel, plan.choices[0].inside) == ("old", False)
    rows[1] = row("careful", CALL, 10.0)
    assert choose(rows, counted, COSINE, "old", total_error=1).choices[0].kernel == "careful"


def test_a_layer_that_was_not_captured_keeps_the_baseline() -> None:
    rows = [row("old", CALL, 10.0), row("new", CALL, 5.0)]
    plan = choose(rows, TWO_LAYERS, COSINE, "old")
    assert [(each.kernel, each.covered) for each in plan.choices] == [("new", True), ("old", False)]
    assert plan.choices[1].worst is None
    assert plan.choices[1].baseline_ms == 10
    assert plan.saved_ms == pytest.approx(5)


def test_equal_layers_do_not_choose_unequally_by_chance() -> None:
    """The fastest kernel differs between the layers; over both layers, `new` is the fastest."""
    a, b = CALL, facts("b", "layers.1")
    rows = [row("old", a, 10.0), row("new", a, 5.0), row("newer", a, 6.0)]
    rows += [row("old", b, 10.0), row("new", b, 4.0), row("newer", b, 3.9)]
    assert set(chosen(rows, TWO_LAYERS).values()) == {"new"}


@pytest.mark.parametrize(
    ("against", "chosen"), [([10.0] * 10, "alone"), ([5.1] * 10, "old"), ([10.0] * 5, "old")]
)
def test_rounds_of_two_processes_are_not_paired(against: list[float], chosen: str) -> None:
    """A kernel with its own worker is rated by its speed-up over the baseline in that worker."""
    rows = [row("old", CALL, 10.0), row("alone", CALL, 5.0)]
    over = speedup_over("old", paired_speedup(against, [5.0, 5.2] * 5))
    rows[1] = replace(rows[1], process="alone", speedup=over)
    plan = choose(rows, census(("layers.0", "denoise", 64, 8)), Budget("cosine", 0.9), "old")
    assert plan.choices[0].kernel == chosen


def test_kernels_that_run_elsewhere_or_nowhere_are_left_out() -> None:
    rows = [row("old", CALL, 10.0), row("new", CALL, 5.0, environment="other")]
    rows.append(row("far", CALL, None, "unavailable", "needs a CUDA GPU"))
    assert chosen(rows, ONE_LAYER) == {"layers.0": "old"}
    assert [each.kernel for each in uniform(rows, TWO_LAYERS, COSINE, "old")] == ["old"]


def test_each_kernel_is_evaluated_at_every_layer() -> None:
    names = [f"layers.{layer}" for layer in range(6)]
    calls = [facts(name, name) for name in names[:5]]
    rows = [row("old", call, 10.0) for call in calls]
    for call, cosine in zip(calls[:3], (1.0, 0.995, 0.9), strict=True):
        rows.append(row("new", call, 5.0, accuracy=judged(cosine=cosine)))
    rows += [row("new", call, None, "unsupported", "takes no mask") for call in calls[3:]]
    rows += [row("wrong", call, 1.0) for call in calls[:3]]
    rows += [row("wrong", calls[3], 1.0, "inaccurate", "far off", accuracy=judged(cosine=0.2))]
    rows += [row("wrong", calls[4], None, "crash", "SIGSEGV")]
    counted = census(*((name, "denoise", 64, 10) for name in names))
    old, new, wrong = uniform(rows, counted, COSINE, "old")
    assert old == Uniform("old", 0.0, 5, 0, 0, 0, 1, "layers.0", "denoise", 1.0)
    # Swapped at layers 0-2 and, by assumption, at layer 5, which was not captured.
    assert new.saved_ms == pytest.approx(4 * 10 * 5)
    assert (new.inside, new.outside, new.falls_back, new.failed) == (2, 1, 2, 0)
    assert (new.worst_module, new.worst_figure) == ("layers.2", 0.9)
    assert wrong.saved_ms is None
    assert (wrong.inside, wrong.outside, wrong.failed, wrong.not_captured) == (3, 1, 1, 1)
    assert (wrong.worst_module, wrong.worst_figure) == ("layers.3", 0.2)


def test_a_plan_names_the_device_of_its_timed_rows() -> None:
    rows = [row("old", ms=10.0, machine=Machine("H100")), row("absent", status="unavailable")]
    assert choose(rows, ONE_LAYER, COSINE, "old").device == "H100"
    rows.append(row("new", ms=1.0, machine=Machine("H200")))
    with pytest.raises(PlanError, match="the rows were measured on H100, H200: make one from"):
        choose(rows, ONE_LAYER, COSINE, "old")


def test_rows_that_make_no_plan() -> None:
    rows = [row("old", CALL, 10.0), row("new", CALL, 5.0)]
    pinned = row("new", replace(CALL, pinned="vllm-flash_attn"), 5.0)
    for few, own in ((rows[1:], "old"), ([], "old"), ([pinned], "vllm-flash_attn")):
        with pytest.raises(PlanError, match=f"own attention, and {own} was not timed: add it to"):
            choose(few, ONE_LAYER, COSINE, "old")
    random = row("old", replace(CALL, name="a-random", weights="none"), 10.0)
    with pytest.raises(PlanError, match=r"model \(random\), model \(none\)"):
        choose([*rows, random], ONE_LAYER, COSINE, "old")
    with pytest.raises(CensusError):
        choose(rows, {}, COSINE, "old")


def test_plan_has_one_of_the_exclusive_kernels() -> None:
    first, second = facts("a", "layers.0"), facts("b", "layers.1", kv_len=640)
    times = ((first, 8.0, 20.0), (second, 20.0, 5.0))
    rows = [
        row(kernel, call, ms)
        for call, x, y in times
        for kernel, ms in (("old", 10.0), ("x", x), ("y", y))
    ]
    counted = census(("layers.0", "denoise", 64, 10), ("layers.1", "denoise", 640, 10))

    def kernels(*exclusive: str) -> list[str]:
        plan = choose(rows, counted, COSINE, "old", exclusive)
        return [each.kernel for each in plan.choices]

    assert kernels() == kernels("x") == kernels("x", "other") == ["x", "y"]
    assert kernels("x", "y") == ["old", "y"]
    plan = choose(rows, counted, COSINE, "old", ("x", "y"))
    assert plan.saved_ms == pytest.approx(50)
    assert plan.left_out == {"x": "y saves more, and the two cannot share a process"}
    assert not choose(rows, counted, COSINE, "old", ("x",)).left_out


@pytest.mark.parametrize(
    ("phase", "changed", "overwrites"),
    [
        ("decode", ["key"], True),
        ("prefill", ["value"], True),
        ("decode", ["query"], False),
        ("denoise", ["key", "value"], False),
        ("denoise", ["attn_mask"], True),
    ],
)
def test_kernel_that_spoils_later_calls_is_not_chosen(
    phase: str, changed: list[str], overwrites: bool
) -> None:
    call = facts("a", "layers.0", phase)
    rows = [row("old", call, 10.0), row("slow", call, 8.0), row("careless", call, 5.0)]
    rows[2] = replace(rows[2], changed_inputs=changed)
    counted = census(("layers.0", phase, 64, 10))
    plan = choose(rows, counted, COSINE, "old")
    assert plan.kernels == ["slow" if overwrites else "careless"]
    reason = f"in {phase} it changes {changed[0]} in place, which later calls read again"
    assert plan.left_out == ({"careless": reason} if overwrites else {})
    *_, careless = uniform(rows, counted, COSINE, "old")
    assert (careless.inside, careless.outside, careless.overwrites) == (
        not overwrites,
        0,
        overwrites,
    )


def test_a_kernel_that_ran_without_the_mask_is_not_chosen_where_models_pass_it() -> None:
    rows = [row("old", CALL, 10.0), row("new", CALL, 5.0, restated_as="window 1023/0")]
    counted = census(("layers.0", "denoise", 64, 10))
    assert chosen(rows, counted) == {"layers.0": "old"}
    assert [each.kernel for each in uniform(rows, counted, COSINE, "old")] == ["old"]


ENERGY = {"mae": 1.0, "relative_l1": 1.0}
"""Figures with which the mean squared error is the error energy."""


def test_total_error_is_spent_where_it_saves_most() -> None:
    """Steps 0, 2 and 5 of six were recorded, at two calls for each step."""
    rows = []
    for layer, energies in (("layers.0", (4, 1, 1)), ("layers.1", (1, 9, 4))):
        for step, energy in zip((0, 2, 5), energies, strict=True):
            call = facts(f"{layer} {step}", layer, step=step)
            rows += [
                row("old", call, 10.0),
                row("tied", call, 9.99),
                row("new", call, 5.0, accuracy=judged(mse=float(energy), **ENERGY)),
            ]
    counted = census(("layers.0", "denoise", 64, 12), ("layers.1", "denoise", 64, 12), steps=6)

    def ranges(limit: float) -> list[tuple[str, str, StepRange | None]]:
        plan = choose(rows, counted, COSINE, "old", total_error=limit)
        assert sum(each.calls for each in plan.choices) == 24
        return [(each.module, each.kernel, each.steps) for each in plan.choices]

    early, middle, late = StepRange(0, 1), StepRange(2, 3), StepRange(4, 5)
    assert ranges(0) == [("layers.0", "old", None), ("layers.1", "old", None)]
    assert ranges(12) == [
        ("layers.0", "old", early),
        ("layers.0", "new", StepRange(2, 5)),
        ("layers.1", "new", early),
        ("layers.1", "old", StepRange(2, 5)),
    ]
    assert ranges(4 * 15) == [
        ("layers.0", "new", None),
        ("layers.1", "new", early),
        ("layers.1", "old", middle),
        ("layers.1", "new", late),
    ]
    plan = choose(rows, counted, COSINE, "old", total_error=12)
    assert plan.saved_ms == pytest.approx(3 * 4 * 5)
    assert plan.total_error is not None
    assert astuple(plan.total_error) == pytest.approx((12, 12, 0))


def test_total_error_divides_steps_of_each_range_of_lengths() -> None:
    """Calls with 80 keys, which share a range with 77, are at step 0 alone."""
    rows = []
    for kv_len, energies in ((4, (1, 1)), (77, (1, 9))):
        for step, energy in enumerate(energies):
            call = facts(f"{kv_len} {step}", step=step, kv_len=kv_len)
            rows += [
                row("old", call, 10.0),
                row("new", call, 5.0, accuracy=judged(mse=float(energy), **ENERGY)),
                row("wrong", call, 1.0, accuracy=judged(cosine=0.9)),
            ]
    sizes = ((4, 2), (77, 2), (80, 1))
    counted = census(*(("layers.0", "denoise", *size) for size in sizes), steps=2)
    counted["rows"][2]["last_step"] = 0

    def ranges(limit: float) -> list[tuple[object, ...]]:
        plan = choose(rows, counted, COSINE, "old", total_error=limit)
        return [(each.kernel, each.kv_lens, each.steps, each.calls) for each in plan.choices]

    assert ranges(4) == [
        ("new", (4, 4), None, 2),
        ("new", (77, 80), (0, 0), 2),
        ("old", (77, 80), (1, 1), 1),
    ]
    assert ranges(13) == [("new", (4, 80), None, 5)]


def test_plan_keeps_the_baseline_when_every_choice_exceeds_the_total_error() -> None:
    """Only denoising steps are divided, and a layer that was not recorded has no error."""
    rows = []
    for step, energy in ((0, 1), (5, 3)):
        call = facts(f"{step}", phase="decode", step=step)
        rows += [
            row("old", call, 10.0, accuracy=judged(mse=1.0, **ENERGY)),
            row("new", call, 5.0, accuracy=judged(mse=float(energy), **ENERGY)),
        ]
    counted = census(("layers.0", "decode", 64, 6), ("layers.1", "decode", 64, 6), steps=6)
    for limit, kernel, spent in (
        (5, "old", (5, None, None)),
        (11, "old", (11, 6, 0)),
        (12, "new", (12, 12, 0)),
    ):
        plan = choose(rows, counted, COSINE, "old", total_error=limit)
        assert [(each.kernel, each.steps) for each in plan.choices] == [
            (kernel, None),
            ("old", None),
        ]
        assert plan.total_error is not None
        assert astuple(plan.total_error) == spent
    for limit in (math.nan, math.inf, -1.0):
        with pytest.raises(PlanError, match="must be finite and at least 0"):
            choose(rows, counted, COSINE, "old", total_error=limit)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0])
def test_error_energy_is_proportional_to_the_squared_error(scale: float) -> None:
    reference = normal(1, 2, 3, 8)
    noise = scale * normal(1, 2, 3, 8, seed=1)
    energy = error_energy(compare(reference + noise, reference))
    mean = reference.abs().mean()
    assert energy == pytest.approx(float((noise**2).mean() / mean**2), rel=1e-3)
    assert energy >= float((noise**2).sum() / (reference**2).sum())
