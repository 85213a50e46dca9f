"""SageAttention 1, 2, 3 and SpargeAttn as called by their adapters, against stand-ins.

Stand-ins have the parameters of sageattention 1.0.6 and of the `main` branches of
thu-ml/SageAttention and thu-ml/SpargeAttn, and their habits: keys changed in place, masks ignored.
The stand-ins do not quantise, so a correct adapter gives an exact output.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.kernels.adapters import sage2
from replay.kernels.registry import Kernel, catalogue, select
from tests.replay.kernels.kinds import KINDS, MASKED, REFUSED, VARIANTS, check, verify

Install = Callable[..., ModuleType]
Formula = Callable[..., Tensor]
Calls = list[dict[str, Any]]


def _checked(q: Tensor, k: Tensor, v: Tensor, layout: str) -> None:
    assert layout == "HND"
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert all(each.stride(-1) == 1 for each in (q, k, v))


@pytest.fixture
def sage_1(install: Install, formula: Formula) -> None:
    def sageattn(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensor_layout: str = "HND",
        is_causal: bool = False,
        sm_scale: float | None = None,
        smooth_k: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        _checked(q, k, v, tensor_layout)
        assert q.shape[-1] in (64, 96, 128)
        assert not kwargs
        if smooth_k:
            k -= k.mean(dim=2, keepdim=True)
        return formula(q, k, v, sm_scale, is_causal)

    def per_block_int8(
        q: Tensor,
        k: Tensor,
        BLKQ: int = 128,
        BLKK: int = 64,
        sm_scale: float | None = None,
        tensor_layout: str = "HND",
    ) -> tuple[Tensor, float | None, Tensor, None]:
        assert q.shape[-1] in (64, 128)
        return q, sm_scale, k, None

    def per_block_int8_hd96(
        q: Tensor, k: Tensor, sm_scale: float | None = None, tensor_layout: str = "HND"
    ) -> tuple[Tensor, float | None, Tensor, None]:
        assert q.shape[-1] == 96
        return q, sm_scale, k, None

    def forward(causal: bool) -> Callable[..., Tensor]:
        def run(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            q_scale: float,
            k_scale: None,
            *,
            tensor_layout: str = "HND",
            output_dtype: torch.dtype = torch.float16,
        ) -> Tensor:
            assert v.dtype == torch.float16
            return formula(q, k, v, q_scale, causal).to(output_dtype)

        return run

    install("sageattention", version=("sageattention", "1.0.6"), sageattn=sageattn)
    install(
        "sageattention.core",
        per_block_int8=per_block_int8,
        per_block_int8_hd96=per_block_int8_hd96,
        attn_false=forward(False),
        attn_true=forward(True),
        attn_h96_false=forward(False),
        attn_h96_true=forward(True),
    )


@pytest.fixture
def sage_2(install: Install, formula: Formula) -> Calls:
    """Return the options of all calls, in order."""
    calls: Calls = []

    def note(function: str, given: dict[str, Any]) -> None:
        calls.append({"function": function, **given})

    def sageattn(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensor_layout: str = "HND",
        is_causal: bool = False,
        sm_scale: float | None = None,
    ) -> Tensor:
        _checked(q, k, v, tensor_layout)
        note("sageattn", {})
        return formula(q, k, v, sm_scale, is_causal)

    def sageattn_qk_int8_pv_fp16_triton(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensor_layout: str = "HND",
        quantization_backend: str = "triton",
        is_causal: bool = False,
        attn_mask: Tensor | None = None,
        sm_scale: float | None = None,
        smooth_k: bool = True,
    ) -> Tensor:
        _checked(q, k, v, tensor_layout)
        if attn_mask is not None:
            assert not is_causal
            assert attn_mask.dtype == torch.bool
            attn_mask = attn_mask.expand(*q.shape[:3], k.shape[2])
        note(
            "sageattn_qk_int8_pv_fp16_triton",
            {"quantization_backend": quantization_backend, "smooth_k": smooth_k},
        )
        return formula(q, k, v, sm_scale, is_causal, attn_mask)

    def cuda_function(
        name: str, accum: str, smooth_v_default: bool | None
    ) -> Callable[..., Tensor]:
        def function(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            tensor_layout: str = "HND",
            is_causal: bool = False,
            qk_quant_gran: str = "per_thread",
            sm_scale: float | None = None,
            pv_accum_dtype: str = accum,
            smooth_k: bool = True,
            smooth_v: bool | None = smooth_v_default,
        ) -> Tensor:
            _checked(q, k, v, tensor_layout)
            assert smooth_v is None or smooth_v_default is not None, "it has no smooth_v"
            note(
                name,
                {
                    "qk_quant_gran": qk_quant_gran,
                    "pv_accum_dtype": pv_accum_dtype,
                    "smooth_k": smooth_k,
                    "smooth_v": smooth_v,
                },
            )
            return formula(q, k, v, sm_scale, is_causal)

        return function

    def sageattn_varlen(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        is_causal: bool = False,
        sm_scale: float | None = None,
        smooth_k: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        assert not kwargs
        assert cu_seqlens_q.is_contiguous()
        assert cu_seqlens_k.is_contiguous()
        note("sageattn_varlen", {"smooth_k": smooth_k})
        outputs = []
        for i in range(len(cu_seqlens_q) - 1):
            rows = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
            keys = slice(int(cu_seqlens_k[i]), int(cu_seqlens_k[i + 1]))
            parts = (each.transpose(0, 1)[None] for each in (q[rows], k[keys], v[keys]))
            outputs.append(formula(*parts, sm_scale, is_causal)[0].transpose(0, 1))
        return torch.cat(outputs)

    def quantise(
        q: Tensor, k: Tensor, km: Tensor | None = None, *, tensor_layout: str, **sizes: int
    ) -> tuple[Tensor, Any, Tensor, Any]:
        assert tensor_layout == "HND"
        return q, sizes.pop("sm_scale", None), k if km is None else k - km, sizes

    def triton_forward(causal: bool) -> Callable[..., tuple[Tensor, Tensor]]:
        def run(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            q_scale: float,
            k_scale: Any,
            *,
            tensor_layout: str = "HND",
            output_dtype: torch.dtype = torch.float16,
        ) -> tuple[Tensor, Tensor]:
            return formula(q, k, v, q_scale, causal).to(output_dtype), torch.empty(0)

        return run

    def compiled(name: str, extra: int) -> Callable[..., Tensor]:
        """Return a compiled function with `extra` tensors between its scales and its numbers."""

        def run(q: Tensor, k: Tensor, v: Tensor, o: Tensor, *rest: Any) -> Tensor:
            _, sizes, *tensors = rest[: 2 + extra]
            layout, is_causal, granularity, sm_scale, return_lse = rest[2 + extra :]
            assert (layout, return_lse) == (1, 0)
            assert ("WARPK" in sizes) == (granularity == 3)
            value = v[:, :, : k.shape[2]].float()
            if "fuse_v_mean" in name:
                value = value + tensors[-1]
            o.copy_(formula(q, k, value.to(q.dtype), sm_scale, bool(is_causal)))
            note(name, sizes)
            return torch.empty(0)

        return run

    def per_channel_fp8(
        v: Tensor, tensor_layout: str = "HND", scale_max: float = 448.0, smooth_v: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean = v.float().mean(dim=2, keepdim=True)
        return (v.float() - mean if smooth_v else v), torch.ones(1), mean

    def sub_mean(v: Tensor, tensor_layout: str = "HND") -> tuple[Tensor, Tensor]:
        mean = v.float().mean(dim=2, keepdim=True)
        return (v.float() - mean).to(torch.float16), mean

    fp16 = "qk_int8_sv_f16_accum_"
    fp8 = "qk_int8_sv_f8_accum_"
    sm90 = f"{fp8}f32_fuse_v_scale_attn_inst_buf"
    parts: dict[str, dict[str, int]] = {
        "sm80_compile": {
            f"{fp16}f32_attn": 0,
            f"{fp16}f16_attn": 0,
            f"{fp16}f16_attn_inst_buf": 0,
            f"{fp16}f16_fuse_v_mean_attn": 1,
        },
        "sm89_compile": {
            f"{fp8}f32_fuse_v_scale_attn": 1,
            f"{fp8}f32_fuse_v_scale_fuse_v_mean_attn": 2,
            f"{fp8}f32_fuse_v_scale_attn_inst_buf": 1,
            f"{fp8}f16_fuse_v_scale_attn_inst_buf": 1,
        },
        "sm90_compile": {sm90: 1},
    }
    cuda_functions: list[tuple[str, str, bool | None]] = [
        ("sageattn_qk_int8_pv_fp16_cuda", "fp32", False),
        ("sageattn_qk_int8_pv_fp8_cuda", "fp32+fp16", False),
        ("sageattn_qk_int8_pv_fp8_cuda_sm90", "fp32+fp32", None),
    ]
    install(
        "sageattention",
        version=("sageattention", "2.2.0"),
        sageattn=sageattn,
        sageattn_varlen=sageattn_varlen,
        sageattn_qk_int8_pv_fp16_triton=sageattn_qk_int8_pv_fp16_triton,
        **{each[0]: cuda_function(*each) for each in cuda_functions},
    )
    install(
        "sageattention.core",
        SM80_ENABLED=True,
        SM89_ENABLED=True,
        SM90_ENABLED=False,
        per_block_int8_triton=quantise,
        per_block_int8_cuda=quantise,
        per_warp_int8_cuda=quantise,
        per_thread_int8_triton=quantise,
        per_channel_fp8=per_channel_fp8,
        sub_mean=sub_mean,
        attn_false=triton_forward(False),
        attn_true=triton_forward(True),
        **{
            module: type(
                module,
                (),
                {name: staticmethod(compiled(name, extra)) for name, extra in functions.items()},
            )
            for module, functions in parts.items()
        },
    )
    return calls


def _variants(base: str) -> list[Kernel]:
    return select(base, variants=True)[0]


@pytest.mark.usefixtures("sage_1")
@pytest.mark.parametrize("variant", VARIANTS["sage1"])
def test_sage1(variant: str) -> None:
    assert verify("sage1", variant) == {
        **REFUSED,
        "head_dim 80": "head_dim 80: needs 64, 96 or 128",
    }


@pytest.mark.usefixtures("sage_1")
def test_sage1_changes_its_key_as_a_user_would_see(make_call: Callable[..., AttentionCall]) -> None:
    call = make_call(head_dim=64, dtype=torch.float16)
    before = call.key.clone()
    catalogue()["sage1"].prepare(call)()  # type: ignore[misc]
    assert torch.equal(call.key, before)
    catalogue()["sage1"].attention(**call.arguments())
    assert not torch.equal(call.key, before)
    call.key.copy_(before)
    catalogue()["sage1[smooth_k=off]"].attention(**call.arguments())
    assert torch.equal(call.key, before)


@pytest.mark.parametrize("function", sage2.FUNCTIONS, ids=lambda function: function.kernel)
def test_sage2(sage_2: Calls, function: sage2.Function) -> None:
    refused = dict(REFUSED)
    if function.kernel == "sage2-fp16-triton":
        refused = {kind: reason for kind, reason in REFUSED.items() if kind not in MASKED}
        refused["float mask"] = "takes a bool attn_mask only, not float16"
    # The library pads or masks these calls itself, so they have no core.
    without_core = {"head_dim 96", "head_dim 80", *MASKED}
    assert verify(function.kernel, without_core=without_core) == refused


@pytest.mark.slow
@pytest.mark.parametrize("base", [function.kernel for function in sage2.FUNCTIONS])
def test_every_variant_passes_its_options(sage_2: Calls, base: str) -> None:
    function = next(each for each in sage2.FUNCTIONS if each.kernel == base)
    for kernel in _variants(base)[1:]:
        sage_2.clear()
        check(kernel.name, "grouped, causal, batch")
        options = function.variants[kernel.name.partition("[")[2].rstrip("]")]
        dropped_in = next(each for each in sage_2 if each["function"] == function.function)
        assert options.items() <= dropped_in.items()


def test_names_of_variants() -> None:
    counts = {
        base: len(_variants(base)) - 1
        for base in ("sage1", "sage2", "sage2-varlen", "sage3", "sparge")
    }
    assert counts == {"sage1": 2, "sage2": 0, "sage2-varlen": 2, "sage3": 2, "sparge": 4}
    assert [kernel.name for kernel in _variants("sage2-fp8-sm90")] == [
        "sage2-fp8-sm90",
        "sage2-fp8-sm90[quant=per_warp,accum=fp32+fp32]",
        "sage2-fp8-sm90[quant=per_warp,accum=fp32+fp32,smooth_k=off]",
        "sage2-fp8-sm90[quant=per_thread,accum=fp32+fp32]",
        "sage2-fp8-sm90[quant=per_thread,accum=fp32+fp32,smooth_k=off]",
    ]
    # smooth_v is offered only where it has an effect.
    smoothed = {kernel.name for kernel in catalogue().values() if "smooth_v=on" in kernel.name}
    assert len(smoothed) == 8
    assert all("accum=fp16," in name or "accum=fp32," in name for name in smoothed)


@pytest.mark.parametrize("variant", VARIANTS["sage2-varlen"])
def test_sage2_varlen(sage_2: Calls, variant: str) -> None:
    assert set(KINDS) - set(verify("sage2-varlen", variant)) == {
        "padded right",
        "padded left",
        "padded decode",
        "padded, scale",
    }
    assert {call["smooth_k"] for call in sage_2} == {variant != "smooth_k=off"}


@pytest.mark.usefixtures("sage_2")
def test_a_part_that_was_not_built(unavailable: Callable[..., str | None]) -> None:
    reason = unavailable("sage2-fp8-sm90")
    assert reason is not None
    assert reason.startswith("sageattention was built without this kernel: set TORCH_CUDA_ARCH_LI")
    assert unavailable("sage2-fp8-cuda") is None
    assert unavailable("sage2-fp8-sm90", 8, 6) == (
        "needs compute capability 9.0 (this GPU has 8.6)"
    )
    assert unavailable("sage2", 7, 5) == (
        "needs compute capability 8.0, 8.6, 8.9, 9.0, 12.0 or 12.1 (this GPU has 7.5)"
    )


@pytest.mark.usefixtures("sage_1")
def test_sage_2_is_unavailable_with_sage_1(unavailable: Callable[..., str | None]) -> None:
    assert unavailable("sage1") is None
    for kernel in catalogue().values():
        if kernel.name.startswith("sage2") and "sm90" not in kernel.name:
            reason = unavailable(kernel.name)
            assert reason is not None
            assert reason.startswith("version 1.0.6 is installed, this kernel is 2.x")


@pytest.fixture
def sage_3(install: Install, formula: Formula) -> list[bool]:
    means: list[bool] = []

    def sageattn3_blackwell(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        per_block_mean: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        assert attn_mask is None
        assert not kwargs
        assert q.shape[1] == k.shape[1]
        means.append(per_block_mean)
        k -= k.mean(dim=-2, keepdim=True)
        return formula(q, k, v, None, is_causal)

    install("sageattn3", version=("sageattn3", "1.0.0"), sageattn3_blackwell=sageattn3_blackwell)
    return means


FEWER_KEY_HEADS = {
    "grouped": "4 query heads over 2 key heads: needs equal numbers",
    "grouped, causal, batch": "6 query heads over 2 key heads: needs equal numbers",
    "decode": "8 query heads over 2 key heads: needs equal numbers",
}
OTHER_HEAD_DIMS = {
    "head_dim 96": "head_dim 96: needs 64 or 128",
    "head_dim 80": "head_dim 80: needs 64 or 128",
}


@pytest.mark.parametrize("variant", VARIANTS["sage3"])
def test_sage3(sage_3: list[bool], variant: str) -> None:
    scaled = dict.fromkeys(
        ("scale", "scale, batch", "decode, scale"),
        "takes no scale: always 1/sqrt(head_dim), not 0.3",
    )
    assert verify("sage3", variant) == {**FEWER_KEY_HEADS, **REFUSED, **OTHER_HEAD_DIMS, **scaled}
    assert set(sage_3) == {variant != "mean=sequence"}


@pytest.fixture
def spas_sage_attn(install: Install, formula: Formula) -> list[float]:
    shares: list[float] = []

    def spas_sage2_attn_meansim_topk_cuda(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        topk: float = 0.5,
        tensor_layout: str = "HND",
    ) -> Tensor:
        _checked(q, k, v, tensor_layout)
        assert attn_mask is None
        assert not is_causal
        assert q.shape[-2] >= 128
        assert q.shape[-1] in (64, 128)
        shares.append(topk)
        return formula(q, k, v, scale)

    install(
        "spas_sage_attn",
        version=("spas_sage_attn", "0.1.0"),
        spas_sage2_attn_meansim_topk_cuda=spas_sage2_attn_meansim_topk_cuda,
    )
    return shares


@pytest.mark.parametrize(("variant", "topk"), zip(VARIANTS["sparge"], (0.5, 0.25), strict=True))
def test_sparge(spas_sage_attn: list[float], variant: str, topk: float) -> None:
    causal = ("causal", "causal, batch", "causal, longer keys", "grouped, causal, batch")
    assert verify("sparge", variant) == {
        **FEWER_KEY_HEADS,
        **REFUSED,
        **OTHER_HEAD_DIMS,
        **dict.fromkeys(causal, "takes no is_causal"),
        **dict.fromkeys(("decode of one", "decode, scale"), "length 1: at least 128"),
    }
    assert set(spas_sage_attn) == {topk}
