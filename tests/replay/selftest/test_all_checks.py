"""Results of all checks: on a terminal, as JSON, and as an exit code."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from replay.rows.row import GpuState, Machine
from replay.selftest import all_checks as run
from replay.selftest import clock, environment_checks, work
from replay.selftest.all_checks import SelftestReport, selftest
from replay.selftest.result import Result
from tests.in_this_process import RunCli

CPU = torch.device("cpu")
GOOD = Result("good", True, "1.000×", "do this", {"ratio": 1.0})
SKIPPED = Result("skipped", None, "no NVML")
BAD = Result("bad", False, "9.999× " * 20, "do that")


def verdict(*results: Result, resolution: float | None = 0.0123) -> SelftestReport:
    return SelftestReport(Machine("AMD EPYC"), results, resolution)


def test_sentence_says_what_to_rely_on() -> None:
    good = verdict(GOOD, SKIPPED)
    assert good.passed
    # The share is rounded up, so that no smaller difference is promised.
    assert good.sentence.endswith("can tell kernels apart that differ by more than 1.3 %")
    assert "more than 0.1 %" in verdict(GOOD, resolution=0.0).sentence
    bad = verdict(GOOD, BAD)
    assert not bad.passed
    assert bad.sentence == "do not rely on times of this machine (bad): do that"


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all checks pass immediately."""
    for module, name in (
        (environment_checks, "processor"),
        (environment_checks, "clocks"),
        (clock, "known_ratio"),
        (clock, "known_delay"),
        (clock, "nothing"),
        (clock, "profiler"),
        (run, "planted_cheats"),
    ):
        monkeypatch.setattr(module, name, lambda *device, name=name: Result(name, True, "fine"))
    same = (Result("same", True, "fine"), Result("spread", True, "fine"), 0.02)
    monkeypatch.setattr(clock, "same_kernel", lambda device: same)
    monkeypatch.setattr(run, "describe", lambda device: Machine(torch=torch.__version__))


@pytest.mark.usefixtures("checks")
def test_a_check_that_fails_to_run_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> Result:
        raise ValueError("no such thing\nlong story")

    monkeypatch.setattr(clock, "known_delay", fails)
    order: list[str] = []
    found = selftest(CPU, order.append)
    failed = [each for each in found.results if not each.passed]
    assert [(each.name, each.finding) for each in failed] == [
        ("known delay", "ValueError: no such thing")
    ]
    assert order[-1] == "planted cheats"
    assert found.resolution == 0.02
    assert "clocks" not in order
    selftest(torch.device("cuda"), order.append)
    assert "clocks" in order


@pytest.mark.usefixtures("checks")
def test_command_writes_all_checks_and_fails_if_one_failed(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def planted(device: torch.device) -> Result:
        print("noise")
        return Result("planted cheats", False, "found", "read them")

    code, _, _ = run_cli("selftest", "--device", "cpu")
    assert code == 0
    monkeypatch.setattr(run, "planted_cheats", planted)
    code, out, err = run_cli("selftest", "--device", "cpu", "--json", "-")
    assert code == 1
    written = json.loads(out)
    assert (written["passed"], written["resolution"]) == (False, 0.02)
    assert [each["name"] for each in written["checks"]][-1] == "planted cheats"
    assert written["sentence"] in " ".join(err.split())
    file = tmp_path / "selftest.json"
    code, out, _ = run_cli("selftest", "--device", "cpu", "--json", str(file))
    assert "noise" not in out
    assert written["sentence"] in " ".join(out.split())
    assert json.loads(file.read_text()) == written


@pytest.mark.parametrize(
    ("reasons", "passed"),
    [((), True), (("software power cap",), True), (("hardware thermal slowdown",), False)],
)
def test_a_gpu_that_slows_down_by_itself_fails(
    monkeypatch: pytest.MonkeyPatch, reasons: tuple[str, ...], passed: bool
) -> None:
    state = GpuState(1980, 690.5, 61, reasons, 2619)
    monkeypatch.setattr(environment_checks, "why_no_state", lambda device: "")
    monkeypatch.setattr(environment_checks, "read_gpu_state", lambda device: state)
    monkeypatch.setattr(work, "attention", lambda spec, device: lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(environment_checks, "WORKING_SECONDS", 0.001)
    found = environment_checks.clocks(torch.device("cuda"))
    assert found.passed is passed
    assert found.finding.startswith("1980 MHz, 2619 MHz memory, 690 W, 61 °C, ")
    assert all(reason in found.finding for reason in reasons)


@pytest.mark.parametrize(("share", "passed"), [(1.0, True), (0.96, True), (0.5, False)])
def test_busy_processor_fails(monkeypatch: pytest.MonkeyPatch, share: float, passed: bool) -> None:
    now = 0.0

    def perf_counter() -> float:
        nonlocal now
        now += 0.001
        return now

    fake = SimpleNamespace(perf_counter=perf_counter, thread_time=lambda: now * share)
    monkeypatch.setattr(environment_checks, "time", fake)
    found = environment_checks.processor(1.0)
    assert found.passed is passed
    assert found.figures["share"] == pytest.approx(share, abs=0.01)
