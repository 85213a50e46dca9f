"""The host's work between two attention calls of a model, to time launches as in a model.

About forty launches of other code evict the launcher from the processor's innermost caches, so that
the host takes 1.5 times as long for the same call (`docs/whole-model.md`).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 64
HEADS = 4
HEAD_DIM = WIDTH // HEADS


class Norm(nn.Module):
    """RMSNorm in bfloat16 as in model libraries, with eight launches instead of one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = _weight(WIDTH, device=device)

    def forward(self, token: Tensor) -> Tensor:
        wide = token.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * normed.to(token.dtype)


class Projection(nn.Module):
    """Linear layer with constant weights.

    `nn.Linear` would use the caller's random generator, or import modules for half a second.
    """

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        super().__init__()
        self.weight = _weight(outputs, inputs, device=device)

    def forward(self, token: Tensor) -> Tensor:
        return F.linear(token, self.weight)


def _weight(*size: int, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.full(size, 1 / WIDTH, device=device, dtype=torch.bfloat16))


class RestOfLayer(nn.Module):
    """Decoder layer like Llama's, without attention.

    The sizes are so small that a GPU finishes each operation before the next is launched. The
    operations are those of a model (norms, projections, rotary positions, key/value cache, gated
    feed-forward network), with equal weights.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm(device) for _ in range(2))
        self.projections = nn.ModuleList(Projection(WIDTH, WIDTH, device) for _ in range(4))
        self.gate = Projection(WIDTH, 2 * WIDTH, device)
        self.up = Projection(WIDTH, 2 * WIDTH, device)
        self.down = Projection(2 * WIDTH, WIDTH, device)
        ones = partial(torch.ones, device=device, dtype=torch.bfloat16)
        self.token = ones(1, 1, WIDTH)
        self.cosine, self.sine = ones(2, 1, 1, HEAD_DIM)
        self.past = ones(1, HEADS, 1, HEAD_DIM)

    @torch.no_grad()
    def forward(self) -> Tensor:
        normed = self.norms[0](self.token)
        query, key, value = (
            project(normed).view(1, 1, HEADS, HEAD_DIM).transpose(1, 2)
            for project in self.projections[:3]
        )
        cosine, sine = self.cosine.unsqueeze(1), self.sine.unsqueeze(1)
        query, key = (_rotated(heads, cosine, sine) for heads in (query, key))
        key, value = (torch.cat((self.past, new), dim=2) for new in (key, value))
        attended = (query + key[:, :, -1:] + value[:, :, -1:]).transpose(1, 2).reshape(1, 1, WIDTH)
        middle = self.token + self.projections[3](attended)
        normed = self.norms[1](middle)
        gated = F.silu(self.gate(normed)) * self.up(normed)
        output: Tensor = middle + self.down(gated)
        return output


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = heads[..., : HEAD_DIM // 2], heads[..., HEAD_DIM // 2 :]
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine
