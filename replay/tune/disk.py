"""Size of a recording, known before it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch


def bytes_per_layer(census: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number and the bytes of the calls, if one call of each layer is recorded.

    A layer is a module in a phase. Its largest call counts, with query, key, value, output and
    mask.

    Args:
        census: census of a run, as `capture.hooks.census.Census.to_json` writes it.
    """
    layers: dict[tuple[str, str], int] = {}
    for row in census["rows"]:
        layer = row["module"], row["phase"]
        signature = census["signatures"][row["signature"]]
        layers[layer] = max(layers.get(layer, 0), _bytes(signature))
    return len(layers), sum(layers.values())


def _bytes(signature: Mapping[str, Any]) -> int:
    query, value = signature["query"], signature["value"]
    output = [*query[:-1], value[-1]]
    shapes = (query, signature["key"], value, output)
    elements = sum(math.prod(shape) for shape in shapes if min(shape) >= 0)
    nbytes = elements * _size(signature["dtype"])
    if signature["mask"] is not None:
        nbytes += math.prod(signature["mask"]) * _size(signature["mask_dtype"])
    return nbytes


def _size(dtype: str) -> int:
    return int(getattr(torch, dtype.removeprefix("torch.")).itemsize)
