"""SageAttention 2's kernels alone, on tensors quantised beforehand, as timed in the papers.

Each function performs the steps of the public function of the same name (with default options) up
to the launch, through the names that `sageattention.core` imports: the quantisers of
`sageattention.quant` and the compiled parts. The library first pads head dimensions other than 64
and 128, so calls with these dimensions have no core time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.kernels.layout import unit_stride

BHSD = 1
"""Code of `tensor_layout="HND"` in the compiled parts."""
GRANULARITY = {"per_warp": 2, "per_thread": 3}

Core = Callable[[], Tensor]


def fp16_triton(
    call: AttentionCall, quantization_backend: str = "triton", smooth_k: bool = True
) -> Core:
    core, query, key, value = _start(call)
    if call.attn_mask is not None:
        raise NotImplementedError("core time without a mask only")
    quantise = getattr(core, f"per_block_int8_{quantization_backend}")
    mean = key.mean(dim=2, keepdim=True) if smooth_k else None
    query_int8, q_scale, key_int8, k_scale = quantise(
        query, key, km=mean, sm_scale=call.softmax_scale, tensor_layout="HND"
    )
    value_fp16 = value.to(torch.float16)
    run = core.attn_true if call.is_causal else core.attn_false
    return lambda: run(
        query_int8,
        key_int8,
        value_fp16,
        q_scale,
        k_scale,
        tensor_layout="HND",
        output_dtype=call.dtype,
    )[0]


def fp16_cuda(
    call: AttentionCall,
    qk_quant_gran: str = "per_thread",
    pv_accum_dtype: str = "fp32",
    smooth_k: bool = True,
    smooth_v: bool = False,
) -> Core:
    core, query, key, value = _start(call)
    narrow = query.shape[-1] == 128 and pv_accum_dtype == "fp16+fp32"
    quantised = _quantise(
        core, query, key, qk_quant_gran, smooth_k, (128, 16 if narrow else 32, 64, 64)
    )
    names = {"fp32": "accum_f32_attn", "fp16": "accum_f16_attn"}
    name = names.get(pv_accum_dtype, "accum_f16_attn_inst_buf")
    extra: tuple[Tensor, ...] = ()
    if smooth_v and pv_accum_dtype == "fp16":
        value, mean = core.sub_mean(value, tensor_layout="HND")
        name, extra = "accum_f16_fuse_v_mean_attn", (mean,)
    launch = getattr(core.sm80_compile, f"qk_int8_sv_f16_{name}")
    return _launcher(call, launch, quantised, value.to(torch.float16), extra, qk_quant_gran)


def fp8_cuda(
    call: AttentionCall,
    qk_quant_gran: str = "per_thread",
    pv_accum_dtype: str = "fp32+fp16",
    smooth_k: bool = True,
    smooth_v: bool = False,
) -> Core:
    core, query, key, value = _start(call)
    quantised = _quantise(core, query, key, qk_quant_gran, smooth_k, (128, 32, 64, 64))
    smooth_v = smooth_v and pv_accum_dtype == "fp32"
    # A float16 accumulator needs small values to avoid overflow.
    largest = 2.25 if pv_accum_dtype == "fp32+fp16" else 448.0
    value_fp8, v_scale, mean = core.per_channel_fp8(
        value, tensor_layout="HND", scale_max=largest, smooth_v=smooth_v
    )
    name = {
        "fp32": "accum_f32_fuse_v_scale_attn",
        "fp32+fp32": "accum_f32_fuse_v_scale_attn_inst_buf",
        "fp32+fp16": "accum_f16_fuse_v_scale_attn_inst_buf",
    }[pv_accum_dtype]
    extra: tuple[Tensor, ...] = (v_scale,)
    if smooth_v:
        name, extra = "accum_f32_fuse_v_scale_fuse_v_mean_attn", (v_scale, mean)
    launch = getattr(core.sm89_compile, f"qk_int8_sv_f8_{name}")
    return _launcher(call, launch, quantised, value_fp8, extra, qk_quant_gran)


def fp8_sm90(
    call: AttentionCall,
    qk_quant_gran: str = "per_thread",
    pv_accum_dtype: str = "fp32+fp32",
    smooth_k: bool = True,
) -> Core:
    core, query, key, value = _start(call)
    quantised = _quantise(core, query, key, qk_quant_gran, smooth_k, (64, 16, 128, 128))
    value = torch.nn.functional.pad(value, (0, 0, 0, -value.shape[2] % 128))
    value_fp8, v_scale, _ = core.per_channel_fp8(value, tensor_layout="HND", smooth_v=False)
    launch = core.sm90_compile.qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf
    return _launcher(call, launch, quantised, value_fp8, (v_scale,), qk_quant_gran)


def _start(call: AttentionCall) -> tuple[ModuleType, Tensor, Tensor, Tensor]:
    if call.shape.head_dim not in (64, 128):
        raise NotImplementedError("core time for head_dim 64 and 128 only")
    core = importlib.import_module("sageattention.core")
    return (core, unit_stride(call.query), unit_stride(call.key), unit_stride(call.value))


def _quantise(
    core: ModuleType,
    query: Tensor,
    key: Tensor,
    granularity: str,
    smooth_k: bool,
    tiles: tuple[int, int, int, int],
) -> tuple[Tensor, ...]:
    """Return int8 query, scales, int8 key, scales; `tiles` are block and warp rows of Q and K."""
    q_block, q_warp, k_block, k_warp = tiles
    sizes = {"BLKQ": q_block, "WARPQ": q_warp, "BLKK": k_block}
    quantise = core.per_warp_int8_cuda
    if granularity == "per_thread":
        quantise, sizes = core.per_thread_int8_triton, {**sizes, "WARPK": k_warp}
    mean = key.mean(dim=2, keepdim=True) if smooth_k else None
    return quantise(query, key, mean, tensor_layout="HND", **sizes)


def _launcher(
    call: AttentionCall,
    launch: Callable[..., Tensor],
    quantised: tuple[Tensor, ...],
    value: Tensor,
    extra: tuple[Tensor, ...],
    granularity: str,
) -> Core:
    """Return a function that calls a compiled part with a preallocated output."""
    query_int8, q_scale, key_int8, k_scale = quantised
    size, is_causal, scale = call.query.shape, int(call.is_causal), call.softmax_scale

    def run() -> Tensor:
        output = torch.empty(size, dtype=call.dtype, device=call.device)
        launch(
            query_int8,
            key_int8,
            value,
            output,
            q_scale,
            k_scale,
            *extra,
            BHSD,
            is_causal,
            GRANULARITY[granularity],
            scale,
            0,  # no log-sum-exp
        )
        return output

    return run
