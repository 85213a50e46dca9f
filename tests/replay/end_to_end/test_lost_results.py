"""Other results are kept if a model cannot run or a file cannot be written."""

import contextlib
import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from replay.api.verify_model import _Work
from replay.end_to_end.model_check import MeasuredSpan, ModelResult
from replay.end_to_end.model_process import BASELINE, ModelRefused
from replay.end_to_end.predicted_times import RUN
from replay.plan.plan import Budget, LayerChoice, Plan
from replay.rows.row_files import save_jsonl
from replay.timing.statistics import paired_speedup, summarize
from tests import factories
from tests.in_this_process import RunCli

FIRST = "model.py:build"
SAME: dict[str, Any] = {"nan_count": 0, "baseline_nan_count": 0}
FULL = "/dev/full"
NO_ROOM = f"replay verify: cannot write {FULL}: No space left on device: make room"
QUICK = ("--trust-code", "--kernels", "torch-math", "--device", "cpu", "--rounds", "3")


@pytest.fixture
def run_models(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: RunCli
) -> RunCli:
    """`run_models(options, refused={"second"})` runs two models, `model.py:build` and `second`."""
    shutil.copytree(workshop / "recorded", tmp_path / "recorded")
    monkeypatch.chdir(tmp_path)
    manifest = Path("recorded/manifest.json")
    data = json.loads(manifest.read_text())
    data["captures"].append({**data["captures"][0], "model": "second"})
    manifest.write_text(json.dumps(data))
    monkeypatch.setattr("replay.api.session._first_processes", lambda *_: contextlib.nullcontext())

    def run(
        *options: str, refused: Collection[str] = (), alone: tuple[str, float] | None = None
    ) -> tuple[int, str, str]:
        def check(_: object, work: _Work, *__: Any) -> list[ModelResult]:
            capture = work.capture
            if capture.model in refused:
                raise ModelRefused("it cannot be built")
            found = ModelResult(BASELINE.name, capture.model, "random")
            found.measured[RUN] = MeasuredSpan(summarize([2.0] * 5), None, None, 0.002)
            if alone is None:
                return [found]
            gain = paired_speedup([alone[1]] * 9, [1.0] * 9)
            span = MeasuredSpan(summarize([1.0] * 9), gain, None, 0.001)
            return [found, ModelResult(alone[0], FIRST, "random", measured={RUN: span}, drift=SAME)]

        monkeypatch.setattr("replay.api.verify_model._checks", check)
        if alone is None:
            return run_cli("verify", "--dir", "recorded", *QUICK, "--quiet", *options)
        manifest.write_text(json.dumps({**data, "captures": data["captures"][:1]}))
        return run_cli("verify", "--dir", "recorded", *QUICK, *options)

    return run


@pytest.mark.parametrize(
    ("plan", "ratio", "hint"),
    [
        (["--plan", "plan.json"], 0.5, "do not use plan.json"),
        (["--plan", "plan.json"], 2.0, "use the plan in your program"),
        ([], 0.5, "look at it as charts"),
        ([], 2.0, "choose the fastest kernel for each layer"),
    ],
)
def test_hint_follows_from_measured_speedups(
    run_models: RunCli, plan: list[str], ratio: float, hint: str
) -> None:
    choice = LayerChoice("layers.0", "denoise", "mine", True, True, None, 1.0, 2.0, 1.0, 1, 1)
    Plan(FIRST, "random", Budget("cosine", 0.9), "torch-default", [choice]).save("plan.json")
    save_jsonl([factories.row("mine", factories.call_facts(model=FIRST), 1.0)], Path("rows.jsonl"))
    _, _, err = run_models(*plan, "--rows", "rows.jsonl", alone=("plan.json", ratio))
    assert err.splitlines()[-1].startswith(f"next: {hint}")


def models(text: str) -> list[str]:
    return [json.loads(line)["model"] for line in text.splitlines()]


def test_full_disk_loses_nothing_else(run_models: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vl_convert")
    monkeypatch.setattr("replay.cli.files.check_place", lambda path: None)  # it is full later
    code, out, err = run_models("--checks", FULL, "--report", "out.html")
    assert code == 2
    assert f"{FIRST} end to end" in out
    assert "second end to end" in out
    assert err.splitlines()[1:] == [NO_ROOM]
    assert Path("out.html").is_file()


def test_model_that_cannot_run_loses_only_its_own_results(run_models: RunCli) -> None:
    pytest.importorskip("vl_convert")
    given = ("--checks", "e2e.jsonl", "--report", "out.html")
    code, out, err = run_models(*given, refused={FIRST})
    assert code == 2
    assert "second end to end" in out
    assert err.splitlines()[1:] == [f"replay verify: {FIRST}: it cannot be built"]
    earlier = Path("e2e.jsonl").read_text()
    assert models(earlier) == ["second"]
    Path("out.html").unlink()
    code, _, err = run_models(*given, refused={FIRST, "second"})
    assert code == 2
    assert err.endswith(f"replay verify: {FIRST}: it cannot be built; second: it cannot be built\n")
    assert Path("e2e.jsonl").read_text() == earlier
    assert Path("out.html").is_file()
