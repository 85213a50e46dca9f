"""The closing line suggests the next step, with a command that can be pasted."""

import importlib
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from capture.call.attention_call import Origin
from capture.command_line.parser import OneSentenceParser
from capture.storage.call_file import FileEntry, PackedCall
from capture.storage.capture_record import CaptureRecord
from capture.storage.dataset import Dataset
from replay.api.recorded_models import RecordingError, whole_captures
from replay.cli import compare_kernels
from replay.cli.doctor import parser as doctor_parser
from replay.cli.main import VERBS
from replay.cli.next_step import next_step
from replay.plan.plan import Budget, LayerChoice, Plan
from replay.rows.row import INTERRUPTED_BLOCKS, Row, Speedup
from tests.factories import accuracy, census, random_call, row, speedup, speedup_over, store_part

BUILT_IN: dict[str, Any] = {"model": "llama", "given": {}, "size": "tiny", "weights": None}
BUSY = "run this again when the machine is less busy"
COUNTED = census(("layers.0", "prefill", 64, 4))


def recording(directory: Path, *captures: CaptureRecord, **tensors: Tensor) -> Path:
    directory.mkdir()
    dataset = Dataset(directory, [], list(captures))
    for capture in captures:
        call = replace(random_call(), origin=Origin(model=capture.model), **tensors)
        path = directory / f"{capture.model}.safetensors"
        dataset.entries.append(PackedCall.of(call).write(path))
    dataset.save_manifest()
    return directory


def capture(model: str = "llama", **fields: Any) -> CaptureRecord:
    return CaptureRecord(model, "trained", **{"settings": BUILT_IN, "census": COUNTED, **fields})


def measured(status: Any = "ok") -> list[Row]:
    baseline = row("torch-default", ms=2.0)
    over = speedup_over() if status == "ok" else None
    return [baseline, row("mine", ms=1.0, status=status, speedup=over)]


def plan(*kernels: str) -> Plan:
    choices = [
        LayerChoice(f"layers.{place}", "prefill", kernel, True, True, None, 1.0, 2.0, 1.0, 1, 1)
        for place, kernel in enumerate(kernels)
    ]
    return Plan("llama", "trained", Budget("cosine", 0.9), "torch-default", choices)


def parser_of(given: Sequence[str]) -> tuple[OneSentenceParser, list[str]]:
    """Return the parser of a command's verb, and the arguments after the verb."""
    if given and given[0] in VERBS:
        return importlib.import_module(VERBS[given[0]]).parser(), list(given[1:])
    return compare_kernels.parser(), list(given)


def said(
    *given: str,
    rows: list[Row] | None = None,
    written: Plan | None = None,
    in_model: Speedup | None = None,
    is_faster: bool = True,
    wrong: Sequence[str] = (),
) -> str:
    parser, others = parser_of(given)
    arguments = parser.parse_args(others)
    directory = vars(arguments).get("dir")
    dataset = Dataset.open(directory) if directory else None
    rows = measured() if rows is None else rows
    more = {"is_faster": is_faster, "wrong": wrong}
    return next_step(arguments, rows, written, dataset, in_model, **more)


def command(sentence: str) -> list[str]:
    """Return the arguments of the command that ends a sentence; `replay` must accept them."""
    _, _, pasted = sentence.rpartition(": replay ")
    arguments = shlex.split(pasted)
    parser, others = parser_of(arguments)
    parser.parse_args(others)
    return arguments


