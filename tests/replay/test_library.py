"""Public functions: results, and errors for wrong arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import attention_replay as ar
from replay.bench.settings import Settings, SettingsError
from replay.kernels.registry import KernelNameError
from replay.rows.row import Machine
from replay.selftest.all_checks import SelftestReport
from replay.selftest.result import Result
from tests.factories import row
from tests.in_this_process import RunCli


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"cache": "foo"}, "cache must be cold or warm, not 'foo'"),
        ({"cache": "cold"}, "a cold cache requires a GPU"),
        ({"max_seconds": -1}, "max_seconds must be a number greater than 0, not -1"),
        ({"max_seconds": float("nan")}, "max_seconds must be a number"),
        ({"calls_before": -1}, "calls_before must be an integer of at least 0, not -1"),
        ({"rounds": 0}, "rounds must be an integer of at least 1, not 0"),
        ({"seed": -1}, "seed must be an integer of at least 0, not -1"),
        ({"device": "gpu"}, "device"),
        ({"device": None}, "device"),
    ],
)
def test_settings_are_checked(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        Settings(**{"device": "cpu", "cache": "warm", **given})


def test_settings_take_names_of_devices_and_directories() -> None:
    settings = Settings("cpu", "warm", save_output="kept")  # type: ignore[arg-type]
    assert (settings.device, settings.save_output) == (torch.device("cpu"), Path("kept"))
    assert Settings.from_json(settings.to_json()).device == torch.device("cpu")


def test_kernels_are_found_by_name_and_glob() -> None:
    assert [kernel.name for kernel in ar.kernels("torch-math,eager")] == ["torch-math", "eager"]
    assert ar.kernels(["torch-math", "eager"]) == ar.kernels("torch-math,eager")
    names = [kernel.name for kernel in ar.kernels()]
    assert {"torch-flash", "sage1"} <= {*names}
    assert not any(kernel.variant_of for kernel in ar.kernels())
    with pytest.raises(KernelNameError, match="did you mean"):
        ar.kernels("torch-mat")


def test_selftest_is_the_same_in_a_program(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    passed = Result("known ratio", True, "2.00", "")
    report = SelftestReport(Machine("a CPU"), (passed,), 0.01)
    monkeypatch.setattr("replay.selftest.all_checks.selftest", lambda *_: report)
    assert ar.selftest("cpu", progress=False) is report
    code, out, _ = run_cli("selftest", "--device", "cpu", "--json", str(tmp_path / "x.json"))
    assert code == 0
    assert report.sentence in out
    assert json.loads((tmp_path / "x.json").read_text())["passed"]
    failed = replace(report, results=(replace(passed, passed=False, remedy="close others"),))
    monkeypatch.setattr("replay.selftest.all_checks.selftest", lambda *_: failed)
    assert run_cli("selftest", "--device", "cpu", "--quiet")[0] == 1


NOT_VALID = "no file can have this name|there is no file|No such file|File name too long"


@pytest.mark.parametrize("path", ["new/a\0b", "new/a\ud800b", "new/" + "x" * 300])
def test_path_that_no_file_can_have_is_one_sentence_and_leaves_nothing(
    path: str, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows, model = ar.Rows([row()]), torch.nn.Linear(2, 2)
    uses: list[Callable[[], Any]] = [
        lambda: ar.Plan.load(path),
        lambda: rows.write(path),
        lambda: ar.compare(rows, path),
        lambda: ar.record(model, path).__enter__(),
        lambda: ar.share(recorded, path),
        lambda: ar.tune(model, model, "cosine=0.9", out=path, progress=False),
        lambda: ar.report(rows, checks=path, out="page.html"),
    ]
    for use in uses:
        with pytest.raises(ar.Error, match=f"^[^\n]*(?i:{NOT_VALID})[^\n]*$"):
            use()
    assert [*tmp_path.iterdir()] == [recorded]


def test_reproduce_requires_a_single_call(recorded: Path) -> None:
    with pytest.raises(ar.Error, match="is 3 calls"):
        ar.reproduce(recorded, "*", "eager", "bug", device="cpu", progress=False)


def test_doctor_of_a_model_needs_a_kernel(tmp_path: Path) -> None:
    with (
        pytest.raises(KernelNameError, match="names no kernel"),
        ar.doctor(torch.nn.Identity(), [], out=tmp_path / "out"),
    ):
        pass
    assert not (tmp_path / "out").exists()
