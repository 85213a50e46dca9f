"""PyTorch operators of this package: `torch.ops.attention_kernels.attention`.

In eager mode, `attention` runs a kernel directly, which saves the microseconds of an operator's
dispatch. While PyTorch traces a model (`torch.compile`, `torch.export`, fake tensors), it calls the
operator, whose fake implementation knows shapes and strides alone. A compiled model therefore has
one graph for all lengths. A copy of the package under another name, such as one of the Hugging Face
Hub, has operators of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attention_kernels import gradients
from attention_kernels.dispatch import attend, check_heads
from attention_kernels.gradients import NAMESPACE, check_gradients, needs_gradients
from attention_kernels.launch.shape_checks import check_types
from attention_kernels.options import INVARIANT, PLAIN, AttentionOptions


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    precision: str = "exact",
    sinks: Tensor | None = None,
    options: AttentionOptions = PLAIN,
    return_lse: bool = False,
    invariant: bool = False,
) -> Any:
    """Return `scaled_dot_product_attention` of the arguments, using the fastest kernel.

    Calls with a few queries are decoded, with the keys split among programs. Long masks are scanned
    first, so that fully masked blocks are skipped. Other 16-bit calls run the Hopper kernel on a
    Hopper GPU, and the portable kernel elsewhere.

    Args:
        query: (B, Hq, Sq, D) in float16, bfloat16 or float32, any strides.
        key: (B, Hkv, Sk, D).
        value: (B, Hkv, Sk, Dv); D and Dv are at most 256, or 640 and 512 for a few queries if the
            value is the first part of the key.
        attn_mask: broadcasts to (B, Hq, Sq, Sk): bool (True = attend) or float (added).
        dropout_p: must be 0.
        is_causal: query i sees keys 0 to i; not with `attn_mask`, as in SDPA.
        scale: factor of the scores; None for 1/√D.
        enable_gqa: Hkv may be a divisor of Hq.
        precision: `"exact"` for products in the tensors' own type; `"fp8"` or `"int8"` for products
            in 8 bits (INT8 for QKᵀ alone); `"fastest"` for 8 bits where they were measured to be
            faster, and the own type elsewhere.
        sinks: (Hq,), one extra logit per head, which takes softmax weight but has no value.
        options: bottom-right diagonal, window, soft cap, and prefill's bits for single queries.
        return_lse: return a tuple of the output and the natural logarithm of each row's sum of
            exponentials, (B, Hq, Sq) float32, sinks included; -inf where every key is masked.
        invariant: compute each sequence with the same bits in every batch, and at prefill in chunks
            of 64 queries or more, as in `AttentionOptions`. Masks are not scanned, and
            `precision="fastest"` is exact.

    Returns:
        (B, Hq, Sq, Dv) in the query's dtype; zeros for queries that see no key. Under autocast, the
        tensors are converted first, as for SDPA.

    Raises:
        NotImplementedError: the call has dropout, a device, dtype or head dimension without a
            kernel, more rows than a GPU can launch programs for, a feature that the 8-bit kernels
            lack, or tensors that need gradients which no kernel computes.
        ValueError: the arguments do not fit together.
        TypeError: a tensor or `options` has another type.

    Differentiable for exact products and head dimensions up to 256 (`gradients.py`).
    `precision="fastest"` is exact if gradients are needed. The query's gradient may differ from run
    to run in its last bits on a Hopper GPU, unless `invariant`, `deterministic` in `options` or
    `torch.use_deterministic_algorithms` is set.
    """
    if dropout_p:
        raise NotImplementedError(f"attention has no dropout (dropout_p is {dropout_p})")
    tensors = {"query": query, "key": key, "value": value}
    check_types(tensors, options, attn_mask=attn_mask, sinks=sinks)
    is_differentiated = needs_gradients(query, key, value, attn_mask, sinks)
    if is_differentiated:
        check_gradients(query, value, attn_mask, precision)
    if invariant:
        options = INVARIANT if options is PLAIN else replace(options, invariant=True)
    if torch._C._is_any_autocast_enabled():
        query, key, value, attn_mask = _autocast(query.device.type, query, key, value, attn_mask)
    if not (is_differentiated or is_traced(query)):
        return attend(
            query,
            key,
            value,
            attn_mask,
            is_causal,
            scale,
            enable_gqa,
            precision,
            sinks,
            options,
            return_lse,
        )
    check_heads(query, key, value, enable_gqa)
    output, lse = _attention(
        query,
        key,
        value,
        attn_mask,
        is_causal,
        scale,
        precision,
        sinks,
        options.bottom_right,
        *options.window,
        options.softcap,
        options.invariant,
        options.decode,
        options.deterministic,
        return_lse or is_differentiated,
    )
    return (output, lse) if return_lse else output


def warm_up(
    shapes: Iterable[Sequence[Sequence[int]]],
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    **options: Any,
) -> None:
    """Compile and load the kernels for calls of `attention`, which otherwise happens at the first
    call of each kind and takes seconds.

    Args:
        shapes: for each call, the shapes of query (B, Hq, Sq, D) and key (B, Hkv, Sk, D), and of
            the value if it differs from the key's. Tensors of these shapes are allocated.
        options: arguments of `attention`, such as `is_causal`.

    Raises:
        TypeError: `shapes` is not a list of pairs or triples of shapes.
        The errors of `attention`.

    Example:
        >>> warm_up([((1, 32, 4096, 128), (1, 8, 4096, 128))], is_causal=True)
    """
    for call in shapes:
        is_call = isinstance(call, Sequence) and all(isinstance(sizes, Sequence) for sizes in call)
        if not is_call or len(call) not in (2, 3):
            raise TypeError(
                f"expected the shapes of query and key for each call, got {call}: pass a list of "
                "calls, such as [((1, 32, 4096, 128), (1, 8, 4096, 128))]"
            )
        query, key, value = (*call, call[1])[:3]
        q, k, v = (torch.zeros(*sizes, dtype=dtype, device=device) for sizes in (query, key, value))
        attention(q, k, v, enable_gqa=True, **options)


def is_traced(tensor: Tensor) -> bool:
    """Return whether PyTorch has to see an operator: while it traces, in a dispatch mode such as
    `FlopCounterMode`, and for tensors without memory."""
    return (
        torch.compiler.is_compiling()
        or type(tensor) not in _PLAIN
        or torch._C._len_torch_dispatch_stack() > 0
        or tensor.is_meta
    )


_PLAIN = (Tensor, torch.nn.Parameter)


@torch.library.custom_op(f"{NAMESPACE}::attention", mutates_args=())
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    precision: str,
    sinks: Tensor | None,
    bottom_right: bool,
    window_left: int | None,
    window_right: int | None,
    softcap: float | None,
    invariant: bool,
    decode: bool,
    deterministic: bool,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Run `attention`; without `return_lse`, the log-sum-exp has no elements."""
    window = (window_left, window_right)
    options = AttentionOptions(bottom_right, window, softcap, invariant, decode, deterministic)
    found = attend(
        query, key, value, attn_mask, is_causal, scale, True, precision, sinks, options, return_lse
    )
    output, lse = found if return_lse else (found, query.new_empty(0, dtype=torch.float32))
    expected = _empty_output(query, value)
    if output.stride() != expected.stride():
        output = expected.copy_(output)
    return output, lse


