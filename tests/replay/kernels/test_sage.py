"""The adapters of SageAttention 1, 2, 3 and SpargeAttn call stand-ins correctly.

Stand-ins have the parameters of sageattention 1.0.6 and of the `main` branches of
thu-ml/SageAttention and thu-ml/SpargeAttn. They also change keys in place and ignore masks, as the
libraries do. The stand-ins do not quantise, so a correct adapter gives an exact output.
"""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from replay.kernels.adapters import sage2
from replay.kernels.registry import Kernel, catalogue, select
from tests.factories import random_call
from tests.replay.kernels.kinds import KINDS, MASKED, REFUSED, VARIANTS, check, verify
from tests.replay.kernels.stand_ins import check_readable, flash_attention, parameters, textbook

Install = Callable[..., ModuleType]
Calls = list[dict[str, Any]]


def _checked(given: SimpleNamespace) -> None:
    assert given.tensor_layout == "HND"
    check_readable(given.q, given.k, given.v)


COMMON = 'q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None'
COMPILED = 'q, k, v, q_scale, k_scale, *, tensor_layout="HND", output_dtype=torch.float16'


def _forward(causal: bool) -> Callable[..., Tensor]:
    """Return a stand-in for a compiled kernel; the query's scale serves as the scores' scale."""

    @parameters(COMPILED)
    def run(given: SimpleNamespace) -> Tensor:
        output = textbook(given.q, given.k, given.v, given.q_scale, causal)
        return output.to(given.output_dtype)

    return run


@pytest.fixture
def sage_1(install: Install) -> None:
    @parameters(f"{COMMON}, smooth_k=True")
    def sageattn(given: SimpleNamespace) -> Tensor:
        _checked(given)
        assert given.q.shape[-1] in (64, 96, 128)
        if given.smooth_k:
            given.k -= given.k.mean(dim=2, keepdim=True)
        return textbook(given.q, given.k, given.v, given.sm_scale, given.is_causal)

    def quantiser(*head_dims: int) -> Callable[..., tuple[Tensor, float | None, Tensor, None]]:
        def quantise(
            q: Tensor, k: Tensor, *, sm_scale: float | None = None, tensor_layout: str = "HND"
        ) -> tuple[Tensor, float | None, Tensor, None]:
            assert q.shape[-1] in head_dims
            return q, sm_scale, k, None

        return quantise

    def forward(causal: bool) -> Callable[..., Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor, *scales: Any, **options: Any) -> Tensor:
            assert v.dtype == torch.float16
            return _forward(causal)(q, k, v, *scales, **options)

        return run

    install("sageattention", version=("sageattention", "1.0.6"), sageattn=sageattn)
    install(
        "sageattention.core",
        per_block_int8=quantiser(64, 128),
        per_block_int8_hd96=quantiser(96),
        attn_false=forward(False),
        attn_true=forward(True),
        attn_h96_false=forward(False),
        attn_h96_true=forward(True),
    )


FP16, FP8 = "qk_int8_sv_f16_accum_", "qk_int8_sv_f8_accum_"
COMPILED_PARTS = {
    "sm80_compile": {
        f"{FP16}f32_attn": 0,
        f"{FP16}f16_attn": 0,
        f"{FP16}f16_attn_inst_buf": 0,
        f"{FP16}f16_fuse_v_mean_attn": 1,
    },
    "sm89_compile": {
        f"{FP8}f32_fuse_v_scale_attn": 1,
        f"{FP8}f32_fuse_v_scale_fuse_v_mean_attn": 2,
        f"{FP8}f32_fuse_v_scale_attn_inst_buf": 1,
        f"{FP8}f16_fuse_v_scale_attn_inst_buf": 1,
    },
    "sm90_compile": {f"{FP8}f32_fuse_v_scale_attn_inst_buf": 1},
}
"""Number of tensors between a compiled function's scales and options, by module and function."""


