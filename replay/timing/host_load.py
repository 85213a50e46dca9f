"""What a model's host does between two attention calls, so that launches are timed as in a model.

A function that is called over and over is launched from the processor's innermost caches. In a
model the rest of a layer runs in between, some forty launches from other code, and the same call
then takes the host half as long again. It goes the other way as well: a launcher that runs much
Python leaves the rest of the layer with cold caches (`docs/whole-model.md`).
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
    """RMSNorm in bfloat16 as model libraries write it out: eight launches and not one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = _weight(WIDTH, device=device)

    def forward(self, token: Tensor) -> Tensor:
        wide = token.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * normed.to(token.dtype)


class Projection(nn.Module):
    """`nn.Linear` without a bias, whose own weights are drawn: from the caller's random numbers,
    or without values, for which PyTorch imports half a second of modules."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        super().__init__()
        self.weight = _weight(outputs, inputs, device=device)

    def forward(self, token: Tensor) -> Tensor:
        return F.linear(token, self.weight)


def _weight(*size: int, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.full(size, 1 / WIDTH, device=device, dtype=torch.bfloat16))


class RestOfLayer(nn.Module):
    """A decoder layer as of Llama without its attention, on one token so small that a GPU is done
    with each part before the next is launched.

    Norms, projections, rotary positions, the key/value cache, the gated feed-forward network: the
    operations are those of a model, the weights are all the same.
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
            each(normed).view(1, 1, HEADS, HEAD_DIM).transpose(1, 2)
            for each in self.projections[:3]
        )
        cosine, sine = self.cosine.unsqueeze(1), self.sine.unsqueeze(1)
        query, key = (_rotated(each, cosine, sine) for each in (query, key))
        key, value = (torch.cat((self.past, each), dim=2) for each in (key, value))
        attended = (query + key[:, :, -1:] + value[:, :, -1:]).transpose(1, 2).reshape(1, 1, WIDTH)
        middle = self.token + self.projections[3](attended)
        normed = self.norms[1](middle)
        gated = F.silu(self.gate(normed)) * self.up(normed)
        output: Tensor = middle + self.down(gated)
        return output


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = heads[..., : HEAD_DIM // 2], heads[..., HEAD_DIM // 2 :]
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine
