"""A recording that kept no calls states why, and suggests a remedy."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

from capture import load, record
from capture.errors import RecordingWarning
from tests.capture.conftest import Layers
from tests.capture.recording.callers import Caller, assert_good, attend


def run_once(model: nn.Module) -> None:
    model(torch.ones(1, 5, 16))


def attend_outside_modules(model: nn.Module) -> None:
    query = torch.randn(1, 2, 5, 8)
    F.scaled_dot_product_attention(query, query, query)


def attend_to_fake_tensors(model: nn.Module) -> None:
    with FakeTensorMode():
        query = torch.randn(1, 2, 5, 8)
        model(attend(query, query, query))


@pytest.mark.parametrize(
    ("model", "modules", "run", "reason"),
    [
        (Layers(), "*.qkv", run_once, r"none of 2 attention calls came .*layers\.0, "),
        (Layers(), None, repr, "seen: the model did not run while"),
        (Caller(), None, attend_outside_modules, "give the model that makes the calls"),
        (Caller(), None, attend_to_fake_tensors, "can be stored"),
        (nn.Linear(16, 2), None, run_once, "call was seen: none was found in the operations of on"),
    ],
)
def test_reason_is_given(
    tmp_path: Path,
    model: nn.Module,
    modules: str | None,
    run: Callable[[nn.Module], object],
    reason: str,
) -> None:
    out = tmp_path / "out"
    with (
        pytest.warns(RecordingWarning, match=reason) as warned,
        record(model, out, modules=modules),
    ):
        run(model)
    assert [each.filename for each in warned] == [__file__]  # the warning points to the caller
    assert not out.exists()


def test_tensors_without_values_are_counted_and_never_kept(tmp_path: Path) -> None:
    ragged = torch.nested.nested_tensor(
        [torch.randn(3, 2, 8), torch.randn(5, 2, 8)], layout=torch.jagged
    ).transpose(1, 2)
    query = torch.randn(4, 2, 5, 8)
    meta = torch.randn(1, 2, 5, 8, device="meta")
    with FakeTensorMode():
        fake = torch.randn(4, 2, 5, 8)
    strange = {
        "nested tensors": attend(ragged, ragged, ragged),
        "inside vmap or another transform of torch.func": lambda: torch.vmap(
            F.scaled_dot_product_attention
        )(query[None], query[None], query[None]),
        "tensors without values": attend(meta, meta, meta),
        "fake tensors": attend(fake, fake, fake),
    }
    model, refused = Caller(), []
    for number, (reason, call) in enumerate(strange.items()):
        told = f"none of 1 attention call can be stored: {reason}"
        with pytest.warns(RecordingWarning, match=told), record(model, tmp_path / str(number)):
            model(call)
        refused.append(f"2 ({reason})")
    told = f"kept of the eligible calls: 2 of 3; refused: {', '.join(refused)}"
    with (
        pytest.warns(RecordingWarning, match=re.escape(told)),
        record(model, tmp_path / "all", max=2) as recording,
    ):
        model(*[*strange.values(), attend(query, query, query)] * 2, attend(query, query, query))
    assert (recording.summary, recording.problems) == (told, [])
    data = load(tmp_path / "all")
    assert_good(data)
    signatures = data.captures[0].census["signatures"]
    assert {*strange, ""} == {each["refusal"] for each in signatures}
