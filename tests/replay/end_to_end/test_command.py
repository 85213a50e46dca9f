"""The command refuses bad requests in one sentence, before it measures anything."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from capture.storage.capture_record import CaptureRecord
from replay.api.verify_model import _variants
from replay.end_to_end.model_process import ModelRefused, import_path
from replay.end_to_end.rebuild import NotRebuildable, load_arguments
from replay.kernels.registry import Kernel, find
from replay.plan.plan import Budget, LayerChoice, Plan
from replay.rows.row import HERE, Row, Status
from tests import factories
from tests.in_this_process import RunCli, refusal

Refused = Callable[..., str]


@pytest.fixture
def refused(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: RunCli
) -> Refused:
    """`refused(…)` returns the error of a command; `recorded` is the small model's recording."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(workshop / "recorded", tmp_path / "recorded")

    def measured(*args: object, **kwargs: object) -> None:
        pytest.fail("it was measured first")

    monkeypatch.setattr("replay.api.session.Session.rows", measured)

    def run(*arguments: str) -> str:
        return refusal(run_cli, *arguments)

    return run


E2E = ("verify", "--dir", "recorded", "--trust-code")
PLAN = ("plan", "--dir", "recorded", "--out", "plan.json")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((*E2E, "--in-process"), "unknown option --in-process"),
        ((*E2E, "--call", "x"), "unknown option --call"),
        ((*E2E, "--text", "other.json"), "--text requires a language model"),
        ((*E2E, "--plan", "none.json"), "cannot read the plan none.json"),
        ((*E2E, "--plan", "other.json"), "a plan for flux, but recorded contains model.py:build"),
        ((*E2E, "--rows", "none.jsonl"), "there is no file none.jsonl: write one with"),
        ((*PLAN, "--rows", "x", "--json", "y"), "--json is for rows that are measured"),
        (("plan", "--dir", "recorded"), "the following arguments are required: --out"),
        ((*PLAN, "--budget", "speed=2"), "unknown metric 'speed' in the budget"),
        (("plan", "--dir", "recorded", "--out", "no/plan"), "cannot write no/plan"),
        (
            (*E2E, "--device", "cpu", "--plan", "h200.json"),
            "h200.json was made on H200, and this is cpu: make one here with `replay plan`",
        ),
    ],
)
def test_misuse_is_refused(refused: Refused, arguments: tuple[str, ...], sentence: str) -> None:
    Plan("flux", "", Budget("cosine", 0.9), "torch-default").save("other.json")
    h200 = Plan("model.py:build", "", Budget("cosine", 0.9), "torch-default", device="H200")
    h200.save("h200.json")
    assert sentence in refused(*arguments)


def edit(change: Callable[[dict[str, Any]], None]) -> None:
    manifest = Path("recorded/manifest.json")
    data = json.loads(manifest.read_text())
    change(data)
    manifest.write_text(json.dumps(data))


def test_unsuitable_recording_is_refused(refused: Refused) -> None:
    edit(lambda data: data["captures"].append({**data["captures"][0], "model": "second"}))
    assert "contains model.py:build, second" in refused(*PLAN, "--budget", "rmse=1")
    edit(lambda data: data["captures"].pop())
    edit(lambda data: data["captures"][0]["settings"].pop("model"))
    assert "in your own script" in refused(*E2E)
    edit(lambda data: data["captures"][0].update(census={}))
    assert "has no count of a model's calls: capture it again" in refused(*E2E)
    edit(lambda data: data["captures"][0].update(census={"signatures": []}))
    assert "manifest.json is damaged (rows is missing)" in refused(*E2E)


@pytest.mark.parametrize("arguments", [E2E, (*PLAN, "--budget", "rmse=1")])
def test_recording_of_some_heads_is_refused(refused: Refused, arguments: tuple[str, ...]) -> None:
    edit(lambda data: data["captures"][0].update(heads="0-1"))
    assert "contains only heads 0-1 of each call of model.py:build" in refused(*arguments)