def test_replay_leads_to_the_whole_model(tmp_path: Path) -> None:
    directory = str(recording(tmp_path / "two words", capture()))
    given = ["--kernels", "torch-*,my file.py:k", "--env", "a=/a", "--env", "b=/b", "--timeout=9.5"]
    found = command(said("--dir", directory, *given, "--metric", "all", "--json", "rows.jsonl"))
    assert found == [
        "verify", "--dir", directory, "--env", "a=/a", "--env", "b=/b", "--timeout", "9.5",
        "--kernels", "mine",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rival", "expected"),
    [
        (row("mine", ms=2.0, speedup=speedup_over(against=speedup(1.0, 0.99, 1.01))), ""),
        (row("mine", ms=2.0, flags=(INTERRUPTED_BLOCKS,)), BUSY),
    ],
    ids=["tie", "busy"],
)
def test_replay_without_a_gain_suggests_no_model_run(
    tmp_path: Path, rival: Row, expected: str
) -> None:
    directory = str(recording(tmp_path / "recorded", capture()))
    found = said("--dir", directory, rows=[row("torch-default", ms=2.0), rival])
    assert found == expected


def test_verify_leads_to_a_plan_and_its_use(tmp_path: Path) -> None:
    directory, path = str(recording(tmp_path / "recorded", capture())), str(tmp_path / "plan.json")
    choose = command(said("verify", "--dir", directory))
    chosen = ["--out", "plan.json", "--budget", "cosine=0.998"]
    assert choose == ["plan", "--dir", directory, *chosen]
    assert "replay plan" not in said("verify", "--dir", directory, is_faster=False)
    planning = ("plan", "--dir", directory, "--out", path, "--budget", "cosine=0.9")
    plan("mine").save(path)
    measure = command(said(*planning, written=plan("mine")))
    assert measure == ["verify", "--dir", directory, "--plan", path]
    in_vllm = [replace(row, call=replace(row.call, entry_point="vllm")) for row in measured()]
    exporting = command(said("verify", "--dir", directory, "--plan", path, rows=in_vllm))
    assert exporting == ["export", path, "--to", "vllm"]
    rows = ("--json", "rows.jsonl")
    assert command(said(*planning, *rows, written=plan("mine")))[-2:] == ["--rows", "rows.jsonl"]
    use = said(*measure)
    assert use == f"use the plan in your program: with ar.use_plan({path!r}): …"
    plan("mine.py:kernel").save(path)
    assert f"use_plan({path!r}, trust_code=True)" in said(*measure)
    slower = Speedup(0.4, 0.3, 0.5, "slow", "interval-below-1")
    assert said(*measure, in_model=slower).startswith(f"do not use {path}: the model is slower")


def test_plan_that_changes_nothing_is_reported(tmp_path: Path) -> None:
    directory = str(recording(tmp_path / "recorded", capture()))
    planning = ("plan", "--dir", directory, "--out", "plan.json", "--budget", "cosine=0.9")
    found = said(*planning, written=plan("torch-default"))
    assert found.startswith(
        "plan.json changes nothing: no kernel is shown to be faster within cosine"
    )
    path = tmp_path / "nothing.json"
    plan("torch-default").save(path)
    checked = ("verify", "--dir", directory, "--plan", str(path))
    assert said(*checked) == f"{path} changes nothing: it names no kernel but the model's own"


@pytest.mark.parametrize(
    ("captures", "verb", "ends"),
    [
        ([capture(settings={})], ["plan"], ["--out", "plan.json", "--budget", "cosine=0.998"]),
        ([capture(census={})], [], ["--report", "out.html"]),
        ([capture(heads="0")], [], ["--report", "out.html"]),
        ([capture(), capture("flux", settings={})], [], ["--report", "out.html"]),
        ([capture(), capture("flux")], ["verify"], ["--kernels", "mine"]),
    ],
    ids=["own script", "no census", "some heads", "two models, one own", "two models"],
)
def test_step_that_the_recording_does_not_allow_is_not_suggested(
    tmp_path: Path, captures: list[CaptureRecord], verb: list[str], ends: list[str]
) -> None:
    directory = str(recording(tmp_path / "recorded", *captures))
    assert command(said("--dir", directory)) == [*verb, "--dir", directory, *ends]