@_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *_, return_lse = others
    shape = query.shape[:3] if return_lse else (0,)
    return _empty_output(query, value), query.new_empty(shape, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, attn_mask, is_causal, scale, precision, sinks, *options, return_lse = inputs
    check_gradients(query, value, attn_mask, precision)
    if not return_lse:
        raise NotImplementedError("attention has no backward pass without return_lse=True")
    bottom_right, window_left, window_right, softcap, invariant, _, deterministic = options
    arguments = {
        "query": query,
        "key": key,
        "value": value,
        "sinks": sinks,
        "attn_mask": attn_mask,
        "is_causal": is_causal,
        "scale": scale,
        "bottom_right": bottom_right,
        "window_left": window_left,
        "window_right": window_right,
        "softcap": softcap,
        "deterministic": deterministic or invariant,
    }
    gradients.save(ctx, output, arguments)


def _differentiate(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, sinks = gradients.differentiate(gradients.attention_backward, ctx, *given)
    return query, key, value, *[None] * 4, sinks, *[None] * 8


_attention.register_autograd(_differentiate, setup_context=_save)


def _empty_output(query: Tensor, value: Tensor) -> Tensor:
    """Return an empty output (B, Hq, Sq, Dv) that is dense in BSHD if the query is, else in
    BHSD."""
    batch, heads, length, _ = query.shape
    if query.stride(1) < query.stride(2):
        return query.new_empty(batch, length, heads, value.shape[3]).transpose(1, 2)
    return query.new_empty(batch, heads, length, value.shape[3])


def _autocast(device: str, *tensors: Tensor | None) -> tuple[Any, ...]:
    """Return tensors in the type of the device's autocast context, if there is one, with bool masks
    as they are."""
    if device not in ("cuda", "cpu") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        each.to(dtype) if each is not None and each.is_floating_point() else each
        for each in tensors
    )
