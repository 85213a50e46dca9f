"""Calls and checks that tests of several kernels share, on a GPU or on the CPU."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_kernels.decode import split_kv
from capture.call.attention_call import AttentionCall
from replay.accuracy.sparse import restricted
from replay.accuracy.verdict import Expected, judge
from replay.kernels.registry import catalogue, find
from replay.rows.errors_of_output import AccuracyClass
from tests import factories

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOADS = ["as small", "as large"]
"""Parameters of the fixture `size`."""

normal = functools.partial(factories.normal, device=DEVICE)
half = functools.partial(normal, dtype=torch.float16)


def call_of(q_len: int, kv_len: int, head_dim: int = 64, **fields: Any) -> AttentionCall:
    """Return a float16 call with two query heads and one key head; keywords change its fields."""
    sizes = {"q_heads": 2, "kv_heads": 1, "q_len": q_len, "kv_len": kv_len, "head_dim": head_dim}
    return factories.random_call(**{"dtype": torch.float16, "device": DEVICE, **sizes, **fields})


def ours() -> list[str]:
    return [name for name in catalogue() if name.startswith("triton-")]


def many_heads(batch: int, heads: int) -> list[AttentionCall]:
    """Return calls of one query and two keys; every kernel supports at least one of them."""
    plain = call_of(1, 2, 16, batch=batch, q_heads=heads, kv_heads=heads)
    mask = torch.tensor([True, False], device=DEVICE).repeat(batch, heads, 1, 1)
    return [
        plain,
        replace(plain, attn_mask=mask),
        replace(plain, attn_mask=mask.half()),
        replace(plain, seqused_k=torch.ones(batch, dtype=torch.int32, device=DEVICE)),
    ]


def lengths(*each: int) -> Tensor:
    return torch.tensor(each, dtype=torch.int32, device=DEVICE)


def offsets(*each: int) -> Tensor:
    return lengths(0, *each).cumsum(0).int()


def band(q_len: int, kv_len: int, width: int) -> Tensor:
    """Return a mask (q_len, kv_len) that is True within `width` of the diagonal."""
    distance = torch.arange(kv_len, device=DEVICE) - torch.arange(q_len, device=DEVICE)[:, None]
    return distance.abs() < width


MASKS: dict[str, Callable[[], Tensor]] = {
    "band": lambda: band(150, 300, 40),
    "by head": lambda: torch.stack([band(100, 200, 70), ~band(100, 200, 70)]),
    "by batch": lambda: torch.stack([band(90, 130, 5), band(90, 130, 200)])[:, None],
    "rows that see nothing": lambda: band(300, 150, 20),
    "nothing is seen": lambda: torch.zeros(70, 130, dtype=torch.bool, device=DEVICE),
    "everything is seen": lambda: torch.ones(70, 130, dtype=torch.bool, device=DEVICE),
    "elements apart": lambda: band(200, 150, 40).mT,
}


def masked_call(mask: Tensor, head_dim: int = 64, **fields: Any) -> AttentionCall:
    batch = mask.shape[0] if mask.ndim == 4 else 1
    q_len = 70 if mask.shape[-2] == 1 else mask.shape[-2]
    return call_of(q_len, mask.shape[-1], head_dim, **{"batch": batch, "attn_mask": mask, **fields})


def verify(
    name: str,
    call: AttentionCall,
    *,
    is_prepared: bool | None = None,
    batches: Sequence[int] | None = None,
) -> None:
    """Judge the output of a kernel's drop-in (`is_prepared=False`), of its core (`True`), or of
    both (None), as the replay does. `batches` are the batch elements to judge, by default all."""
    kernel = find(name)
    assert kernel.refuses(call) is None
    outputs = [] if is_prepared else [kernel.attention(**call.arguments())]
    if is_prepared is not False and kernel.prepare is not None:
        outputs.append(kernel.prepare(call)())
    assert outputs
    if batches is not None:
        call, outputs = _batch_elements(call, batches), [output[batches] for output in outputs]
    expected = Expected.of(call if kernel.chosen is None else restricted(call, kernel.chosen(call)))
    for output in outputs:
        by: AccuracyClass = "exact" if kernel.accuracy_class == "sparse" else kernel.accuracy_class
        verdict = judge(output, expected, by)
        assert verdict.passed, f"{call.variant}: {verdict.sentence}"


def _batch_elements(call: AttentionCall, batches: Sequence[int]) -> AttentionCall:
    names = ("query", "key", "value", "attn_mask", "seqused_k")
    tensors = {name: getattr(call, name) for name in names}
    return replace(
        call, **{name: each[batches] for name, each in tensors.items() if each is not None}
    )


def assert_right(
    output: Tensor, reference: Tensor, call: AttentionCall, by: AccuracyClass = "exact"
) -> None:
    """Judge an output by comparing it with a given reference."""
    assert output.dtype == call.dtype
    verdict = judge(output, replace(Expected.of(call), reference=reference), by)
    assert verdict.passed, verdict.sentence


def assert_near(output: Tensor, expected: Tensor) -> None:
    atol = 2e-2 if output.dtype == torch.bfloat16 else 3e-3
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=atol, equal_nan=True)


def watched_rooms(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Give decode calls parts full of NaN and counters of zero, and return both for each."""
    rooms: list[tuple[Tensor, Tensor]] = []

    def workspace(numbers: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        room = torch.full((numbers,), math.nan, device=device)
        rooms.append((room, torch.zeros(count, dtype=torch.int32, device=device)))
        return rooms[-1]

    monkeypatch.setattr(split_kv, "workspace", workspace)
    return rooms
