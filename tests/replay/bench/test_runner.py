"""Kernels are run on calls, with a baseline, in rounds; failures cost only one row."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.batch import Batch
from capture.errors import DatasetError
from capture.storage.call_file import PackedCall
from replay.bench.runner import replay_here
from replay.bench.settings import WorkerOptions
from replay.kernels.registry import Kernel, catalogue, find
from replay.rows.row import Mask, Roof, Row
from replay.timing.flops import gb_per_s, tflops
from replay.timing.rounds import Samples, measure
from replay.workloads.recorded import from_directory
from replay.workloads.workload import Workload
from tests.factories import made_workload, random_call, settings
from tests.replay.bench.small_kernels import Register, Replayed, sdpa
from tests.variant_calls import CALLS, LIBRARY_CALLS, paged_call


def workload(call: AttentionCall, name: str = "call") -> Workload:
    return made_workload(name, lambda device: call)


def test_row_names_timer_and_cache(
    replayed: Replayed, kernels: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def on_a_gpu(*arguments: Any, calls_before: int, **options: Any) -> dict[str, Samples]:
        asked.append(calls_before)
        found = measure(*arguments, calls_before=calls_before, **options)
        return {name: replace(each, layer_host_ms=(0.5, 0.7, 0.9)) for name, each in found.items()}

    monkeypatch.setattr("replay.bench.runner.measure", on_a_gpu)
    row = replayed(random_call(), kernels("right", sdpa), calls_before=2)["right"]
    assert asked == [2]
    assert (row.cache, row.calls_before, row.timer) == ("warm", 2, "perf_counter")
    assert row.layer_host_ms.p50 == 0.7


@pytest.mark.parametrize(
    ("share", "busy", "is_told"),
    [(0.5, False, True), (1.04, False, True), (1.06, False, False), (0.5, True, False)],
)
def test_share_of_a_doubtful_roof_is_withheld(
    replayed: Replayed,
    kernels: Register,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    busy: bool,
    is_told: bool,
) -> None:

    def of_a_second(names: Any, *arguments: Any, **options: Any) -> dict[str, Samples]:
        found = measure(names, *arguments, **options)
        return {name: replace(each, ms=(1000.0,) * len(each.ms)) for name, each in found.items()}

    call = random_call()
    roof = Roof(tflops(call, 1000.0) / share, 1e9, busy)
    monkeypatch.setattr("replay.bench.runner.measure", of_a_second)
    monkeypatch.setattr("replay.bench.runner.measure_roof", lambda *_: roof)
    row = replayed(call, kernels("right", sdpa), roofline=True)["right"]
    assert row.roof == roof
    assert row.roof_share == (pytest.approx(share) if is_told else None)
    assert any(flag.startswith("no share of the roof: ") for flag in row.flags) != is_told


PIN = {"disabled_backends": ["torch-flash", "torch-efficient", "torch-cudnn"]}


@pytest.mark.parametrize(
    ("backend", "others", "chosen", "pinned", "expected"),
    [
        # The model called plain SDPA, so PyTorch's choice of backend does not matter.
        ("torch-math", {}, None, "", "torch-default"),
        ("", {}, None, "", "torch-default"),
        ("torch-math", {}, "torch-flash", "", "torch-flash"),
        # The model requested math, or the backend flash, which is PyTorch's default.
        ("torch-math", PIN, None, "torch-math", "torch-math"),
        ("torch-flash", {"disabled_backends": ["torch-math"]}, None, "", "torch-default"),
        ("torch-math", PIN, "torch-flash", "torch-math", "torch-flash"),
        # The model called another function.
        ("eager", {"entry_point": "transformers"}, None, "eager", "eager"),
        # The model requested a kernel that this CPU does not have.
        ("torch-cudnn", PIN, None, "torch-cudnn", "torch-default"),
        ("some.library.attention", {}, None, "some.library.attention", "torch-default"),
    ],
)
def test_baseline_is_what_the_model_called(
    replayed: Replayed,
    kernels: Register,
    backend: str,
    others: dict[str, Any],
    chosen: str | None,
    pinned: str,
    expected: str,
) -> None:
    call = random_call(origin={"backend": backend, **others})
    rows = replayed(call, kernels("mine", sdpa), baseline=chosen)
    assert list(rows) == ["mine", expected]
    assert (rows["mine"].call.backend, rows["mine"].call.pinned) == (backend, pinned)
    speedup = rows["mine"].speedup
    assert speedup.vs == expected
    assert speedup.reason == "too-few-rounds"
    assert rows[expected].speedup is None


@pytest.mark.parametrize(
    ("backend", "kind", "pinned"),
    [
        ("vllm-flash_attn", "pages, packed, window", "vllm-flash-attn"),
        ("vllm-flash_attn", "float8, pages, packed, bottom right", "vllm-flash-attn-fp8"),
        ("vllm-flashinfer", "pages, packed, window", "flashinfer-paged"),
        ("vllm-flashinfer", "pages, packed decode", "flashinfer-decode"),
        ("vllm-triton_attn", "pages, packed decode", "vllm-triton"),
        ("transformers.sdpa", "packed, bottom right", "torch-masked"),
    ],
)
def test_backend_of_an_engine_is_represented_by_a_kernel_of_its_library(
    replayed: Replayed, backend: str, kind: str, pinned: str
) -> None:
    call = LIBRARY_CALLS[kind]
    origin = replace(call.origin, backend=backend, entry_point="vllm")
    found = replayed(replace(call, origin=origin), catalogue()["eager"])["eager"].call
    assert (found.backend, found.pinned) == (backend, pinned)
    if call.page_table is not None:
        assert found.batch == Batch.of(call).size  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("backend", "device", "is_flagged"),
    [
        ("torch-math", "cpu", True),
        ("torch-flash", "cpu", False),
        ("torch-cudnn", "cuda (NVIDIA H200)", False),  # from another kind of device
        ("", "cpu", False),
        ("some.library.attention", "cpu", False),
    ],
)
def test_backend_other_than_the_recorded_one_is_flagged(
    replayed: Replayed, backend: str, device: str, is_flagged: bool
) -> None:
    call = random_call(origin={"backend": backend, "device": device})
    chosen = (catalogue()[name] for name in ("torch-default", "torch-math"))
    rows = replayed(call, *chosen)
    flag = f"PyTorch chooses torch-flash here, and chose {backend} when the call was recorded"
    found = {
        name: [each for each in row.flags if each.startswith("PyTorch chooses")]
        for name, row in rows.items()
    }
    assert found == {"torch-default": [flag] * is_flagged, "torch-math": []}


@pytest.mark.parametrize(("seconds", "rounds"), [(1e-9, 6), (1e9, 8)])
def test_row_tells_that_the_time_limit_left_fewer_rounds(
    replayed: Replayed, kernels: Register, seconds: float, rounds: int
) -> None:
    for row in replayed(
        random_call(), kernels("mine", sdpa), rounds=8, max_seconds=seconds
    ).values():
        assert row.time_ms.n == rounds
        assert ("took longer than --max-seconds" in row.flags) == (rounds == 6)


def test_model_whose_backend_must_not_run_is_compared_with_the_default(kernels: Register) -> None:
    call = random_call(origin={"backend": "torch-math", **PIN})
    options = WorkerOptions(excluded=("torch-math",))
    found = replay_here([workload(call)], [kernels("mine", sdpa)], settings(), options=options)
    rows = {row.kernel: row for row in found}
    assert list(rows) == ["mine", "torch-default"]
    assert rows["mine"].speedup.vs == "torch-default"


def test_nothing_is_compared_with_a_wrong_baseline(replayed: Replayed, kernels: Register) -> None:
    kernels("broken", lambda **a: torch.zeros_like(a["query"]))
    rows = replayed(random_call(), kernels("mine", sdpa), baseline="broken")
    assert rows["broken"].status == "inaccurate"
    assert rows["mine"].status == "ok"
    assert rows["mine"].speedup is None


def test_broken_file_is_one_row_and_the_others_run() -> None:
    def broken(device: torch.device) -> AttentionCall:
        raise DatasetError("b.safetensors: altered since it was recorded")

    def huge(device: torch.device) -> AttentionCall:
        raise torch.OutOfMemoryError("CUDA out of memory")

    workloads = [
        workload(random_call(), "a"),
        made_workload("b", broken),
        made_workload("c", huge),
        workload(random_call(), "d"),
    ]
    produced: Iterator[Row] = replay_here(workloads, [catalogue()["torch-math"]], settings())
    rows = [(row.call.name, row.kernel, row.status) for row in produced]
    assert rows == [
        ("a", "torch-math", "ok"),
        ("a", "torch-default", "ok"),
        ("b", "", "error"),
        ("c", "", "out-of-memory"),
        ("d", "torch-math", "ok"),
        ("d", "torch-default", "ok"),
    ]


def test_row_has_the_facts_of_its_call(replayed: Replayed) -> None:
    mask = torch.ones(1, 1, 9, 13, dtype=torch.bool)
    call = random_call(attn_mask=mask, origin={"module": "layers.0", "step": 3, "phase": "denoise"})
    facts = replayed(call)["torch-default"].call
    assert (facts.name, facts.model, facts.module, facts.step) == ("call", "model", "layers.0", 3)
    assert (facts.mask, facts.dtype) == (Mask("bool", (1, 1, 9, 13)), "float32")
    assert facts.shape == call.shape


def test_call_beyond_sdpa_has_rows_of_the_kernels_that_know_it(replayed: Replayed) -> None:
    rows = replayed(CALLS["window"], *map(find, ("torch-flash", "torch-masked", "eager")))
    assert rows["torch-flash"].status == "unsupported"
    assert rows["torch-flash"].reason == "has no sliding window"
    assert rows["eager"].status == rows["torch-masked"].status == "ok"
    assert rows["eager"].speedup.vs == "torch-masked"
    assert rows["eager"].call.beyond == "window 3/∞"


def test_call_in_pages_has_rows_of_the_kernels_that_read_them(tmp_path: Path) -> None:
    """Kernels that gather pages have rows too; their timed samples have perturbed pages."""
    call = paged_call([40, 70], 16, q_heads=4, kv_heads=1, head_dim=24)
    shared = replace(call, value=call.key[..., :16], scale=0.2)
    for number, each in enumerate((call, shared)):
        PackedCall.of(each).write(tmp_path / f"model-{number}.safetensors")
    kernels = [find(name) for name in ("torch-flash", "flex", "torch-masked", "eager")]
    workloads, _ = from_directory(tmp_path)
    rows = list(replay_here(workloads, kernels, settings()))
    assert [row.status for row in rows] == ["unsupported", "unsupported", "ok", "ok"] * 2
    assert {row.reason for row in rows[:2]} == {"has no page table"}
    assert {row.call.beyond for row in rows} == {"pages of 16"}
    assert rows[3].speedup.vs == "torch-masked"
    assert rows[7].gb_per_s == pytest.approx(gb_per_s(shared, rows[7].time_ms.p50))


def test_kernel_that_reads_a_wrong_page_is_inaccurate(replayed: Replayed) -> None:
    def shifted(**arguments: Any) -> Tensor:
        table = arguments["page_table"]
        return find("eager").attention(**{**arguments, "page_table": table.roll(1, 0)})

    kernel = Kernel("shifted", shifted, features=frozenset({"paged"}))
    assert replayed(paged_call([40, 40], 16), kernel)["shifted"].status == "inaccurate"


SEES_NOTHING = {
    "no keys": random_call(kv_len=0),
    "no keys, mask": random_call(kv_len=0, attn_mask=torch.ones(9, 0, dtype=torch.bool)),
    "all masked": random_call(attn_mask=torch.zeros(9, 13, dtype=torch.bool)),
    "all at -inf": random_call(attn_mask=torch.full((9, 13), -torch.inf)),
    "packed, never together": random_call(
        q_len=20,
        kv_len=20,
        cu_seqlens_q=torch.tensor([0, 0, 0, 20]).int(),
        cu_seqlens_k=torch.tensor([0, 20, 20, 20]).int(),
    ),
    "no key used": random_call(batch=2, seqused_k=torch.tensor([0, 0]).int()),
    "no page used": paged_call([0, 0], 4),
}


@pytest.mark.parametrize("name", SEES_NOTHING)
def test_call_in_which_no_query_sees_a_key_has_its_rows(
    name: str, replayed: Replayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computing zero outputs takes time, but does no FLOPs, so no share of a roof is defined."""
    monkeypatch.setattr("replay.bench.runner.measure_roof", lambda *_: Roof(1.0, 10.0))
    rows = replayed(SEES_NOTHING[name], find("eager"), roofline=True)
    eager = rows["eager"]
    assert (eager.status, eager.tflops, eager.flop_per_byte) == ("ok", 0.0, 0.0)
    assert eager.time_ms is not None
    assert eager.roof_share is None


def test_call_without_queries_is_one_error_row() -> None:
    calls = [random_call(q_len=0), random_call(q_len=0, kv_len=0), random_call()]
    found = list(replay_here([workload(call) for call in calls], [find("eager")], settings()))
    assert [(row.kernel, row.status) for row in found] == [
        ("", "error"),
        ("", "error"),
        ("eager", "ok"),
        ("torch-default", "ok"),
    ]
    said = "a query of 1×2×0×32 has no output that could be judged"
    assert found[0].reason == f"{found[0].call.name}: {said}"
