"""PyTorch's own kernels and FlexAttention agree with the reference on the CPU."""

from typing import Any

import pytest
import torch

from capture.call.attention_call import AttentionCall
from replay.accuracy.verdict import Expected, judge
from replay.kernels.registry import catalogue
from tests.factories import random_call
from tests.replay.kernels.pairwise import each_pair

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ON_CPU = ["torch-default", "torch-math", "torch-flash"]

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal, longer keys": {"is_causal": True, "q_len": 7, "kv_len": 40},
    "causal, longer queries": {"is_causal": True, "q_len": 40, "kv_len": 7},
    "grouped": {"q_heads": 6, "kv_heads": 2},
    "one key head": {"q_heads": 4, "kv_heads": 1, "is_causal": True},
    "bool mask": {"attn_mask": torch.rand(9, 13) < 0.7},
    "float mask": {"attn_mask": torch.randn(1, 1, 9, 13)},
    "row without a key": {"attn_mask": torch.arange(9)[:, None] > torch.arange(13)},
    "scale": {"scale": 0.5},
    "one query": {"q_len": 1, "kv_len": 300, "q_heads": 4, "kv_heads": 2},
    "odd": {"batch": 2, "q_len": 17, "kv_len": 33, "head_dim": 24},
    "narrow values": {"v_head_dim": 16},
}


def check(name: str, call: AttentionCall) -> None:
    with torch.no_grad():
        output = catalogue()[name].attention(**call.arguments())
    verdict = judge(output, Expected.of(call), "exact")
    assert verdict.passed, f"{name}: {verdict.sentence}"


@each_pair(kind=CALLS, name=ON_CPU, precision=DTYPES)
def test_torchs_kernels_equal_the_reference(kind: str, name: str, precision: str) -> None:
    dtype = DTYPES[precision]
    call = random_call(dtype=dtype, **CALLS[kind])
    mask = call.attn_mask
    if mask is not None and mask.is_floating_point():
        call = call.with_tensors({"attn_mask": mask.to(dtype)})
    reason = catalogue()[name].unsupported(call)
    if reason:
        assert (name, kind) == ("torch-flash", "narrow values")
        return
    check(name, call)


def test_kernels_for_gpus_are_unavailable_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    for name, kernel in catalogue().items():
        if name.startswith(("torch-efficient", "torch-cudnn")):
            assert kernel.unavailable(cpu) == "PyTorch has it on GPUs only"
        elif name == "torch-varlen":
            assert kernel.unavailable(cpu) == "needs a CUDA GPU"
        elif name.startswith("torch-") and kernel.library == "torch":
            assert kernel.unavailable(cpu) is None


@pytest.mark.filterwarnings("ignore:Flash attention")
def test_unsupported_is_pytorchs_own_sentence() -> None:
    flash = catalogue()["torch-flash"]
    call = random_call(v_head_dim=16)
    reason = flash.unsupported(call)
    assert reason.startswith("Flash attention requires q,k,v to have the same last dimension. ")
    assert "Triggered internally" not in reason
    with pytest.raises(RuntimeError, match="No available kernel"):
        flash.attention(**call.arguments())
    assert flash.unsupported(random_call()) is None
    # The compiled kernel gives the same reason as the eager kernel.
    assert catalogue()["torch-flash-compiled"].unsupported(call) == reason


def test_math_refuses_large_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    call = random_call(q_len=1000, kv_len=1000)
    monkeypatch.setattr("replay.kernels.adapters.torch_sdpa.available_bytes", lambda _: 15_000_000)
    assert catalogue()["torch-math"].unsupported(call) == ("its score matrices need 0 GB of memory")
    assert catalogue()["torch-flash"].unsupported(call) is None
    monkeypatch.setattr("replay.kernels.adapters.torch_sdpa.available_bytes", lambda _: 17_000_000)
    assert catalogue()["torch-math"].unsupported(call) is None


@pytest.mark.parametrize("name", ["torch-math", "torch-flash"])
def test_a_restriction_ends_with_the_call(name: str) -> None:
    backends = torch.backends.cuda
    math, flash = backends.math_sdp_enabled, backends.flash_sdp_enabled
    backends.enable_math_sdp(False)
    try:
        catalogue()[name].attention(**random_call().arguments())
        assert (math(), flash()) == (False, True)
        with pytest.raises(TypeError):
            catalogue()[name].attention(None, None, None)
        assert (math(), flash()) == (False, True)
    finally:
        backends.enable_math_sdp(True)


@pytest.mark.slow
def test_a_compiled_kernel_runs_its_own_backend() -> None:
    """PyTorch's compile cache must not return flash's graph for `torch-math-compiled`.

    In bfloat16 the two backends differ in the last bits; compiled flash has the same bits as flash.
    """
    call = random_call(q_len=150, kv_len=150, dtype=torch.bfloat16)
    kernels = catalogue()
    with torch.no_grad():
        outputs = {
            name: kernels[name].attention(**call.arguments())
            for name in ("torch-flash", "torch-math", "torch-flash-compiled", "torch-math-compiled")
        }
    flash, math = outputs["torch-flash"], outputs["torch-math"]
    assert not torch.equal(flash, math)
    assert torch.equal(outputs["torch-flash-compiled"], flash)
    assert not torch.equal(outputs["torch-math-compiled"], flash)
    # Compiled math differs from eager math at most by the order of float32 sums.
    from_math = (outputs["torch-math-compiled"] != math).sum()
    assert from_math < 0.1 * (outputs["torch-math-compiled"] != flash).sum()
    check("torch-math-compiled", call)


def test_flex_equals_the_reference() -> None:
    """Each kind of call is compiled separately, so there is only one kind per code path."""
    assert catalogue()["flex"].unavailable(torch.device("cpu")) is None
    for kind in (
        {"q_heads": 4, "kv_heads": 2, "q_len": 40, "kv_len": 70, "is_causal": True},
        {"q_len": 70, "kv_len": 40, "is_causal": True, "scale": 0.3},
        {"q_len": 40, "kv_len": 70, "attn_mask": torch.rand(40, 70) < 0.5},
        {"q_len": 40, "kv_len": 70, "attn_mask": torch.randn(1, 1, 40, 70)},
    ):
        check("flex", random_call(**kind))
