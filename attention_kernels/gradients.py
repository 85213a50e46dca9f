"""PyTorch operators for gradients of exact attention, and their registration.

`torch.ops.attention_kernels.attention_backward` and `.varlen_backward` run after the forward pass
of any kernel: they need its output and its log-sum-exp alone. The forward operators save both. They
run `hopper/hopper_backward.py` where it supports the call and gradients may differ in their last
bits from run to run, else `portable/backward.py`. Gradients cannot be differentiated again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention_kernels.dispatch import LARGEST_HEAD_DIM, is_scanned
from attention_kernels.hopper.support import has_gluon_kernels
from attention_kernels.launch.shape_checks import vector
from attention_kernels.options import AttentionOptions, Lengths
from attention_kernels.portable.backward import backward
from attention_kernels.tiles.row_sums import Gradients, empty_gradient

NAMESPACE = __name__.partition(".")[0]
"""Namespace of the operators: the name under which the package was imported."""


def needs_gradients(*tensors: Tensor | None) -> bool:
    """Return whether PyTorch would record a backward pass."""
    return torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )


def refuse_gradients(*tensors: Tensor | None, what: str = "attention over a cache") -> None:
    """Raise NotImplementedError if PyTorch would record a backward pass."""
    if needs_gradients(*tensors):
        raise NotImplementedError(f"{what} has no backward pass: call it in torch.no_grad()")


def check_gradients(
    query: Tensor, value: Tensor, attn_mask: Tensor | None, precision: str = "exact"
) -> None:
    """Check that a call, some of whose tensors need gradients, has a backward pass.

    Raises:
        NotImplementedError: the products are in 8 bits, the mask needs a gradient, or a head
            dimension is larger than 256.
    """
    head_dim, v_head_dim = query.shape[-1], value.shape[-1]
    if precision in ("fp8", "int8"):
        what = f"precision={precision!r}"
    elif attn_mask is not None and attn_mask.requires_grad:
        what = "attn_mask that requires a gradient"
    elif max(head_dim, v_head_dim) > LARGEST_HEAD_DIM:
        what = f"attention with head dimensions {head_dim} and {v_head_dim}"
    else:
        return
    raise NotImplementedError(f"{what} has no backward pass: call it in torch.no_grad()")


@torch.library.custom_op(f"{NAMESPACE}::attention_backward", mutates_args=())
def attention_backward(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    bottom_right: bool,
    window_left: int | None,
    window_right: int | None,
    softcap: float | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and sinks; without sinks, the last has no
    elements. They have the same bits in every run if `deterministic` holds or PyTorch's
    deterministic algorithms are enabled."""
    options = AttentionOptions(bottom_right, (window_left, window_right), softcap)
    if _runs_on_hopper(query, value, attn_mask, scale, softcap, deterministic):
        from attention_kernels.hopper.hopper_backward import hopper_backward

        return _four(
            hopper_backward(
                grad_output,
                query,
                key,
                value,
                output,
                lse,
                is_causal,
                scale,
                options=options,
                sinks=sinks,
                grad_lse=grad_lse,
            )
        )
    return _four(
        backward(
            grad_output,
            query,
            key,
            value,
            attn_mask,
            output,
            lse,
            is_causal,
            scale,
            options=options,
            sinks=sinks,
            grad_lse=grad_lse,
            is_scanned=attn_mask is not None and is_scanned(query, key, options),
        )
    )


@torch.library.custom_op(f"{NAMESPACE}::varlen_backward", mutates_args=())
def varlen_backward(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    longest_query: int,
    longest_key: int | None,
    seqused_k: Tensor | None,
    is_causal: bool,
    scale: float | None,
    window_left: int | None,
    window_right: int | None,
    softcap: float | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of packed tensors, (T, H, D), and of the sinks, as
    `attention_backward` does. Tokens that belong to no sequence have gradients of zero."""
    batches = cu_seqlens_q.shape[0] - 1
    lengths = Lengths(
        "packed",
        batches,
        longest_query,
        vector("cu_seqlens_q", cu_seqlens_q, batches + 1),
        vector("cu_seqlens_k", cu_seqlens_k, batches + 1),
        vector("seqused_k", seqused_k, batches),
    )
    grad_output, query, key, value, output = map(_BHSD, (grad_output, query, key, value, output))
    options: dict[str, Any] = {
        "options": AttentionOptions(True, (window_left, window_right), softcap),
        "sinks": sinks,
        "grad_lse": None if grad_lse is None else grad_lse[None],
    }
    if batches > 0 and _runs_on_hopper(
        query, value, None, scale, softcap, deterministic, is_packed=True
    ):
        from attention_kernels.hopper.hopper_backward import hopper_backward

        found = hopper_backward(
            grad_output,
            query,
            key,
            value,
            output,
            lse[None],
            is_causal,
            scale,
            lengths,
            **options,
        )
    else:
        found = backward(
            grad_output,
            query,
            key,
            value,
            None,
            output,
            lse[None],
            is_causal,
            scale,
            lengths,
            longest_key=longest_key,
            **options,
        )
    of_query, of_key, of_value, of_sinks = _four(found)
    return _THD(of_query), _THD(of_key), _THD(of_value), of_sinks


def _runs_on_hopper(
    query: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    scale: float | None,
    softcap: float | None,
    deterministic: bool,
    is_packed: bool = False,
) -> bool:
    """Return whether the Hopper kernel computes the gradients of a call."""
    if deterministic or torch.are_deterministic_algorithms_enabled():
        return False
    if not has_gluon_kernels(query.device):
        return False
    # Gluon is imported only on a GPU that supports it.
    from attention_kernels.hopper.hopper_backward import takes_backward

    return takes_backward(query, value, attn_mask, scale, softcap, is_packed)


@attention_backward.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value, sinks = given[4:8]
    gradients = empty_gradient(query), empty_gradient(key), empty_gradient(value)
    return _four(Gradients(*gradients, None if sinks is None else torch.empty_like(sinks)))


@varlen_backward.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value, sinks = given[4:8]
    of_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    query, key, value = (_THD(empty_gradient(_BHSD(each))) for each in (query, key, value))
    return query, key, value, of_sinks


def _four(gradients: Gradients) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients as an operator's results, which cannot be None."""
    query, key, value, sinks = gradients
    return query, key, value, query.new_empty(0) if sinks is None else sinks


def _BHSD(packed_THD: Tensor) -> Tensor:
    return packed_THD.transpose(0, 1)[None]


def _THD(alone_BHSD: Tensor) -> Tensor:
    return alone_BHSD[0].transpose(0, 1)


def save(ctx: Any, results: tuple[Tensor, Tensor], arguments: dict[str, Any]) -> None:
    """Save what the backward pass of a forward operator needs.

    Args:
        results: output and log-sum-exp of the forward operator.
        arguments: the other arguments of the backward operator, by name.
    """
    ctx.set_materialize_grads(False)
    tensors = {name: each for name, each in arguments.items() if isinstance(each, Tensor)}
    ctx.names = tuple(tensors)
    ctx.numbers = {name: each for name, each in arguments.items() if name not in tensors}
    ctx.save_for_backward(*results, *tensors.values())


def differentiate(
    operator: Any, ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Run a backward operator on what `save` saved, and return the gradients of query, key, value
    and sinks."""
    output, lse, *tensors = ctx.saved_tensors
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    arguments = dict(zip(ctx.names, tensors, strict=True))
    query, key, value, sinks = operator(
        grad_output, grad_lse, output, lse, **arguments, **ctx.numbers
    )
    return query, key, value, sinks if "sinks" in arguments else None
