"""The replay runs our own kernels."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from replay.kernels.registry import find
from tests import factories
from tests.in_this_process import RunCli
from tests.replay.bench.small_kernels import Replayed
from tests.variant_calls import CALLS

HOLES = torch.arange(13) % 2 == 0
PADDING = torch.arange(13) < 5
MASK = torch.ones(9, 13, dtype=torch.bool).tril()
BESIDE = "attn_mask together with a window or lengths of sequences"
WINDOW = AttentionVariant(window=(5, 5))
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "triton-fa2": [({"variant": AttentionVariant(softcap=2.0**15)}, "at most 16384 in 16 bits")],
    "triton-masked": [
        ({}, "takes calls with an attn_mask only"),
        ({"attn_mask": MASK, "is_causal": True}, "takes no attn_mask in causal calls"),
    ],
    "triton-varlen": [
        ({}, "this call has no attn_mask, and is not packed"),
        ({"attn_mask": HOLES.expand(1, 1, 1, 13)}, "takes a padding mask only"),
        ({"attn_mask": PADDING, "dropout_p": 0.1}, "dropout"),
    ],
    "triton-decode": [
        ({"q_len": 17}, "at most 16 queries"),
        ({"dtype": torch.float32}, "float32"),
        ({"dropout_p": 0.1}, "dropout"),
        ({"variant": AttentionVariant(softcap=2.0**15)}, "at most 16384 in 16 bits"),
    ],
    "triton-paged-decode": [
        ({"attn_mask": HOLES.expand(1, 1, 1, 13)}, "padding mask"),
        ({"attn_mask": PADDING.expand(1, 1, 1, 13), "is_causal": True}, "beside a causal mask"),
    ],
    "triton-fp8": [
        ({"attn_mask": MASK, "is_causal": True}, "takes no attn_mask in causal calls"),
        ({"attn_mask": MASK, "variant": WINDOW}, BESIDE),
        ({"attn_mask": MASK, "seqused_k": torch.tensor([7], dtype=torch.int32)}, BESIDE),
        ({"attn_mask": MASK.half()}, "takes a bool attn_mask only, not float16"),
        ({"variant": AttentionVariant(softcap=2.0**15)}, "at most 16384 in 16 bits"),
    ],
}
CHECKED_BEFOREHAND = (
    "takes calls with an attn_mask only",
    "takes a padding mask only",
    "padding mask",
    "at most 16 queries",
    "float32",
)
"""Reasons that a drop-in does not check at every call, because checks take time."""


@pytest.mark.parametrize("name", REFUSED)
def test_kernels_refuse_calls_in_a_sentence(name: str) -> None:
    kernel = find(name)
    for fields, reason in REFUSED[name]:
        call = factories.random_call(**{"dtype": torch.float16, **fields})
        assert reason in str(kernel.refuses(call))
        if reason not in CHECKED_BEFOREHAND:
            with pytest.raises(NotImplementedError, match=reason):
                kernel.attention(**call.arguments())


def test_hopper_kernel_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = find("triton-fa3")
    if not torch.cuda.is_available():
        assert kernel.unavailable(torch.device("cpu")) == "needs a CUDA GPU"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernel.unavailable(torch.device("cpu")) == "Gluon has no interpreter"


def test_fp8_needs_a_gpu_that_has_it(
    monkeypatch: pytest.MonkeyPatch, gpu: Callable[[int, int], torch.device]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "8.9 or higher" in str(find("triton-decode-fp8").unavailable(gpu(8, 0)))
    assert find("triton-decode-int8").unavailable(gpu(8, 0)) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here")
@pytest.mark.parametrize("call", [CALLS["packed, causal bottom right"], CALLS["sinks and window"]])
def test_our_functions_are_differentiated(
    replayed: Replayed, monkeypatch: pytest.MonkeyPatch, call: AttentionCall
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernel = find("triton-attention-varlen" if "packed" in call.features else "triton-attention")
    row = replayed(call, kernel, backward=True)[kernel.name]
    assert (row.status, row.gradients is not None) == ("not-timed", True), row.reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here")
def test_recorded_calls_are_checked_and_never_timed(
    recorded: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code, out, err = run_cli(
        *("--dir", str(recorded), "--device", "cpu", "--json", "-", "--check"),
        *("--kernels", "triton-attention,triton-fa2", "--rounds", "3", "--in-process"),
        "--backward",
    )
    assert code == 0, err
    found = [json.loads(line) for line in out.splitlines()]
    ours = [row for row in found if row["kernel"] == "triton-attention"]
    assert len(ours) == 3
    plain = [row for row in found if row["kernel"] == "triton-fa2"]
    assert {(row["status"], row["reason"]) for row in plain} == {("unsupported", "has no backward")}
    for row in ours:
        assert all(each["tolerance_ratio"] <= 1 for each in row["gradients"].values())
        absent = [row[name] for name in ("time_ms", "first_call_ms", "speedup")]
        assert (row["status"], *absent) == ("not-timed", None, None, None)
        assert row["reason"].startswith("Triton's interpreter ran it; ")
        assert row["accuracy"]["captured"]
