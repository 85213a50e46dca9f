"""cuDNN's FP8 attention, through `nvidia-cudnn-frontend`: PyTorch calls cuDNN in 16 bits only.

Query, key and value have one scale each, a power of two, so that the multiplication in 16 bits is
exact. On Hopper, cuDNN writes FP8 output and has no FP8 kernel for a single query. An output is an
average of values and can exceed the largest value only by the rounding of the probabilities, so
half the value's scale never overflows. The drop-in computes the scales, quantises, and converts
the output to the call's dtype. The core is cuDNN's kernel alone.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from capture.hooks.interceptor import Arguments
from replay.kernels import constraints as limits
from replay.kernels.constraints import AnyCall
from replay.kernels.libraries import Library
from replay.kernels.registry import ScaledCore
from replay.kernels.wrapping import register_adapted

LIBRARY = Library(
    module="cudnn",
    package="nvidia-cudnn-frontend",
    install="pip install nvidia-cudnn-frontend",
    functions=("pygraph", "create_handle", "set_stream"),
    runs_on=lambda capability: capability >= (9, 0),
    needs="9.0 or higher",
)

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = torch.finfo(FP8).max
LARGEST_SCALE = {torch.float16: 2.0**15, torch.bfloat16: 2.0**100}
"""Largest scale that each dtype can hold."""
PROBABILITY_SCALE = 64.0
"""Scale of probabilities in cuDNN's tests; they exceed 1 until a new row maximum is applied."""

INPUTS = ("q", "k", "v")
SCALARS = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
OUTPUTS = ("o", "amax_s", "amax_o")
UIDS = {name: uid for uid, name in enumerate((*INPUTS, *SCALARS, *OUTPUTS), start=1)}

Sizes = tuple[int, ...]


class _Graph(NamedTuple):
    """Graph that cuDNN built for calls of one shape."""

    graph: Any
    workspace_bytes: int
    constants: dict[str, Tensor]
    """Scales of the probabilities, and unused outputs for the largest absolute values."""


@functools.cache
def _handle(device: torch.device) -> Any:
    return LIBRARY.load().create_handle()


@functools.lru_cache(maxsize=64)
def _graph(
    shapes: tuple[Sizes, Sizes, Sizes], scale: float, is_causal: bool, device: torch.device
) -> _Graph:
    """Build the graph for (B, H, S, D) shapes of tensors that are stored as BSHD."""
    cudnn: Any = LIBRARY.load()
    fp8, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=fp8,
        intermediate_data_type=fp32,
        compute_data_type=fp32,
        handle=_handle(device),
    )
    one = (1, 1, 1, 1)
    tensors = {
        name: graph.tensor(
            name=name, uid=UIDS[name], dim=shape, stride=_bshd_strides(shape), data_type=fp8
        )
        for name, shape in zip(INPUTS, shapes, strict=True)
    } | {
        name: graph.tensor(name=name, uid=UIDS[name], dim=one, stride=one, data_type=fp32)
        for name in SCALARS
    }
    output, _, amax_s, amax_o = graph.sdpa_fp8(
        **tensors,
        generate_stats=False,
        attn_scale=scale,
        diagonal_alignment=cudnn.diagonal_alignment.TOP_LEFT,
        right_bound=0 if is_causal else None,
    )
    shape = (*shapes[0][:3], shapes[2][3])
    # Set the output's layout, because cuDNN would otherwise choose its own.
    output.set_uid(UIDS["o"]).set_output(True).set_data_type(fp8)
    output.set_dim(shape).set_stride(_bshd_strides(shape))
    for name, amax in (("amax_s", amax_s), ("amax_o", amax_o)):
        amax.set_uid(UIDS[name]).set_output(True).set_data_type(fp32)
        amax.set_dim(one).set_stride(one)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    constants = {
        "scale_s": torch.full(one, PROBABILITY_SCALE, device=device),
        "descale_s": torch.full(one, 1 / PROBABILITY_SCALE, device=device),
        "amax_s": torch.zeros(one, device=device),
        "amax_o": torch.zeros(one, device=device),
    }
    return _Graph(graph, graph.get_workspace_size(), constants)


def _bshd_strides(shape: Sizes) -> Sizes:
    """Return the strides of a (B, H, S, D) tensor whose memory is BSHD."""
    _, heads, length, head_dim = shape
    return (length * heads * head_dim, head_dim, heads * head_dim, 1)


def _prepare(call: AnyCall) -> ScaledCore:
    inputs = dict(zip(INPUTS, (call.query, call.key, call.value), strict=True))
    dtype, device = call.query.dtype, call.query.device
    # Compute all scales on the GPU, so that the host does not wait.
    norms = [
        torch.linalg.vector_norm(each, torch.inf, dtype=torch.float32) for each in inputs.values()
    ]
    scales = (LARGEST_FP8 / torch.stack(norms)).log2().floor().exp2()
    scales = scales.clamp(max=LARGEST_SCALE[dtype])
    quantised = {
        name: (each.transpose(1, 2) * scale)
        .to(FP8, memory_format=torch.contiguous_format)
        .transpose(1, 2)
        for (name, each), scale in zip(inputs.items(), scales, strict=True)
    }
    # cuDNN requires pointers that are multiples of 16 bytes, so each scale has its own row.
    descale_q, descale_k, descale_v = scales.reciprocal()[:, None].repeat(1, 4)
    factors = {
        "descale_q": descale_q,
        "descale_k": descale_k,
        "descale_v": descale_v,
        "scale_o": scales[2:] / 2,
    }
    scale = call.query.shape[-1] ** -0.5 if call.scale is None else call.scale
    shapes = tuple(tuple(each.shape) for each in inputs.values())
    graph, workspace_bytes, constants = _graph(shapes, scale, call.is_causal, device)
    handle, cudnn = _handle(device), LIBRARY.load()
    given = {**quantised, **factors, **constants}
    batch, heads, q_len, _ = call.query.shape
    v_dim = call.value.shape[3]

    def run() -> Tensor:
        output = torch.empty((batch, q_len, heads, v_dim), dtype=FP8, device=device)
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        pack = {UIDS[name]: each for name, each in given.items()} | {UIDS["o"]: output}
        graph.execute(pack, workspace, handle=handle)
        return output.transpose(1, 2)

    return ScaledCore(run, 2 * scales[2].reciprocal())


def _attend(call: Arguments) -> Tensor:
    with torch.cuda.device_of(call.query):
        core = _prepare(call)
        return core().to(call.query.dtype).mul_(core.scale)


register_adapted(
    "cudnn-fp8",
    LIBRARY,
    _attend,
    (
        limits.no_dropout,
        limits.half_precision,
        limits.no_mask,
        limits.min_length(2),
        limits.head_dim_multiple_of(16),
        limits.max_head_dim(256),
    ),
    "cuDNN's FP8 attention, a scale for each tensor",
    prepare=_prepare,
    accuracy_class="quantised",
)