def test_unusable_text_is_refused(refused: Refused) -> None:
    def prefills(data: dict[str, Any]) -> None:
        for row in data["captures"][0]["census"]["rows"]:
            row["phase"] = "prefill"

    edit(prefills)
    assert "a model built by a function does not have" in refused(
        *E2E, "--text", "recorded/manifest.json"
    )
    edit(lambda data: data["captures"][0]["settings"].update(model="."))
    Path("empty.txt").write_text(" \n")
    Path("binary.txt").write_bytes(b"\xff\xfe\x00")
    assert "cannot read --text none.txt: No such file" in refused(*E2E, "--text", "none.txt")
    assert "cannot read --text recorded: Is a directory" in refused(*E2E, "--text", "recorded")
    assert "empty.txt is empty" in refused(*E2E, "--text", "empty.txt")
    assert "binary.txt is not UTF-8" in refused(*E2E, "--text", "binary.txt")


def test_model_is_rebuilt_from_its_settings(capture_record: CaptureRecord, tmp_path: Path) -> None:
    model = capture_record.settings["model"]
    assert model.endswith("model.py:build")
    assert load_arguments(capture_record, "cpu", trust_code=True) == {"model": model, "seed": 0}
    settings = {**capture_record.settings, "given": {"steps": 3}, "model": str(tmp_path)}
    directory = replace(capture_record, settings=settings)
    assert load_arguments(directory, "cpu") == {
        "model": str(tmp_path),
        "seed": 0,
        "steps": 3,
        "device": "cpu",
    }
    settings |= {"model": "llama", "size": "tiny", "weights": "random", "checkpoint": None}
    settings |= {"dtype": "float32", "steps": 8, "given": {"prompt": "Once"}}
    named = load_arguments(replace(capture_record, settings=settings), "cuda:1")
    assert named == {
        **{"model": "llama", "size": "tiny", "weights": "random", "checkpoint": None},
        **{"dtype": "float32", "steps": 8, "seed": 0, "prompt": "Once", "device": "cuda:1"},
    }
    with pytest.raises(NotRebuildable):
        load_arguments(replace(capture_record, settings={}), "cpu")


def test_code_named_by_a_recording_needs_permission(refused: Refused) -> None:
    """The recording, and a file sent with it, may come from a stranger."""
    Path("evil").mkdir()
    Path("evil/evil.py").write_text("")
    edit(lambda data: data["captures"][0]["settings"].update(model="evil/evil.py:f"))
    sentence = refused("verify", "--dir", "recorded")
    assert "names code that builds its model, evil/evil.py:f: read it" in sentence
    assert sentence.endswith("allow it to run with --trust-code\n")


ELSEWHERE = "does not exist in this directory: run this in the directory where `capture` ran"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": "mm.py:build"}, f"mm.py, which {ELSEWHERE}, put it here, or"),
        ({"model": "/x/mm.py:build"}, "/x/mm.py, which does not exist: put it there, or capture"),
        ({"model": "gone"}, f"gone, which {ELSEWHERE}, put it here, or"),
        ({"model": "llama", "checkpoint": "./gone"}, f"./gone, which {ELSEWHERE}"),
    ],
)
def test_missing_files_are_named(refused: Refused, settings: dict[str, Any], said: str) -> None:
    edit(lambda data: data["captures"][0].update(settings={"given": {}, **settings}))
    sentence = refused("verify", "--dir", "recorded")
    assert f"the recording of model.py:build says that its model is built from {said}" in sentence


@pytest.mark.parametrize("setting", ["model", "checkpoint"])
def test_code_in_a_checkpoint_needs_permission(refused: Refused, setting: str) -> None:
    Path("evil/unet").mkdir(parents=True)
    Path("evil/unet/mine.py").write_text("")
    settings = {"model": "llama", "given": {}, "size": "tiny", "checkpoint": None}
    edit(lambda data: data["captures"][0].update(settings={**settings, setting: "evil"}))
    assert "code that builds its model, evil/unet/mine.py" in refused("verify", "--dir", "recorded")


