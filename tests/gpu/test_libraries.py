"""Third-party kernels run with their real libraries; other tests use stand-ins.

A kernel that is not installed is skipped. `pytest tests/gpu/test_libraries.py -rs` lists skipped
kernels. Transformer Engine has one backend per process: name a test, such as `-k te-fused`.
"""

from dataclasses import replace

import pytest
import torch

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from replay.accuracy.verdict import Expected, judge
from replay.kernels.registry import ScaledCore, find
from replay.workloads.random_calls import Spec
from tests.variant_calls import LIBRARY_CALLS, mla_call

DEVICE = torch.device("cuda")
NAMES = (
    "cudnn-fp8",
    "xformers",
    "fa2",
    "fa2-varlen",
    "fa2-kvcache",
    "flash-mla",
    "te-fused",
    "te-unfused",
    "te-flash",
    "hub:kernels-community/flash-attn2",
    "hub:kernels-community/flash-attn3",
    "hub:kernels-community/sage-attention",
)
DTYPES = (torch.float16, torch.bfloat16)


def spec_call(spec: Spec) -> AttentionCall:
    return spec.call(DEVICE, torch.Generator(DEVICE).manual_seed(0))


def calls() -> dict[str, AttentionCall]:
    """Return plain calls, calls with masks, and calls with features beyond SDPA."""
    found = {
        str(spec): spec_call(spec)
        for spec in (
            Spec(2, 4, 4, 1024, 1024, 128, 128),
            Spec(1, 8, 2, 777, 777, 64, 64, is_causal=True),
            Spec(2, 4, 4, 130, 1000, 64, 64),
            Spec(1, 4, 4, 300, 500, 96, 96, is_causal=True),
            Spec(2, 8, 2, 1, 2048, 128, 128),
        )
    }
    plain = found[str(Spec(2, 4, 4, 1024, 1024, 128, 128))]
    some = torch.rand(1024, 1024, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.7
    found["bool mask"] = plain.with_tensors({"attn_mask": some})
    bias = torch.randn(1, 4, 1024, 1032, device=DEVICE, dtype=plain.dtype)[..., 3:1027]
    found["a part of a float mask"] = plain.with_tensors({"attn_mask": bias})
    packed = {name: each.transpose(1, 2) for name, each in plain.tensors().items()}
    found["a model's layout"] = plain.with_tensors(
        {name: each.contiguous().transpose(1, 2) for name, each in packed.items()}
    )
    found["scale"] = replace(plain, scale=0.05)
    bottom_right = {"is_causal": True, "variant": AttentionVariant(bottom_right=True)}
    latent = {
        "absorbed MLA, decode": mla_call(q_len=1, q_heads=128),
        "absorbed MLA, scale, float16": mla_call(
            q_len=1, q_heads=16, scale=0.05, dtype=torch.float16
        ),
        "absorbed MLA, two queries, bottom right": mla_call(q_len=2, q_heads=64, **bottom_right),
    }
    return found | {name: each.to(DEVICE) for name, each in (latent | LIBRARY_CALLS).items()}


@pytest.mark.parametrize("name", NAMES)
def test_kernels_of_libraries_are_right(name: str) -> None:
    kernel = find(name)
    if reason := kernel.unavailable(DEVICE):
        pytest.skip(reason)
    wrong, ran = [], 0
    for kind, call in calls().items():
        if kernel.refuses(call) is not None:
            continue
        ran += 1
        expected = Expected.of(call)
        try:
            outputs = {"drop-in": kernel.attention(**call.arguments())}
            if kernel.prepare is not None:
                core = kernel.prepare(call)
                outputs["core"] = core.product() if isinstance(core, ScaledCore) else core()
        except Exception as error:
            wrong.append(f"{kind}: {type(error).__name__}: {error}")
            continue
        for which, output in outputs.items():
            verdict = judge(output, expected, kernel.accuracy_class)
            if not verdict.passed:
                wrong.append(f"{kind}, {which}: {verdict.sentence}")
    assert ran > 0
    assert not wrong, "\n".join(wrong)
