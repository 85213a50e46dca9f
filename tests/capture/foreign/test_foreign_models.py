"""Other projects' models, recorded here and observed by a process that does not use our code."""

import subprocess
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from capture import AttentionCall, load, record
from capture.errors import RecordingWarning
from capture.recording.recording import Recording
from replay.accuracy.reference import attention, same_dtype
from tests.capture.conftest import REPOSITORY
from tests.capture.foreign.table import MODELS, markdown

pytestmark = pytest.mark.slow


class Recorded(NamedTuple):
    recording: Recording
    calls: list[AttentionCall]
    outputs: list[list[Tensor]]
    """Outputs of three runs: before, during and after the recording."""


@pytest.fixture(scope="module")
def observed(
    tmp_path_factory: pytest.TempPathFactory, start_python: Callable[..., subprocess.Popen[str]]
) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Function that returns the other process's observations of one model."""
    directory = tmp_path_factory.mktemp("observed")
    process = start_python("-m", "tests.capture.foreign.independent", str(directory), cwd=directory)

    def of(name: str) -> dict[str, Any]:
        if process.poll() is None:
            _, errors = process.communicate(timeout=280)
            assert process.returncode == 0, errors
        found: dict[str, Any] = torch.load(directory / f"{list(MODELS).index(name)}.pt")
        assert "error" not in found, found["error"]
        return found

    yield of
    process.kill()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Recorded]:
    """`recorded(name)` returns the recording of a model, which is made once."""
    known: dict[str, Recorded] = {}

    def of(name: str) -> Recorded:
        if name not in known:
            known[name] = record_model(name, tmp_path_factory.mktemp("recorded"))
        return known[name]

    return of


def record_model(name: str, out: Path) -> Recorded:
    watched, run = MODELS[name].build()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)  # "nothing to record" is expected
        outputs = [run()]
        with record(watched, out / "calls", name="model", max=1000) as recording:
            outputs.append(run())
        outputs.append(run())
    calls = list(load(out / "calls")) if recording.kept else []
    calls.sort(key=lambda call: call.origin.call_index)
    return Recorded(recording, calls, [tensors(each) for each in outputs])


def tensors(output: Any) -> list[Tensor]:
    return [each for each in tree_leaves(output) if isinstance(each, Tensor)]


def test_docs_name_every_model() -> None:
    assert markdown() in (REPOSITORY / "docs" / "recording.md").read_text(encoding="utf-8")


every_model = pytest.mark.parametrize("name", MODELS)


@every_model
def test_recording_changes_no_bit(name: str, recorded: Callable[[str], Recorded]) -> None:
    before, during, after = recorded(name).outputs
    assert before
    for others in (during, after):
        assert len(others) == len(before)
        assert all(torch.equal(one, other) for one, other in zip(before, others, strict=True))


@every_model
def test_calls_have_phase_step_entry_point(name: str, recorded: Callable[[str], Recorded]) -> None:
    calls = recorded(name).calls
    assert Counter((call.origin.phase, call.origin.step) for call in calls) == MODELS[name].calls
    assert {call.origin.entry_point for call in calls} == (
        MODELS[name].entry_points if calls else set()
    )
    assert all(call.origin.module for call in calls)


@every_model
def test_missed_attention_is_reported(name: str, recorded: Callable[[str], Recorded]) -> None:
    recording, calls, _ = recorded(name)
    assert {past.kind: past.forwards for past in recording.missed_attention} == MODELS[name].unseen
    if calls:
        assert recording.problems == []
    else:
        [problem] = recording.problems
        kind = next(iter(MODELS[name].unseen), "none was found in the operations of one step")
        assert kind in problem


@every_model
def test_census_equals_another_processs_count(
    name: str, recorded: Callable[[str], Recorded], observed: Callable[[str], dict[str, Any]]
) -> None:
    recording, calls, _ = recorded(name)
    found = observed(name)
    census = recording.census.to_json()
    entry_points = Counter[str]()
    for row in census["rows"]:
        entry_points[census["signatures"][row["signature"]]["road"]] += row["calls"]
    assert entry_points["sdpa"] == found["operator"]
    assert entry_points.total() == len(found["notes"]) == len(calls) == recording.seen


@every_model
def test_tensors_equal_another_processs_notes(
    name: str, recorded: Callable[[str], Recorded], observed: Callable[[str], dict[str, Any]]
) -> None:
    calls, notes = recorded(name).calls, observed(name)["notes"]
    for call, note in zip(calls, notes, strict=True):
        given = (call.query, call.key, call.value)
        for tensor, size, stride, noted in zip(
            given, note["sizes"], note["strides"], note["tensors"], strict=True
        ):
            assert list(tensor.shape) == size
            assert list(tensor.stride()) == stride
            assert torch.equal(tensor, noted)
        assert torch.equal(call.output, note["output"])


@every_model
def test_reference_agrees_with_the_model(name: str, recorded: Callable[[str], Recorded]) -> None:
    """The call contains all of the model's options, because the outputs agree up to rounding."""
    for call in recorded(name).calls:
        reference = attention(call)
        rounding = 8 * torch.finfo(call.dtype).eps * call.value.abs().max().double()
        eager_errors = [(each.double() - reference).abs().max() for each in same_dtype(call)]
        allowed = 2 * max(eager_errors) + rounding
        error = (call.output.double() - reference).abs().amax(dim=-1)
        assert (error.masked_fill(without_keys(call), 0) <= allowed).all()


def without_keys(call: AttentionCall) -> Tensor:
    """Return the rows (B, Hq, Sq) that may see no key; kernels differ in such rows."""
    rows = torch.zeros(call.output.shape[:3], dtype=torch.bool)
    if call.attn_mask is None:
        return rows
    mask = call.attn_mask
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    q_len, kv_len = call.query.shape[2], call.key.shape[2]
    if call.is_causal:
        allowed = allowed & torch.ones(q_len, kv_len, dtype=torch.bool).tril()
    return rows | ~allowed.expand(*allowed.shape[:-1], kv_len).any(-1)