@pytest.fixture
def sage_2(install: Install) -> Calls:
    """Install a stand-in for SageAttention 2 and return the options of all calls, in order."""
    calls: Calls = []

    def library_function(name: str, options: str = "") -> Callable[..., Tensor]:
        """Return a function that logs its calls and has `options` besides the common parameters."""

        @parameters(f"{COMMON}, {options}")
        def function(given: SimpleNamespace) -> Tensor:
            _checked(given)
            noted = {
                name: value
                for name, value in vars(given).items()
                if name not in ("q", "k", "v", "tensor_layout", "is_causal", "sm_scale")
            }
            mask = noted.pop("attn_mask", None)
            if mask is not None:
                assert not given.is_causal
                assert mask.dtype == torch.bool
                mask = mask.expand(*given.q.shape[:3], given.k.shape[2])
            calls.append({"function": name, **noted})
            return textbook(given.q, given.k, given.v, given.sm_scale, given.is_causal, mask)

        return function

    @parameters(
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal=False, "
        "sm_scale=None, smooth_k=True"
    )
    def sageattn_varlen(given: SimpleNamespace) -> Tensor:
        assert given.cu_seqlens_q.is_contiguous()
        assert given.cu_seqlens_k.is_contiguous()
        calls.append({"function": "sageattn_varlen", "smooth_k": given.smooth_k})
        how = {"softmax_scale": given.sm_scale, "causal": given.is_causal}
        beyond = {"window_size": (-1, -1), "softcap": 0.0}
        return flash_attention(SimpleNamespace(**vars(given), **how, **beyond))

    def quantise(
        q: Tensor, k: Tensor, km: Tensor | None = None, *, tensor_layout: str, **sizes: int
    ) -> tuple[Tensor, Any, Tensor, Any]:
        assert tensor_layout == "HND"
        return q, sizes.pop("sm_scale", None), k if km is None else k - km, sizes

    def triton_forward(causal: bool) -> Callable[..., tuple[Tensor, Tensor]]:
        return lambda *tensors, **options: (_forward(causal)(*tensors, **options), torch.empty(0))

    def compiled(name: str, extra: int) -> Callable[..., Tensor]:
        """Return a compiled function with `extra` tensors between its scales and its options."""

        def run(q: Tensor, k: Tensor, v: Tensor, o: Tensor, *rest: Any) -> Tensor:
            _, sizes, *tensors = rest[: 2 + extra]
            layout, is_causal, granularity, sm_scale, return_lse = rest[2 + extra :]
            assert (layout, return_lse) == (1, 0)
            assert ("WARPK" in sizes) == (granularity == 3)
            value = v[:, :, : k.shape[2]].float()
            if "fuse_v_mean" in name:
                value = value + tensors[-1]
            o.copy_(textbook(q, k, value.to(q.dtype), sm_scale, bool(is_causal)))
            calls.append({"function": name, **sizes})
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

    cuda = 'qk_quant_gran="per_thread", smooth_k=True'
    functions = {
        "sageattn": "",
        "sageattn_qk_int8_pv_fp16_triton": 'quantization_backend="triton", attn_mask=None, '
        "smooth_k=True",
        "sageattn_qk_int8_pv_fp16_cuda": f'{cuda}, pv_accum_dtype="fp32", smooth_v=False',
        "sageattn_qk_int8_pv_fp8_cuda": f'{cuda}, pv_accum_dtype="fp32+fp16", smooth_v=False',
        "sageattn_qk_int8_pv_fp8_cuda_sm90": f'{cuda}, pv_accum_dtype="fp32+fp32"',
    }
    install(
        "sageattention",
        version=("sageattention", "2.2.0"),
        sageattn_varlen=sageattn_varlen,
        **{name: library_function(name, options) for name, options in functions.items()},
    )
    install(
        "sageattention.core",
        SM80_ENABLED=True,
        SM89_ENABLED=True,
        SM90_ENABLED=False,
        **dict.fromkeys(
            (
                "per_block_int8_triton",
                "per_block_int8_cuda",
                "per_warp_int8_cuda",
                "per_thread_int8_triton",
            ),
            quantise,
        ),
        per_channel_fp8=per_channel_fp8,
        sub_mean=sub_mean,
        attn_false=triton_forward(False),
        attn_true=triton_forward(True),
        **{
            module: SimpleNamespace(
                **{name: compiled(name, extra) for name, extra in functions_of.items()}
            )
            for module, functions_of in COMPILED_PARTS.items()
        },
    )
    return calls


def _variants(base: str) -> list[Kernel]:
    return select(base, variants=True)[0]


@pytest.mark.usefixtures("sage_1")
@pytest.mark.parametrize("variant", VARIANTS["sage1"])
def test_sage1_is_exact_or_refuses(variant: str) -> None:
    assert verify("sage1", variant) == {
        **REFUSED,
        "head_dim 80": "head_dim 80: needs 64, 96 or 128",
    }


