"""What becomes of kernels that are wrong, broken, unfair or merely slow: small fake ones."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from capture.call import AttentionCall
from capture.errors import DatasetError
from replay.bench.check import file_name
from replay.bench.inputs import Inputs
from replay.bench.runner import replay
from replay.bench.settings import Settings, WorkerOptions
from replay.kernels.registry import Kernel, catalogue
from replay.rows.files import row_to_json
from replay.rows.row import Mask, Row
from replay.timing.energy import Block
from replay.timing.gpu_state import NoReading
from replay.timing.rounds import Samples, measure
from replay.workloads.recorded import Workload

MakeCall = Callable[..., AttentionCall]
Register = Callable[..., Kernel]
MakeWorkload = Callable[..., Workload]


def sdpa(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, **options)


def raising(error: BaseException) -> Callable[..., Tensor]:
    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        raise error

    return attention


def rows_of(
    call: AttentionCall, workload: MakeWorkload, settings: Settings, *chosen: Kernel
) -> dict[str, Row]:
    return {row.kernel: row for row in replay([workload(call)], chosen, settings)}


OUTCOMES: dict[str, tuple[Callable[..., Any], str, str]] = {
    "right": (sdpa, "ok", "max abs error .* is within"),
    "wrong-shape": (
        lambda **a: sdpa(**a).transpose(1, 2),
        "error",
        r"returned shape \(1, 9, 2, 32\) where \(1, 2, 9, 32\) is right",
    ),
    "wrong-dtype": (
        lambda **a: sdpa(**a).to(torch.float64),
        "error",
        "returned float64 where float32 is right",
    ),
    "a-tuple": (lambda **a: (sdpa(**a), None), "error", "returned tuple, not a tensor"),
    "nothing": (lambda **a: None, "error", "returned NoneType, not a tensor"),
    "raises": (
        raising(ValueError("no such tile\nlong story")),
        "error",
        "ValueError: no such tile",
    ),
    "raises-silently": (raising(AssertionError()), "error", "AssertionError: AssertionError"),
    "exits": (raising(SystemExit(0)), "error", "SystemExit: 0"),
    "out-of-memory": (
        raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
        "out-of-memory",
        "needed 2 GiB",
    ),
    "host-memory": (raising(MemoryError()), "out-of-memory", "MemoryError"),
    "cpu-allocator": (
        raising(
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")
        ),
        "out-of-memory",
        "can't allocate memory",
    ),
    "requires-grad": (
        lambda **a: sdpa(**a).requires_grad_(),
        "error",
        "requires a gradient, not a plain tensor",
    ),
    "negated-view": (
        lambda **a: torch._neg_view(-sdpa(**a)),
        "error",
        "lazily negated or conjugated view",
    ),
    "one-nan": (
        lambda **a: sdpa(**a).index_fill(2, torch.tensor([3]), float("nan")),
        "inaccurate",
        "64 elements are NaN or infinite in the output",
    ),
    "zeros": (lambda **a: torch.zeros_like(a["query"]), "inaccurate", "exceeds"),
    "unwritten": (lambda **a: torch.empty_like(a["query"]), "inaccurate", ""),
    "slightly-wrong": (lambda **a: sdpa(**a) * 1.001, "inaccurate", "max abs error .* exceeds"),
    "ignores-scale": (
        lambda **a: sdpa(**(a | {"scale": None})),
        "inaccurate",
        "max abs error .* exceeds",
    ),
}


def test_outcomes(
    make_call: MakeCall, workload: MakeWorkload, kernels: Register, quick: Settings
) -> None:
    call = make_call(scale=0.3)
    chosen = [kernels(name, attention) for name, (attention, _, _) in OUTCOMES.items()]
    rows = rows_of(call, workload, quick, *chosen)
    assert list(rows) == [*OUTCOMES, "torch-default"]
    for name, (_, status, reason) in OUTCOMES.items():
        row = rows[name]
        assert row.status == status, (name, row.reason)
        assert re.search(reason, row.reason), (name, row.reason)
        assert "\n" not in row.reason
        assert row.flop_per_byte == pytest.approx(rows["right"].flop_per_byte)
        assert (row.speedup is not None) == (name == "right"), name
        assert (row.time_ms is not None) == (status in ("ok", "inaccurate")), name
        assert row.machine.torch == torch.__version__
        json.dumps(row_to_json(row), allow_nan=False)


def test_unavailable_and_unsupported_kernels_are_not_called(
    make_call: MakeCall, workload: MakeWorkload, kernels: Register, quick: Settings
) -> None:
    never = raising(AssertionError("called"))
    rows = rows_of(
        make_call(),
        workload,
        quick,
        kernels("absent", never, unavailable=lambda device: f"not installed on {device}"),
        kernels("picky", never, unsupported=lambda call: f"head_dim {call.shape.head_dim}"),
        kernels("bad-check", never, unsupported=lambda call: f"{call.no_such_fact}"),
        kernels("leaves", never, unsupported=lambda call: sys.exit(0)),
    )
    assert (rows["absent"].status, rows["absent"].reason) == (
        "unavailable",
        "not installed on cpu",
    )
    assert (rows["picky"].status, rows["picky"].reason) == ("unsupported", "head_dim 32")
    assert rows["bad-check"].status == "error"
    assert "no_such_fact" in rows["bad-check"].reason
    assert (rows["leaves"].status, rows["leaves"].reason) == ("error", "SystemExit: 0")
    assert rows["torch-default"].status == "ok"
    for name in ("absent", "picky", "bad-check"):
        assert rows[name].flop_per_byte is not None
        assert (rows[name].time_ms, rows[name].accuracy) == (None, None)


def test_kernels_run_without_gradients_and_not_in_inference_mode(
    make_call: MakeCall, workload: MakeWorkload, kernels: Register, quick: Settings
) -> None:
    """As in models: in inference mode launches are cheaper."""
    modes: set[tuple[bool, bool]] = set()

    def watching(**arguments: Any) -> Tensor:
        modes.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return sdpa(**arguments)

    rows_of(make_call(), workload, quick, kernels("watching", watching))
    assert modes == {(False, False)}


def test_how_samples_were_taken_is_in_the_row(
    make_call: MakeCall,
    workload: MakeWorkload,
    kernels: Register,
    quick: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def on_a_gpu(*arguments: Any, calls_before: int, **options: Any) -> dict[str, Samples]:
        asked.append(calls_before)
        found = measure(*arguments, calls_before=calls_before, **options)
        return {name: replace(each, layer_host_ms=(0.5, 0.7, 0.9)) for name, each in found.items()}

    monkeypatch.setattr("replay.bench.runner.measure", on_a_gpu)
    row = rows_of(make_call(), workload, replace(quick, calls_before=2), kernels("right", sdpa))[
        "right"
    ]
    assert asked == [2]
    assert (row.cache, row.calls_before, row.timer) == ("warm", 2, "perf_counter")
    assert row.layer_host_ms is not None
    assert row.layer_host_ms.p50 == 0.7


def test_energy_is_measured_of_what_was_timed_and_costs_no_row(
    make_call: MakeCall,
    workload: MakeWorkload,
    kernels: Register,
    quick: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcomes = iter(
        [
            Block(mj=200.0, power_w=500.0, seconds=1.1, burst_ms=1.0, sustained_ms=1.1),
            Block(mj=200.0, power_w=500.0, seconds=1.1, burst_ms=1.0, sustained_ms=1.01),
            NoReading("the counter stands still"),
            SystemExit(0),
        ]
    )

    def measured(
        run: Callable[[], Tensor], device: torch.device, call_ms: float, keep: Callable[..., None]
    ) -> Block:
        assert run().shape == (1, 2, 9, 32)
        assert call_ms > 0
        outcome = next(outcomes)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr("replay.bench.energy.measure_energy", measured)
    names = ("slows-down", "steady", "uncounted", "leaves")
    rows = rows_of(
        make_call(),
        workload,
        replace(quick, energy=True, baseline="slows-down"),
        *(kernels(name, sdpa) for name in names),
        kernels("fails", raising(ValueError("no"))),
    )
    assert next(outcomes, None) is None  # one that failed is not run again
    flops = 2 * 2 * 9 * 13 * (32 + 32)
    first = rows["slows-down"]
    assert first.energy is not None
    assert first.energy.tflops_per_w == pytest.approx(flops / 0.2 / 1e12)
    assert (first.energy.mj, first.energy.power_w, first.energy.seconds) == (200.0, 500.0, 1.1)
    assert (first.burst_ms, first.sustained_ms) == (1.0, 1.1)
    assert (rows["steady"].burst_ms, rows["steady"].sustained_ms) == (None, None)
    assert rows["steady"].energy == first.energy
    assert rows["uncounted"].flags == ("no energy: the counter stands still",)
    assert rows["leaves"].flags == ("no energy: SystemExit: 0",)
    assert [rows[name].status for name in names] == ["ok"] * 4


def test_no_energy_for_results_that_were_kept(
    make_call: MakeCall,
    workload: MakeWorkload,
    kernels: Register,
    quick: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call, steady = make_call(kv_len=100), Block(200.0, 500.0, 1.1, 1.0, 1.0)
    recorded = {name: tensor.clone() for name, tensor in call.tensors().items()}
    seen: list[Tensor] = []
    in_block = False

    def measured(run: Callable[[], Tensor], *_: object) -> Block:
        nonlocal in_block
        keep, in_block = _[-1], True
        assert callable(keep)
        for _call in range(50):
            result = run()
            seen.append(call.value.clone())
            keep(result)
        in_block = False
        return steady

    kept: dict[int, Tensor] = {}

    def caches(**arguments: Any) -> Tensor:
        if not in_block:
            return sdpa(**arguments)
        return kept.setdefault(arguments["value"].data_ptr(), sdpa(**arguments)).clone()

    def halves(**arguments: Any) -> Tensor:
        output = sdpa(**arguments)
        return output.half() if in_block else output

    def mutates(**arguments: Any) -> Tensor:
        output = sdpa(**arguments)
        arguments["key"].add_(1.0)
        return output

    monkeypatch.setattr("replay.bench.energy.measure_energy", measured)
    chosen = {"honest": sdpa, "caches": caches, "halves": halves, "mutates": mutates}
    rows = rows_of(
        call,
        workload,
        replace(quick, energy=True),
        *(kernels(name, attention) for name, attention in chosen.items()),
    )
    assert rows["honest"].status == "ok"
    assert rows["honest"].energy is not None
    assert len({value.numpy().tobytes() for value in seen[:50]}) == 50
    wrong = "right when it was checked, wrong when its energy was measured: "
    assert (rows["caches"].status, rows["caches"].reason[: len(wrong)]) == ("inaccurate", wrong)
    assert rows["halves"].status == "error"
    assert rows["halves"].reason.endswith("when its energy was measured")
    assert rows["mutates"].energy is None
    assert "no energy: it changes its inputs" in rows["mutates"].flags
    assert all(torch.equal(tensor, recorded[name]) for name, tensor in call.tensors().items())


@pytest.mark.parametrize("changed", ["query", "key", "value", "attn_mask"])
def test_changed_inputs_are_flagged_restored_and_nobody_elses(
    make_call: MakeCall, workload: MakeWorkload, kernels: Register, quick: Settings, changed: str
) -> None:
    """The key is a mean, the mask is expanded over heads, as models have them."""
    call = make_call(kv_heads=1, attn_mask=torch.zeros(1, 1, 9, 13).expand(1, 2, 9, 13))
    before = {name: tensor.clone() for name, tensor in call.tensors().items()}
    seen: list[bool] = []

    def mutating(**arguments: Any) -> Tensor:
        output = sdpa(**arguments)
        tensor = arguments[changed]
        (tensor[:, :1] if changed == "attn_mask" else tensor).add_(1.0)
        return output

    def watching(**arguments: Any) -> Tensor:
        # Signs are flipped from call to call, and nothing else.
        seen.append(all(torch.equal(arguments[name].abs(), before[name].abs()) for name in before))
        return sdpa(**arguments)

    def mutating_and_raising(**arguments: Any) -> Tensor:
        mutating(**arguments)
        raise RuntimeError("too late")

    rows = rows_of(
        call,
        workload,
        replace(quick, rounds=10),
        kernels("mutating", mutating),
        kernels("raising", mutating_and_raising),
        kernels("watching", watching),
    )
    assert rows["mutating"].changed_inputs == (changed,)
    assert rows["raising"].changed_inputs == (changed,)
    assert rows["raising"].status == "error"
    assert (rows["mutating"].status, rows["watching"].status) == ("ok", "ok")
    assert rows["watching"].changed_inputs == ()
    assert len(seen) > 10
    assert all(seen)
    assert all(torch.equal(getattr(call, name), before[name]) for name in before)


def test_inputs_that_every_other_call_puts_back_are_seen_to_change(
    make_call: MakeCall, workload: MakeWorkload, kernels: Register, quick: Settings
) -> None:
    """A sample of short calls ends with what it began with."""
    calls = 0

    def toggling(**arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 30:
            arguments["key"].view(torch.int32)[0, 0, 0, 0] ^= 1
        return sdpa(**arguments)

    row = rows_of(make_call(), workload, quick, kernels("toggling", toggling))["toggling"]
    assert row.changed_inputs == ("key",)


@pytest.mark.parametrize(
    "change", [lambda key: key.resize_(0), lambda key: key.transpose_(1, 2), lambda key: key.t_()]
)
def test_a_kernel_that_changes_sizes_does_so_for_itself(
    make_call: MakeCall,
    workload: MakeWorkload,
    kernels: Register,
    quick: Settings,
    change: Callable[[Tensor], Tensor],
) -> None:
    def changing(**arguments: Any) -> Tensor:
        output = sdpa(**arguments)
        change(arguments["key"])
        return output

    rows = rows_of(
        make_call(),
        workload,
        replace(quick, errors_against="changing"),
        kernels("changing", changing),
        kernels("mine", sdpa),
    )
    assert rows["changing"].status == "error"  # when it is called again
    assert (rows["mine"].status, rows["mine"].changed_inputs) == ("ok", ())
    assert rows["mine"].speedup is not None


def test_an_output_that_is_an_input_is_judged_as_it_was(
    make_call: MakeCall, workload: MakeWorkload, kernels: Register, quick: Settings
) -> None:
    call = make_call(q_len=13)

    def into_value(**arguments: Any) -> Tensor:
        return arguments["value"].copy_(sdpa(**arguments))

    row = rows_of(call, workload, quick, kernels("into-value", into_value))["into-value"]
    assert row.changed_inputs == ("value",)
    assert row.status == "ok", row.reason


def test_memory_an_output_will_get_is_poisoned(
    make_call: MakeCall,
    workload: MakeWorkload,
    kernels: Register,
    quick: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    real = Inputs.poison

    def poison(self: Inputs, call: AttentionCall, value: float = float("nan")) -> None:
        assert call.dtype == torch.bfloat16
        order.append("poison")
        real(self, call, value)

    def attention(**arguments: Any) -> Tensor:
        order.append("run")
        return sdpa(**arguments)

    monkeypatch.setattr(Inputs, "poison", poison)
    call = make_call(dtype=torch.bfloat16)
    rows_of(call, workload, quick, kernels("mine", attention), catalogue()["torch-math"])
    assert order[:2] == ["poison", "run"]
    assert order[-5:].count("poison") >= 2  # again before the last judgement


def test_what_is_timed_is_judged_too(
    make_call: MakeCall, workload: MakeWorkload, kernels: Register, quick: Settings
) -> None:
    """Right on the first call and then not: a graph that lost a launch, a result kept too long."""
    calls = 0
    kept: list[Tensor] = []

    def loses_its_launch(**arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls <= 2:
            kept[:] = [sdpa(**arguments)]
        return kept[0]

    def changes_its_mind(**arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return sdpa(**arguments) * (1 if calls <= 2 else 2)

    for attention in (loses_its_launch, changes_its_mind):
        calls = 0
        kernel = kernels(attention.__name__, attention)
        row = rows_of(make_call(), workload, quick, kernel)[kernel.name]
        assert row.status == "inaccurate"
        assert "wrong when" in row.reason
        assert row.speedup is None
        assert row.accuracy is not None
        assert row.accuracy.reference.nan_count or row.accuracy.reference.relative_l1 > 0.9


@pytest.mark.parametrize("call_number", [1, 2, 4, 6])
def test_a_kernel_that_replaces_a_function_costs_its_row_only(
    make_call: MakeCall,
    workload: MakeWorkload,
    kernels: Register,
    quick: Settings,
    monkeypatch: pytest.MonkeyPatch,
    call_number: int,
) -> None:
    """While it is checked, called again, measured for memory, and warmed up."""
    calls = 0
    monkeypatch.setattr(torch, "isnan", torch.isnan)  # restored whatever happens

    def replacing(**arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == call_number:
            torch.isnan = lambda tensor: torch.zeros_like(tensor, dtype=torch.bool)
        return sdpa(**arguments)

    chosen = [kernels("replacing", replacing), *(kernels(f"later-{n}", sdpa) for n in range(3))]
    rows = rows_of(make_call(), workload, quick, *chosen)
    reasons = {name: row.reason for name, row in rows.items() if row.status != "ok"}
    assert list(reasons) == ["replacing"]
    assert reasons["replacing"].startswith("replaces torch.isnan, which")


@pytest.mark.parametrize("call_number", [1, 2, 5, 20])
def test_a_kernel_that_ends_the_program_loses_its_row_only(
    make_call: MakeCall,
    workload: MakeWorkload,
    kernels: Register,
    quick: Settings,
    call_number: int,
) -> None:
    """While it is checked, judged for determinism, warmed up and timed."""
    calls = 0

    def leaves(**arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == call_number:
            sys.exit(0)
        return sdpa(**arguments)

    others = {"prepare": lambda call: sys.exit(0)}
    settings = replace(quick, errors_against="leaves") if call_number == 1 else quick
    rows = rows_of(
        make_call(), workload, settings, kernels("leaves", leaves), kernels("core", sdpa, **others)
    )
    assert rows["core"].status == "ok"
    assert rows["core"].flags == ("no core time: SystemExit: 0",)
    if call_number > 1:  # the first one was for the errors against it
        assert (rows["leaves"].status, rows["leaves"].reason) == ("error", "SystemExit: 0")


def test_a_kernel_that_fails_while_timed(
    make_call: MakeCall, workload: MakeWorkload, kernels: Register, quick: Settings
) -> None:
    calls = 0

    def tires(**arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise RuntimeError("tired")
        return sdpa(**arguments)

    rows = rows_of(make_call(), workload, quick, kernels("tires", tires))
    assert (rows["tires"].status, rows["tires"].reason) == ("error", "RuntimeError: tired")
    assert (rows["tires"].time_ms, rows["tires"].speedup) == (None, None)
    assert rows["torch-default"].time_ms is not None


def test_core_time(
    make_call: MakeCall, workload: MakeWorkload, kernels: Register, quick: Settings
) -> None:
    def prepare(call: AttentionCall) -> Callable[[], Tensor]:
        arguments = call.arguments()
        return lambda: sdpa(**arguments)

    def failing(call: AttentionCall) -> Callable[[], Tensor]:
        raise RuntimeError("no core")

    bad = raising(RuntimeError("bad core"))
    rows = rows_of(
        make_call(),
        workload,
        quick,
        kernels("with-core", sdpa, prepare=prepare),
        kernels("no-core", sdpa, prepare=failing),
        kernels("bad-core", sdpa, prepare=lambda call: partial(bad, *[call.query] * 3)),
    )
    core = rows["with-core"].core_time_ms
    assert core is not None
    assert core.n == 3
    assert rows["with-core"].time_ms is not None
    for name, reason in (("no-core", "no core"), ("bad-core", "bad core")):
        assert rows[name].status == "ok"
        assert rows[name].time_ms is not None
        assert rows[name].core_time_ms is None
        assert rows[name].flags == (f"no core time: RuntimeError: {reason}",)


def test_a_core_that_changes_the_inputs_spoils_nobody_elses(
    make_call: MakeCall, workload: MakeWorkload, kernels: Register, quick: Settings
) -> None:
    def prepare(call: AttentionCall, changes: bool) -> Callable[[], Tensor]:
        def core() -> Tensor:
            output = sdpa(**call.arguments())
            if changes:
                call.value.add_(1.0)
            return output

        return core

    rows = rows_of(
        make_call(),
        workload,
        quick,
        kernels("changing", sdpa, prepare=partial(prepare, changes=True)),
        kernels("clean", sdpa, prepare=partial(prepare, changes=False)),
    )
    for name in ("changing", "clean"):
        assert rows[name].flags == ()
        assert rows[name].core_time_ms is not None


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda output: output.double(), None),
        (lambda output: output * 1.01, "it is wrong: max abs error .* exceeds"),
        (torch.empty_like, "it is wrong: "),
        (lambda output: output.transpose(1, 2), r"returned shape \(1, 9, 2, 32\) where"),
        (lambda output: (output, None), "returned tuple, not a tensor"),
    ],
)
def test_a_core_that_returns_something_else_has_no_time(
    make_call: MakeCall,
    workload: MakeWorkload,
    kernels: Register,
    quick: Settings,
    change: Callable[[Tensor], Tensor],
    fault: str | None,
) -> None:
    def prepare(call: AttentionCall) -> Callable[[], Tensor]:
        arguments = call.arguments()
        return lambda: change(sdpa(**arguments))

    rows = rows_of(make_call(), workload, quick, kernels("cored", sdpa, prepare=prepare))
    row = rows["cored"]
    assert row.status == "ok"
    assert (row.core_time_ms is None) == bool(row.flags) == (fault is not None)
    if fault is not None:
        assert re.match(f"no core time: {fault}", row.flags[0]), row.flags


@pytest.mark.parametrize(
    ("backend", "disabled", "chosen", "expected"),
    [
        # Whatever PyTorch chose, the model called plain SDPA.
        ("torch-flash", [], None, "torch-default"),
        ("torch-math", [], None, "torch-default"),
        ("", [], None, "torch-default"),
        ("some.library.attention", [], None, "torch-default"),
        ("torch-math", [], "torch-flash", "torch-flash"),
        # It asked for math; and for flash, which PyTorch chooses anyway.
        ("torch-math", ["torch-flash", "torch-efficient", "torch-cudnn"], None, "torch-math"),
        ("torch-flash", ["torch-math", "torch-efficient", "torch-cudnn"], None, "torch-default"),
        ("torch-math", ["torch-flash"], "torch-flash", "torch-flash"),
        # It asked for what this CPU does not have.
        ("torch-cudnn", ["torch-math", "torch-flash"], None, "torch-default"),
    ],
)
def test_baseline(
    make_call: MakeCall,
    workload: MakeWorkload,
    kernels: Register,
    quick: Settings,
    backend: str,
    disabled: list[str],
    chosen: str | None,
    expected: str,
) -> None:
    call = make_call(origin={"backend": backend, "disabled_backends": disabled})
    rows = rows_of(call, workload, replace(quick, baseline=chosen), kernels("mine", sdpa))
    assert list(rows) == ["mine", expected]
    assert rows["mine"].call.backend == backend
    speedup = rows["mine"].speedup
    assert speedup is not None
    assert speedup.vs == expected
    assert speedup.reason == "too-few-rounds"
    assert rows[expected].speedup is None


@pytest.mark.parametrize(
    ("backend", "device", "is_flagged"),
    [
        ("torch-math", "cpu", True),
        ("torch-flash", "cpu", False),
        ("torch-cudnn", "cuda (NVIDIA H200)", False),  # another kind of device
        ("", "cpu", False),
        ("some.library.attention", "cpu", False),
    ],
)
def test_another_choice_of_pytorch_s_than_when_recorded_is_flagged(
    make_call: MakeCall,
    workload: MakeWorkload,
    quick: Settings,
    backend: str,
    device: str,
    is_flagged: bool,
) -> None:
    call = make_call(origin={"backend": backend, "device": device})
    chosen = (catalogue()[name] for name in ("torch-default", "torch-math"))
    rows = rows_of(call, workload, quick, *chosen)
    flag = f"PyTorch chooses torch-flash here, and chose {backend} when the call was recorded"
    found = {
        name: [each for each in row.flags if each.startswith("PyTorch chooses")]
        for name, row in rows.items()
    }
    assert found == {"torch-default": [flag] * is_flagged, "torch-math": []}


@pytest.mark.parametrize(("seconds", "rounds"), [(1e-9, 6), (1e9, 8)])
def test_slow_kernels_get_six_rounds_and_say_so(
    make_call: MakeCall,
    workload: MakeWorkload,
    kernels: Register,
    quick: Settings,
    seconds: float,
    rounds: int,
) -> None:
    settings = replace(quick, rounds=8, max_seconds=seconds)
    for row in rows_of(make_call(), workload, settings, kernels("mine", sdpa)).values():
        assert row.time_ms is not None
        assert row.time_ms.n == rounds
        assert ("took longer than --max-seconds" in row.flags) == (rounds == 6)


def test_a_model_whose_backend_must_not_run_is_compared_with_the_default(
    make_call: MakeCall, workload: MakeWorkload, kernels: Register, quick: Settings
) -> None:
    call = make_call(origin={"backend": "torch-math"})
    options = WorkerOptions(excluded=("torch-math",))
    found = replay([workload(call)], [kernels("mine", sdpa)], quick, options=options)
    rows = {row.kernel: row for row in found}
    assert list(rows) == ["mine", "torch-default"]
    assert rows["mine"].speedup is not None
    assert rows["mine"].speedup.vs == "torch-default"


def test_nothing_is_compared_with_an_inaccurate_baseline(
    make_call: MakeCall, workload: MakeWorkload, kernels: Register, quick: Settings
) -> None:
    kernels("broken", lambda **a: torch.zeros_like(a["query"]))
    rows = rows_of(make_call(), workload, replace(quick, baseline="broken"), kernels("mine", sdpa))
    assert rows["broken"].status == "inaccurate"
    assert rows["mine"].status == "ok"
    assert rows["mine"].speedup is None


def test_references_and_noise_floor(
    make_call: MakeCall, workload: MakeWorkload, kernels: Register, quick: Settings
) -> None:
    call = make_call(dtype=torch.bfloat16, with_output=True)
    settings = replace(quick, errors_against="torch-flash", compare_stats=True)
    row = rows_of(call, workload, settings, catalogue()["torch-math"])["torch-math"]
    assert row.accuracy is not None
    assert row.accuracy.captured is not None
    assert row.accuracy.captured.max_abs == 0  # math made the recorded output
    assert row.accuracy.kernel is not None
    assert 0 < row.accuracy.kernel.max_abs < 0.05
    assert row.accuracy.noise_floor == row.accuracy.reference
    assert row.output_summary is not None
    assert row.reference_summary is not None
    assert row.output_summary != row.reference_summary

    without = rows_of(make_call(), workload, quick, catalogue()["torch-math"])["torch-math"]
    assert without.accuracy is not None
    assert (without.accuracy.captured, without.accuracy.noise_floor) == (None, None)
    assert without.output_summary is None


def test_a_reference_kernel_that_changes_inputs_or_fails(
    make_call: MakeCall, workload: MakeWorkload, kernels: Register, quick: Settings
) -> None:
    def mutating(**arguments: Any) -> Tensor:
        arguments["key"].zero_()
        raise RuntimeError("broken")

    kernels("mutating", mutating)
    call = make_call()
    key = call.key.clone()
    settings = replace(quick, errors_against="mutating")
    rows = rows_of(call, workload, settings, catalogue()["torch-math"])
    assert torch.equal(call.key, key)
    assert rows["torch-math"].status == "ok"
    assert rows["torch-math"].accuracy is not None
    assert rows["torch-math"].accuracy.kernel is None
    assert rows["torch-math"].accuracy.reference.max_abs < 1e-5
    assert rows["torch-math"].changed_inputs == ()
    assert (rows["mutating"].status, rows["mutating"].changed_inputs) == ("error", ("key",))


def test_a_broken_file_is_one_row_and_the_others_run(
    make_call: MakeCall, workload: MakeWorkload, quick: Settings
) -> None:
    def broken(device: torch.device) -> AttentionCall:
        raise DatasetError("b.safetensors: altered since it was recorded")

    def huge(device: torch.device) -> AttentionCall:
        raise torch.OutOfMemoryError("CUDA out of memory")

    workloads = [
        workload(make_call(), "a"),
        Workload("b", broken),
        Workload("c", huge),
        workload(make_call(), "d"),
    ]
    produced: Iterator[Row] = replay(workloads, [catalogue()["torch-math"]], quick)
    rows = [(row.call.name, row.kernel, row.status) for row in produced]
    assert rows == [
        ("a", "torch-math", "ok"),
        ("a", "torch-default", "ok"),
        ("b", "", "error"),
        ("c", "", "out-of-memory"),
        ("d", "torch-math", "ok"),
        ("d", "torch-default", "ok"),
    ]


def test_outputs_are_kept(
    make_call: MakeCall, workload: MakeWorkload, kernels: Register, quick: Settings, tmp_path: Path
) -> None:
    call = make_call(dtype=torch.bfloat16)
    transposed = kernels("mine", lambda **a: sdpa(**a).transpose(1, 2).contiguous().transpose(1, 2))
    rows_of(call, workload, replace(quick, save_output=tmp_path), transposed)
    saved = load_file(tmp_path / "call" / "mine.safetensors")["output"]
    assert torch.equal(saved, sdpa(**call.arguments()))
    assert (tmp_path / "call" / "torch-default.safetensors").is_file()


@pytest.mark.parametrize(
    "name", ["../../up", "a/b.py:f", "x" * 300, "/etc/x", "[red]", "=1+1", ".."]
)
def test_whatever_a_kernel_is_called_its_file_is_in_the_folder(
    make_call: MakeCall,
    workload: MakeWorkload,
    kernels: Register,
    quick: Settings,
    tmp_path: Path,
    name: str,
) -> None:
    kept = tmp_path / "in" / "kept"
    rows_of(make_call(), workload, replace(quick, save_output=kept), kernels(name, sdpa))
    assert len(list(kept.glob("call/*"))) == 2
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 2


def test_no_two_kernels_share_a_file() -> None:
    names = ["a/b", "a-b", "a:b", "a%2Fb", "x" * 300, "x" * 299, "triton-fa2[block=64]"]
    assert len({file_name(name) for name in names}) == len(names)
    assert file_name("triton-fa2[block=64]") == "triton-fa2[block=64]"


def test_a_folder_that_cannot_be_written_is_no_kernels_error(
    make_call: MakeCall, workload: MakeWorkload, quick: Settings, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        rows_of(make_call(), workload, replace(quick, save_output=tmp_path / "file"))


def test_quantised_kernels_have_their_own_rule(
    make_call: MakeCall, workload: MakeWorkload, kernels: Register, quick: Settings
) -> None:
    rough: Callable[..., Tensor] = lambda **a: sdpa(**a) * 1.05  # noqa: E731 - a kernel's name
    call = make_call(dtype=torch.bfloat16)
    rows = rows_of(
        call,
        workload,
        quick,
        kernels("rough", rough),
        kernels("rough-int8", rough, accuracy_class="quantised"),
    )
    assert rows["rough"].status == "inaccurate"
    assert rows["rough-int8"].status == "ok"


def test_facts_of_the_call(make_call: MakeCall, workload: MakeWorkload, quick: Settings) -> None:
    mask = torch.ones(1, 1, 9, 13, dtype=torch.bool)
    call = make_call(attn_mask=mask, origin={"module": "layers.0", "step": 3, "phase": "denoise"})
    facts = rows_of(call, workload, quick)["torch-default"].call
    assert (facts.name, facts.model, facts.module, facts.step) == ("call", "model", "layers.0", 3)
    assert (facts.mask, facts.dtype) == (Mask("bool", (1, 1, 9, 13)), "float32")
    assert facts.shape == call.shape
