"""Expected gradients of our kernels: the textbook formula, differentiated by PyTorch."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import attention_kernels as ak


@dataclass(frozen=True)
class Formula:
    """Attention by the textbook formula, with the rounding of the query's type between steps."""

    attn_mask: Tensor | None = None
    is_causal: bool = False
    options: ak.AttentionOptions = ak.PLAIN
    scale: float | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp."""
        group = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(group, 1) for each in (key, value))
        scores = query @ key.mT * (query.shape[3] ** -0.5 if self.scale is None else self.scale)
        if (cap := self.options.softcap) is not None:
            scores = cap * (scores / cap).tanh()
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if self.attn_mask is not None and self.attn_mask.is_floating_point():
            scores = scores + self.attn_mask
        scores = scores.masked_fill(~self._seen(scores), -math.inf)
        if sinks is not None:
            sink = sinks.to(scores.dtype)[:, None, None].expand(len(scores), -1, scores.shape[2], 1)
            scores = torch.cat([scores, sink], 3)
        nothing = (scores == -math.inf).all(3)
        lse = scores.masked_fill(nothing[..., None], 0.0).logsumexp(3)
        weights = (scores - lse[..., None]).exp()[..., : key.shape[2]]
        return weights.to(query.dtype) @ value, lse.masked_fill(nothing, 0.0)

    def _seen(self, scores: Tensor) -> Tensor:
        q_len, k_len = scores.shape[2:]
        diagonal = torch.arange(q_len, device=scores.device)[:, None]
        diagonal = diagonal + self.options.bottom_right * (k_len - q_len)
        distance = torch.arange(k_len, device=scores.device) - diagonal
        left, right = self.options.window
        right = 0 if self.is_causal else right
        seen = (distance <= (k_len + q_len if right is None else right)) & (
            distance >= -(k_len + q_len if left is None else left)
        )
        if self.attn_mask is not None and self.attn_mask.dtype == torch.bool:
            seen = seen & self.attn_mask
        return seen


def gradients(
    attend: Any, tensors: list[Tensor], grad_output: Tensor, grad_lse: Tensor
) -> list[Tensor]:
    """Return the gradients of tensors, from those of the output and of the finite elements of the
    log-sum-exp; `attend` returns both."""
    leaves = [each.detach().requires_grad_() for each in tensors]
    output, lse = attend(*leaves)
    finite = lse.masked_fill(lse == -math.inf, 0.0)
    loss = (output * grad_output.to(output.dtype)).sum() + (finite * grad_lse.to(lse.dtype)).sum()
    return list(torch.autograd.grad(loss, leaves))


def expected(
    formula: Formula, tensors: list[Tensor], grad_output: Tensor, grad_lse: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the formula's gradients in the tensors' own types and in float64."""
    exact = [each.double() for each in tensors]
    rounded = gradients(formula, tensors, grad_output, grad_lse)
    return rounded, gradients(formula, exact, grad_output, grad_lse)


def assert_right(found: list[Tensor], rounded: list[Tensor], exact: list[Tensor]) -> None:
    """Check that errors are at most twice those of the formula with rounding, as a whole and at
    the worst element. In float32, the log-sum-exp has a rounding error that the formula avoids."""
    for ours, theirs, best in zip(found, rounded, exact, strict=True):
        assert ours.dtype == theirs.dtype
        unit = 1e-3 if ours.dtype == torch.float16 else 1e-6
        for kind in (2, math.inf):
            error = torch.linalg.vector_norm(ours.double() - best, kind)
            allowed = 2 * torch.linalg.vector_norm(theirs.double() - best, kind)
            assert error <= allowed + unit * torch.linalg.vector_norm(best, kind)
