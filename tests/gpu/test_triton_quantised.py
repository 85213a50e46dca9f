"""Our 8-bit prefill on a GPU: the compiled kernels, Hopper's and the portable one."""

from __future__ import annotations

import math

import pytest
import torch

from capture.call import AttentionCall
from replay.accuracy import compare
from replay.reference import attention, gold_dtype
from replay.registry import find
from replay.synthetic import Spec
from replay.verdict import judge

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

DEVICE = torch.device("cuda")
NAMES = ("triton-sage", "triton-fp8", "triton-sage-fp8")


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    reason = find(request.param).unavailable(DEVICE)
    if reason is not None:
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture(params=["default", "portable"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that this GPU gets, and the one that others do."""
    if request.param == "portable":
        from replay.triton_kernels import quantised_prefill

        monkeypatch.setattr(quantised_prefill, "_is_hopper", lambda device: False)


def check(name: str, call: AttentionCall) -> None:
    gold = attention(call, gold_dtype(DEVICE))
    for output in (find(name).attention(**call.arguments()), find(name).prepare(call)()):  # type: ignore[misc]
        verdict = judge(output, gold, compare(output, gold), "quantised")
        assert verdict.passed, verdict.sentence


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    "spec",
    [
        Spec(8, 64, 16, 1024, 1024, 64, 64, is_causal=True),
        Spec(1, 4, 4, 4250, 4250, 64, 64),
        Spec(2, 4, 2, 700, 127, 128, 128, is_causal=True),
        Spec(1, 2, 1, 129, 300, 80, 80),
        Spec(1, 2, 2, 1, 1, 96, 96),
        Spec(1, 2, 2, 7, 7, 40, 40, is_causal=True),
        Spec(1, 2, 2, 300, 300, 256, 256),
    ],
    ids=str,
)
def test_shapes(name: str, spec: Spec) -> None:
    check(name, spec.call(DEVICE, torch.Generator(DEVICE).manual_seed(0)))


def test_strides(name: str) -> None:
    call = Spec(2, 4, 4, 500, 500, 128, 128).call(DEVICE, torch.Generator(DEVICE).manual_seed(0))
    fused = torch.cat([call.query, call.key, call.value], dim=1).transpose(1, 2).contiguous()
    query, key, value = fused.transpose(1, 2).chunk(3, dim=1)
    check(name, call.with_tensors({"query": query, "key": key, "value": value}))
    odd = torch.cat([value[..., :1], value], dim=-1)[..., 1:]
    check(name, call.with_tensors({"value": odd, "key": key.mT.contiguous().mT}))


@pytest.mark.usefixtures("path")
def test_nan_stays_in_its_row_and_column(name: str) -> None:
    call = Spec(1, 2, 2, 300, 300, 64, 64).call(DEVICE, torch.Generator(DEVICE).manual_seed(0))
    call.query[0, 0, 33, 5] = math.nan
    call.value[0, 1, 40, 7] = math.nan
    is_nan = find(name).attention(**call.arguments()).isnan()
    assert bool(is_nan[0, 0, 33].all())
    assert bool(is_nan[0, 1, :, 7].all())
    assert int(is_nan.sum()) == 64 + 300
