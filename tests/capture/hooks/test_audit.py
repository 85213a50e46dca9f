"""An audit counts the attention operators that run outside recorded calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from capture import record
from tests.capture.conftest import Attention
from tests.capture.recording.callers import Caller, attend

HELD = {"sdpa": F.scaled_dot_product_attention}


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = torch.randn(3, 1, 2, 16, 16)
    return query, key, value


def test_calls_that_were_seen_are_not_counted(
    layers: nn.Module, states: Tensor, tmp_path: Path
) -> None:
    expected = layers(states)
    with record(layers, tmp_path, audit=True) as recording:
        assert torch.equal(layers(states), expected)
    assert recording.seen == 2
    assert str(recording.audit) == "audit: no attention operator was missed"


def test_held_reference_is_counted_once_on_any_backend(tmp_path: Path) -> None:
    tensors = qkv()
    model = Caller()
    with record(model, tmp_path, audit=True) as recording:
        model(attend(*tensors), lambda: HELD["sdpa"](*tensors))
        with sdpa_kernel(SDPBackend.MATH):
            model(lambda: HELD["sdpa"](*tensors))
    assert recording.seen == 1
    assert recording.audit is not None
    assert recording.audit.calls == {("scaled_dot_product_attention", "Caller"): 2}
    [past] = recording.missed_attention
    assert (past.kind, past.forwards, past.example) == ("scaled_dot_product_attention", 2, "Caller")


def test_operators_are_counted_by_name(tmp_path: Path) -> None:
    query, key, value = qkv()
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    model = Caller()
    with record(model, tmp_path, audit=True) as recording:
        model(attend(query, key, value), lambda: operator(query, key, value)[0])
    assert str(recording.audit) == (
        "audit: not seen: 1 call of aten::_scaled_dot_product_flash_attention_for_cpu "
        "(such as in Caller)"
    )


def test_flex_attention_runs_under_an_audit(tmp_path: Path) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    tensors = qkv()
    expected = flex_attention(*tensors)
    model = Caller()
    with record(model, tmp_path, audit=True) as recording:
        model(attend(*tensors))
        [output] = model(lambda: flex_attention(*tensors))  # type: ignore[list-item,return-value]
    assert torch.equal(output, expected)  # type: ignore[arg-type]
    assert recording.audit is not None
    assert recording.seen + sum(recording.audit.calls.values()) >= 2


def test_traced_layer_is_counted_where_it_ran(layers: Any, states: Tensor, tmp_path: Path) -> None:
    layers.layers[1] = torch.jit.trace(Attention(), states)
    with torch.no_grad(), record(layers, tmp_path, audit=True) as recording:
        layers(states)
    assert recording.audit is not None
    assert [path for _, path in recording.audit.calls] == ["layers.1"]
    [past] = recording.missed_attention  # reported once, by its module
    assert past.kind == "Attention"
