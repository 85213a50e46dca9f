"""A call that the reader would refuse is reported as the model's bug, not stored."""

import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import load, record
from tests.factories import normal


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any
) -> Tensor:
    return q.clone()


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Any, block_table: Any
) -> Tensor:
    return q.clone()


class Calls(nn.Module):
    def forward(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        return function(*arguments)


pytestmark = pytest.mark.filterwarnings("ignore::capture.errors.RecordingWarning")


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("flash_attn.flash_attn_interface")
    for function in (flash_attn_varlen_func, flash_attn_with_kvcache):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def some_call(chance: random.Random) -> tuple[Any, ...]:
    """Draw a packed or a paged call, whose lengths, maximum and pages may be invalid."""
    if chance.random() < 0.4:
        pool = normal(3, 2, 1, 8)
        used = torch.tensor([chance.randint(-1, 5) for _ in range(2)], dtype=torch.int32)
        table = torch.tensor([[chance.randint(-1, 3) % 4 for _ in range(2)] for _ in range(2)])
        return flash_attn_with_kvcache, normal(2, 1, 1, 8), pool, pool.clone(), used, table.int()
    inner = [chance.randint(-1, 9) for _ in range(chance.randint(0, 2))]
    inner = inner if chance.random() < 0.3 else sorted(max(0, min(each, 8)) for each in inner)
    starts = torch.tensor([chance.choice([0] * 9 + [1]), *inner, chance.choice([8] * 9 + [9])])
    if chance.random() < 0.1:
        starts = torch.zeros(1, dtype=torch.int64).expand(len(starts))
    query = normal(8, 1, 8)
    return flash_attn_varlen_func, query, query, query, starts, starts, chance.randint(3, 9)


def test_every_kept_call_can_be_loaded_and_every_other_call_is_reported(tmp_path: Path) -> None:
    chance, model = random.Random(7), Calls()
    with record(nn.ModuleDict({"packed": model}), tmp_path, name="m", max=200) as recording:
        for _ in range(200):
            model(*some_call(chance))
    assert 30 < len(load(tmp_path)) == recording.kept < 170
    assert [call.origin.module for call in load(tmp_path)] == ["packed"] * recording.kept
    assert sum(each["calls"] for each in recording.capture.invalid_calls) == 200 - recording.kept
    for reason in ("cu_seqlens_q does not rise", "max_seqlen_q is", "seqused_k counts", "pages"):
        assert any(reason in problem for problem in recording.problems), reason
    assert load(tmp_path).captures[0].complete


def test_invalid_call_is_named_in_the_record_and_shown(
    tmp_path: Path, run_cli: Callable[..., tuple[int, str, str]]
) -> None:
    """The lengths of transformers#44911: three sequences, but the tokens of one."""
    model, query = nn.ModuleDict({"attn": Calls()}), normal(256, 2, 16)
    starts, wrong = torch.tensor([0, 256]), torch.tensor([0, 256, 512, 768])
    told = "attn, step 1: the model calls attention with invalid arguments: cu_seqlens_q does not"
    with record(model, tmp_path / "a") as recording:
        for each in (starts, wrong, wrong, starts):
            model["attn"](flash_attn_varlen_func, *[query] * 3, each, each, 256)
    assert recording.problems == [f"{told} rise from 0 to 256 (2 calls)"]
    assert (recording.kept, recording.lost, len(load(tmp_path / "a"))) == (2, 0, 2)
    [capture] = load(tmp_path / "a").captures
    reason = "cu_seqlens_q does not rise from 0 to 256"
    assert capture.invalid_calls == [{"module": "attn", "step": 1, "reason": reason, "calls": 2}]
    code, out, _ = run_cli("show", str(tmp_path / "a"))
    assert code == 0
    assert f"invalid call: {told} rise from 0 to 256 (2 calls)" in " ".join(out.split())
