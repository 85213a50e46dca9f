"""What a model's host does between two attention calls, so that launches are timed as in a model.

A function that is called over and over is launched from the processor's innermost caches. In a
model the rest of a layer runs in between, some forty launches from other code, and the same call
then takes the host half as long again. It goes the other way as well: a launcher that runs much
Python leaves the rest of the layer with cold caches (`benchmarks/NOTES.md`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 64
HEADS = 4
HEAD_DIM = WIDTH // HEADS


class RestOfLayer(nn.Module):
    """A decoder layer as of Llama without its attention, on one token so small that a GPU is done
    with each part before the next is launched.

    Norms, projections, rotary positions, the key/value cache, the gated feed-forward network: the
    operations are those of a model, the weights are all the same.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        with torch.device("meta"):  # nothing is drawn: the caller's random numbers stay as they are
            self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
            self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
            self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
            self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
            self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.to_empty(device=device)
        for weight in self.parameters():
            nn.init.constant_(weight, 1 / WIDTH)
        self.token = torch.ones(1, 1, WIDTH, device=device)
        self.cosine, self.sine = torch.ones(2, HEAD_DIM, device=device)
        self.past = torch.ones(1, HEADS, 1, HEAD_DIM, device=device)

    @torch.no_grad()
    def forward(self) -> Tensor:
        normed = self.norms[0](self.token)
        query, key, value = (
            each(normed).view(1, 1, HEADS, HEAD_DIM).transpose(1, 2)
            for each in self.projections[:3]
        )
        query, key = self._rotate(query), self._rotate(key)
        key, value = (torch.cat((self.past, each), dim=2) for each in (key, value))
        attended = (query + key[:, :, -1:] + value[:, :, -1:]).transpose(1, 2).reshape(1, 1, WIDTH)
        middle = self.token + self.projections[3](attended)
        normed = self.norms[1](middle)
        gated = F.silu(self.gate(normed)) * self.up(normed)
        output: Tensor = middle + self.down(gated)
        return output

    def _rotate(self, heads: Tensor) -> Tensor:
        first, second = heads.chunk(2, dim=-1)
        return heads * self.cosine + torch.cat((-second, first), dim=-1) * self.sine