def test_code_of_a_plan_needs_permission(refused: Refused, capture_record: CaptureRecord) -> None:
    edit(lambda data: data["captures"][0].update(settings={"model": ".", "given": {}}))
    model, budget = capture_record.model, Budget("cosine", 0.9)
    Plan(model, "", budget, "evil.py:k").save("baseline.json")
    choice = LayerChoice("a", "decode", "evil.py:k", True, True, None, None, None, 0.0, 1, 1)
    Plan(model, "", budget, "torch-default", [choice]).save("choice.json")
    for plan in ("baseline.json", "choice.json"):
        sentence = refused("verify", "--dir", "recorded", "--plan", plan, "--trust-code")
        assert (
            f"{plan} names a kernel in evil.py, which does not exist in this directory: run"
            in sentence
        )
    Path("evil.py").write_text("")
    for plan in ("baseline.json", "choice.json"):
        sentence = refused("verify", "--dir", "recorded", "--plan", plan)
        assert f"{plan} names kernels whose code would run, evil.py:k: read it" in sentence


@pytest.mark.parametrize(
    "settings",
    [
        {"model": 3, "given": {}},
        {"model": "llama", "given": []},
        {"model": "llama", "given": {"prompt": 3}},
        {"model": "llama", "given": {"trust_remote_code": True}},
        {"model": "llama", "given": {}, "checkpoint": ["x"]},
        {"model": "llama", "given": {}, "seed": "x"},
    ],
)
def test_settings_of_another_type_are_damage(refused: Refused, settings: dict[str, Any]) -> None:
    edit(lambda data: data["captures"][0].update(settings=settings))
    assert "is damaged" in refused("verify", "--dir", "recorded")


def tried(kernel: str, status: Status, environment: str = HERE) -> Row:
    return factories.row(kernel, None, None, status, "because", environment=environment)


def test_kernels_are_chosen(capture_record: CaptureRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.end_to_end.model_process.import_path", lambda python: (python,))
    own, plain = find("torch-default"), find("torch-math")
    alone = [Kernel(name, plain.attention, own_process=True) for name in ("x", "y")]
    kernels = [own, plain, *alone, Kernel("no", plain.attention), Kernel("dead", plain.attention)]
    rows = [tried(kernel.name, "ok") for kernel in kernels[:4]]
    rows += [tried("no", "unsupported"), tried("dead", "crash"), tried("dead", "timeout")]
    rows += [tried("torch-math", "inaccurate", "other"), tried("torch-math", "crash", "other")]
    groups, failed = _variants(
        rows, {HERE: kernels, "other": [plain]}, {"other": "python"}, capture_record
    )
    assert [[(each.name, each.path) for each in group] for group in groups] == [
        [("torch-math", ())],
        [("x", ())],
        [("y", ())],
        [("torch-math@other", ("python",))],
    ]
    assert {each.kernel: each.status for each in failed} == {"no": "unsupported", "dead": "crash"}
    assert failed[0].reason == "refuses every recorded call: because"
    assert failed[1].reason.endswith("failed in the replay: because")
    # In a model that does not call SDPA, plain SDPA is a kernel like others.
    rows = [replace(rows[0], call=factories.call_facts(entry_point="transformers"))]
    ((plain_sdpa,),), _ = _variants(rows, {HERE: [own]}, {}, capture_record)
    assert plain_sdpa.kernel == own.name


def test_import_path_of_an_interpreter_is_read(tmp_path: Path) -> None:
    def interpreter(name: str, prints: str) -> str:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\necho '{prints}'\n")
        path.chmod(0o755)
        return str(path)

    version = list(sys.version_info[:2])
    told = json.dumps([version, ["", sys.path[-1], "/opt/elsewhere"]])
    assert import_path(interpreter("good", told)) == ("/opt/elsewhere",)
    with pytest.raises(ModelRefused, match=r"is Python 2\.7, but the model runs in Python"):
        import_path(interpreter("old", json.dumps([[2, 7], []])))
    for broken in (interpreter("broken", "hello"), str(tmp_path / "none")):
        with pytest.raises(ModelRefused, match="did not report its import path"):
            import_path(broken)
