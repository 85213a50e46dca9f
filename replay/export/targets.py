"""All targets by name. A new target is a file with a `TARGET`, and a line here."""

from __future__ import annotations

from replay.export import comfyui, diffusers, transformers, vllm, xdit
from replay.export.target import Target

TARGETS: dict[str, Target] = {
    each.TARGET.name: each.TARGET for each in (diffusers, transformers, comfyui, xdit, vllm)
}