def test_parts_of_ranks_stay_joined(tmp_path: Path) -> None:
    """`replay verify` builds the model in one process, which requires whole calls."""
    directory = recording(tmp_path / "calls", capture(), capture("model.rank0"))
    dataset = Dataset.open(directory)
    store_part(directory, random_call(), 0, [0, 1])
    part = FileEntry.read(directory / "model.rank0-000000.safetensors")
    Dataset(directory, [*dataset.entries, part], dataset.captures).save_manifest()
    assert "verify" not in said("--dir", str(directory))
    assert "--join-ranks" in said("--dir", str(directory), "--join-ranks")
    with pytest.raises(RecordingError, match="contains the heads that each rank of model has"):
        whole_captures(Dataset.open(directory), str(directory))


def test_untrusted_model_is_not_suggested(tmp_path: Path) -> None:
    settings = {**BUILT_IN, "model": "evil.py:build"}
    directory = str(recording(tmp_path / "recorded", capture(settings=settings)))
    assert "verify" not in said("--dir", directory)


def test_wrong_kernel_of_the_user_leads_to_the_doctor(tmp_path: Path) -> None:
    directory = str(recording(tmp_path / "recorded", capture()))
    rows = [*measured(), row("my file.py:k", status="inaccurate", accuracy=accuracy())]
    charts = ["--dir", directory, "--backward", "--report", "out.html"]
    assert command(said("--dir", directory, "--backward", rows=rows)) == charts
    asked = ("--dir", directory, "--kernels", "torch-*,my file.py:k", "--call", "llama-*")
    rows.append(row("raising.py:k", status="error", reason="TypeError: no"))
    found = said(*asked, rows=rows)
    assert found.startswith("find out what is wrong: replay doctor ")
    arguments = doctor_parser().parse_args(shlex.split(found.partition("replay doctor ")[2]))
    assert (arguments.dir, arguments.kernels, arguments.call) == (
        directory, "my file.py:k,raising.py:k", "llama-*",
    )  # fmt: skip
    flex = row("flex", status="inaccurate", accuracy=accuracy(), speedup=speedup_over())
    others = [measured()[0], flex]
    assert " doctor " in said(*asked, rows=others)
    assert " doctor " not in said(*asked, rows=[*measured(), *others[1:]])
    assert ": replay random -sq 8,16 --metric " in said("random", "-sq", "8,16", rows=[flex])
    own = row("my file.py:k", speedup=speedup_over())
    assert said("random", rows=[measured()[0], own]) == (
        "check my file.py:k on the calls of a model: "
        "replay doctor --model llama --kernels 'my file.py:k'"
    )
    assert said(*asked, rows=[row("", status="error", reason="0 bytes")]) == ""


def test_training_leads_to_the_model_and_from_there_to_the_cause(tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    settings = {**BUILT_IN, "model": f"{tmp_path}/mine.py:build"}
    directory = str(recording(tmp_path / "recorded", capture(settings=settings)))
    rows = [replace(each, call=replace(each.call, grad_output="recorded")) for each in measured()]
    found = command(said("--dir", directory, "--backward", rows=rows))
    assert found[3:] == ["--backward", "--trust-code", "--kernels", "mine"]
    for given in (["--dir", directory], ["verify", "--dir", directory, "--trust-code"]):
        assert "--backward" not in said(*given)
    grad_output = torch.ones_like(random_call().query)
    trained = str(recording(tmp_path / "trained", capture(), grad_output=grad_output))
    for given in (["--dir", trained], ["verify", "--dir", trained, "--trust-code"]):
        hint = said(*given)
        assert hint.startswith("gradients were recorded, so measure training steps too: ")
        assert command(hint) == [*given, "--backward"]
    drawn = said("--dir", directory, "--backward")
    assert "verify" not in drawn
    why = said("verify", "--dir", directory, "--trust-code", wrong=["mine.py:attention"])
    assert why.startswith("find out which gradients are wrong, and why: replay --dir ")
    assert command(why)[2:] == ["--backward", "--kernels", "mine.py:attention"]