@pytest.mark.usefixtures("sage_1")
def test_sage1_changes_its_key_as_a_user_would_see() -> None:
    call = random_call(head_dim=64, dtype=torch.float16)
    before = call.key.clone()
    catalogue()["sage1"].prepare(call)()  # type: ignore[misc]
    assert torch.equal(call.key, before)
    catalogue()["sage1"].attention(**call.arguments())
    assert not torch.equal(call.key, before)
    call.key.copy_(before)
    catalogue()["sage1[smooth_k=off]"].attention(**call.arguments())
    assert torch.equal(call.key, before)


@pytest.mark.parametrize("function", sage2.FUNCTIONS, ids=lambda function: function.kernel)
def test_sage2_is_exact_or_refuses(sage_2: Calls, function: sage2.Function) -> None:
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


@pytest.mark.parametrize("variant", VARIANTS["sage2-varlen"])
def test_sage2_varlen_takes_padded_calls_only(sage_2: Calls, variant: str) -> None:
    assert set(KINDS) - set(verify("sage2-varlen", variant)) == {
        "padded right",
        "padded left",
        "padded decode",
        "padded, scale",
    }
    assert {call["smooth_k"] for call in sage_2} == {variant != "smooth_k=off"}


@pytest.mark.usefixtures("sage_2")
def test_part_that_was_not_built_is_named(unavailable: Callable[..., str | None]) -> None:
    reason = unavailable("sage2-fp8-sm90")
    assert reason.startswith("sageattention was built without this kernel: set TORCH_CUDA_ARCH_LI")
    assert unavailable("sage2-fp8-cuda") is None
    assert unavailable("sage2-fp8-sm90", 8, 6) == (
        "needs compute capability 9.0 (this GPU has 8.6)"
    )
    assert unavailable("sage2", 7, 5) == (
        "needs compute capability 8.0, 8.6, 8.9, 9.0, 12.0 or 12.1 (this GPU has 7.5)"
    )


@pytest.fixture
def sage_3(install: Install) -> list[bool]:
    means: list[bool] = []

    @parameters("q, k, v, attn_mask=None, is_causal=False, per_block_mean=True")
    def sageattn3_blackwell(given: SimpleNamespace) -> Tensor:
        assert given.attn_mask is None
        assert given.q.shape[1] == given.k.shape[1]
        means.append(given.per_block_mean)
        given.k -= given.k.mean(dim=-2, keepdim=True)
        return textbook(given.q, given.k, given.v, None, given.is_causal)

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
def test_sage3_is_exact_or_refuses(sage_3: list[bool], variant: str) -> None:
    scaled = dict.fromkeys(
        ("scale", "scale, batch", "decode, scale"),
        "takes no scale: always 1/sqrt(head_dim), not 0.3",
    )
    assert verify("sage3", variant) == {**FEWER_KEY_HEADS, **REFUSED, **OTHER_HEAD_DIMS, **scaled}
    assert set(sage_3) == {variant != "mean=sequence"}


@pytest.fixture
def spas_sage_attn(install: Install) -> list[float]:
    shares: list[float] = []

    @parameters(
        "q, k, v, attn_mask=None, *, is_causal=False, scale=None, topk=0.5, tensor_layout='HND'"
    )
    def spas_sage2_attn_meansim_topk_cuda(given: SimpleNamespace) -> Tensor:
        _checked(given)
        assert given.attn_mask is None
        assert not given.is_causal
        assert given.q.shape[-2] >= 128
        assert given.q.shape[-1] in (64, 128)
        shares.append(given.topk)
        return textbook(given.q, given.k, given.v, given.scale)

    install(
        "spas_sage_attn",
        version=("spas_sage_attn", "0.1.0"),
        spas_sage2_attn_meansim_topk_cuda=spas_sage2_attn_meansim_topk_cuda,
    )
    return shares


@pytest.mark.parametrize(("variant", "topk"), zip(VARIANTS["sparge"], (0.5, 0.25), strict=True))
def test_sparge_is_exact_or_refuses(spas_sage_attn: list[float], variant: str, topk: float) -> None:
    causal = ("causal", "causal, batch", "causal, longer keys", "grouped, causal, batch")
    assert verify("sparge", variant) == {
        **FEWER_KEY_HEADS,
        **REFUSED,
        **OTHER_HEAD_DIMS,
        **dict.fromkeys(causal, "takes no causal calls"),
        **dict.fromkeys(("decode of one", "decode, scale"), "length 1: at least 128"),
    }
    assert set(spas_sage_attn) == {topk}
