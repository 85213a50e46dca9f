"""Examination of kernels on a dataset, each in a separate process."""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attention_replay as ar
from capture.call.attention_call import AttentionCall
from replay.diagnosis import examinations, server
from replay.diagnosis.captured import CAPTURED
from replay.diagnosis.diagnosis import Diagnosis
from replay.diagnosis.diagnosis_text import paragraphs
from replay.diagnosis.examinations import Diagnoses, Examiner, diagnose
from replay.kernels.registry import Kernel, find
from replay.workers.process import Process
from replay.workloads.recorded import from_directory
from replay.workloads.workload import Workload
from tests.factories import random_call, save_calls, settings
from tests.replay.diagnosis import faulty

RunCli = Callable[..., tuple[int, str, str]]
FAULTY = str(Path(faulty.__file__))
BAD = str(Path(__file__).parents[1] / "workers" / "bad_kernels.py")


def written(directory: Path, *calls: AttentionCall) -> list[Workload]:
    return from_directory(save_calls(directory / "calls", calls))[0]


@pytest.mark.slow
def test_crash_in_a_process_is_a_finding(tmp_path: Path) -> None:
    call = random_call(with_output=True, origin={"module": "layers.0"})
    kernels = [CAPTURED, find(f"{BAD}:segfault"), find(f"{BAD}:dies_in_compiled_code")]
    found = diagnose(written(tmp_path, call), kernels, settings(), 60, inside=("compile",))
    crash, later_crash = found.found
    assert (crash.cause, crash.tried) == ("unknown", ("eager",))
    assert (later_crash.cause, later_crash.tried) == ("unknown", ("eager", "compile"))
    assert found.examined == 4
    assert later_crash.sentence.startswith("crash while it ran in compiled code: ")
    assert crash.evidence["status"] == "crash"
    assert (crash.layer, crash.layer_index, crash.step, crash.head) == ("layers.0", 0, 0, None)
    assert crash.instead.startswith("torch-default, which is right on this call")


class Here:
    """Process that runs in this one, and loses its state when it ends."""

    starts = 0
    kept: dict[Any, Any] | None = None

    def __init__(self, *_: Any) -> None:
        pass

    def ask(self, **request: Any) -> list[dict[str, Any]]:
        if self.kept is None:
            self.kept, Here.starts = {}, Here.starts + 1
        replies: list[dict[str, Any]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(faulty, "_kept", self.kept)
            patch.setattr(server, "kernel_named", here)
            server.handle(request, lambda **reply: replies.append(reply), dict)
        return replies

    def close(self) -> None:
        self.kept = None


def here(name: str) -> Kernel:
    """Return a kernel of `faulty`, or one of ours."""
    return Kernel(name, getattr(faulty, name)) if hasattr(faulty, name) else find(name)


@pytest.mark.parametrize(
    ("kernel", "scales", "cause", "processes"),
    [
        ("without_options", [0.5] * 4, "wrong-scale", 2),  # another looks for a right kernel
        ("without_options", [None, *[0.5] * 4, 3.0], "wrong-scale", 3),
        ("scale_kept_by_shape", [0.1, *[0.5] * 4], "stale-graph", 3),
        ("racing_by_half", [None] * 6, "unknown", 2),
    ],
)
def test_calls_that_fail_alike_need_one_new_process(
    kernel: str,
    scales: list[float | None],
    cause: str,
    processes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(examinations, "Process", Here)
    monkeypatch.setattr(Here, "starts", 0)
    calls = [random_call(scale=scale, seed=seed) for seed, scale in enumerate(scales)]
    found = diagnose(written(tmp_path, *calls), [here(kernel)], settings())
    assert {each.cause for each in found.found} == {cause}
    assert Here.starts == processes
    if cause == "stale-graph":  # "wrong-scale" is not its cause
        assert {each.sentence.rpartition("keeps ")[2] for each in found.found} == {
            "something of earlier calls"
        }


def test_the_command_writes_one_finding_per_kernel_and_call(
    run_cli: RunCli, recorded: Path, tmp_path: Path
) -> None:
    path = tmp_path / "findings.json"
    kernels = f"torch-math,{FAULTY}:scales_query,captured"
    asked = ("--dir", str(recorded), "--kernels", kernels, "--in-process", "--device", "cpu")
    code, out, _ = run_cli("doctor", *asked, "--json", str(path))
    assert code == 1
    findings = json.loads(path.read_text())
    assert [each["call"] for each in findings] == [f"model-{index:06d}" for index in range(3)]
    assert all(each.keys() == {f.name for f in dataclasses.fields(Diagnosis)} for each in findings)
    assert {each["cause"] for each in findings} == {"input-changed"}
    assert findings[1]["layer"] == "layers.1"
    assert findings[1]["evidence"]["changed"] == ["query"]
    assert f"{FAULTY}:scales_query: input-changed on 3 calls" in out
    assert "3 of 9 runs of a kernel on a call are wrong" in out


def test_kernel_that_is_wrong_elsewhere_is_not_recommended(recorded: Path) -> None:
    workloads, _ = from_directory(recorded)
    kernels = [find(f"{FAULTY}:{name}") for name in ("wrong_once", "one_row_off")]
    found = diagnose(workloads[:2], [CAPTURED, *kernels], settings(), in_process=True)
    assert [each.kernel.rpartition(":")[2] for each in found.found] == [
        "wrong_once",
        *["one_row_off"] * 2,
    ]
    assert {each.instead for each in found.found} == {"torch-default, which is right on this call"}


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Process, "start", lambda process: pytest.fail("starts a process"))


@pytest.mark.usefixtures("no_processes")
def test_healthy_kernels_exit_with_0(run_cli: RunCli, recorded: Path) -> None:
    asked = ("--dir", str(recorded), "--kernels", "torch-math", "--in-process", "--json", "-")
    options = ("--call", "model-000001", "--device", "cpu", "--in", "compile")
    code, out, err = run_cli("doctor", *asked, *options)
    assert (code, json.loads(out)) == (0, [])
    assert err.splitlines()[-1] == "healthy: no error in 2 runs of a kernel on a call"


@pytest.mark.usefixtures("no_processes")
def test_doctor_examines_a_recording_or_calls(recorded: Path) -> None:
    kernels = [f"{FAULTY}:scales_query", "torch-math"]
    found = ar.doctor(str(recorded), kernels, calls="model-000001", device="cpu", workers=False)
    assert [(each.call, each.cause) for each in found.found] == [("model-000001", "input-changed")]
    assert found.examined == 2
    calls = ar.load(recorded)[:1]
    assert not ar.doctor(calls, "torch-math", device="cpu", workers=False).found
    with pytest.raises(ar.Error, match="no kernel 'eagr'"):
        ar.doctor(recorded, "eagr", device="cpu", workers=False)


@pytest.mark.usefixtures("no_processes")
def test_findings_of_a_model_are_alone_on_stdout(run_cli: RunCli) -> None:
    asked = ("--model", "llama", "--max", "1", "--kernels", "torch-math", "--json", "-")
    code, out, err = run_cli("doctor", *asked, "--in-process", "--quiet")
    assert (code, json.loads(out)) == (0, [])
    assert re.match(r"recorded 1 of \d+ attention calls \([0-9.]+ [kM]B\)\n", err)


def test_findings_before_control_c_are_shown(
    run_cli: RunCli, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examine, calls = Examiner.examine, []

    def interrupted(
        examiner: Examiner, kernel: Kernel, workload: Workload, found: Diagnoses
    ) -> None:
        if workload.name in calls:  # the second kernel's examination
            raise KeyboardInterrupt
        calls.append(workload.name)
        examine(examiner, kernel, workload, found)

    monkeypatch.setattr(Examiner, "examine", interrupted)
    earlier = tmp_path / "findings.json"
    earlier.write_text("[]\n")
    kernels = f"{FAULTY}:scales_query,torch-math"
    asked = ("--dir", str(recorded), "--kernels", kernels, "--in-process", "--device", "cpu")
    code, out, err = run_cli("doctor", *asked, "--json", str(earlier))
    assert code == 130
    first = f"replay doctor: {FAULTY}:scales_query: input-changed: model-000000: "
    assert [line.startswith(first) for line in err.splitlines()] == [True, False]
    assert f"{FAULTY}:scales_query: input-changed on 3 calls" in out
    assert err.splitlines()[-1] == (
        "replay doctor: interrupted: 3 of 6 runs of a kernel on a call were examined, "
        f"and {earlier} stayed as before"
    )
    assert earlier.read_text() == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--dir", "{}", "--kernels", "sage2", "--device", "cpu"), "sage2 cannot run on cpu"),
        (("--dir", "{}", "--call", "other"), "no call 'other' was recorded"),
        (("--dir", "{}", "--max", "3"), "give --model MODEL"),
        (("--model", "llama", "--device", "cpu", "--in", "graph"), "CUDA graphs need a GPU"),
        (("--dir", "{}", "--in", "compiled"), "no mode 'compiled': choose from graph, compile"),
        (("--model", "llama", "--json", "."), "cannot write .: it is a directory"),
        (("--model", "llama", "--kernels", "eagr"), "no kernel 'eagr'"),
        (("--kernels", "eager"), "one of the arguments --dir --model is required"),
    ],
)
def test_wrong_input_exits_with_2(
    run_cli: RunCli, recorded: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    code, _, err = run_cli("doctor", *(each.format(recorded) for each in arguments))
    assert code == 2
    assert len(err.splitlines()) == 1
    assert sentence in err


class Block(torch.nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        mask = torch.ones(40, 40, dtype=torch.bool).tril()
        return torch.nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, mask)


def test_around_a_run() -> None:
    model = torch.nn.Sequential(Block(), Block())
    hidden = torch.randn(1, 2, 40, 32, generator=torch.Generator().manual_seed(0))
    with ar.doctor(model, faulty.with_mask(faulty.READINGS["ignored"])) as diagnosis:
        model(hidden)
        assert not diagnosis.found  # not examined yet
    assert [(each.layer, each.cause) for each in diagnosis.found] == [
        ("0", "mask-ignored"),
        ("1", "mask-ignored"),
    ]
    assert "torch-default, which is right on this call" in str(diagnosis)


def test_a_model_with_nan_is_no_fault_of_a_kernel(tmp_path: Path) -> None:
    model = torch.nn.Sequential(Block(), torch.nn.LayerNorm(32), Block())
    torch.nn.init.constant_(model[1].weight, math.nan)
    kernels = [faulty.with_mask(faulty.READINGS["ignored"]), "torch-math"]
    with (
        pytest.warns(match="not finite"),
        ar.doctor(model, kernels, out=tmp_path) as around,
        torch.no_grad(),
    ):
        model(torch.randn(1, 2, 40, 32, generator=torch.Generator().manual_seed(0)))
    remedy = (
        "what to do: mend the model: its values are not finite from step 0 (encode), 1: output "
        "has NaN, and so has the module's parameter weight; the last finite output is the "
        "attention output of 0 at step 0"
    )
    recorded = ar.doctor(tmp_path, "torch-math,captured", workers=False, progress=False)
    for found, wrong in ((around, 1), (recorded, 0)):
        text = str(found)
        assert text.count("any kernel: nonfinite-input on 1 call\n") == 1
        assert "query 2,560 NaN (visible), key 2,560 NaN (visible), value 2,560 NaN" in text
        assert remedy in text
        assert "2 of 4 runs have inputs that are not finite" in text
        assert text.count("are wrong, by 1 kernel") == wrong


def test_the_worst_call_is_shown_first() -> None:
    found = [
        Diagnosis(f"call-{at}", "k", "overflow", f"layers.{at}", at, 0, 1, "…", {"error": error})
        for at, error in enumerate((0.5, None, 0.7, 0.1, 0.2, 0.3, 0.4))
    ]
    lines = list(paragraphs(found, 9))
    assert lines[:3] == [
        "k: overflow on 7 calls",
        "  call-1: layers.1, step 0, head 1: …",
        "  also call-0: layers.0, step 0, head 1",
    ]
    assert lines[6:] == [
        "  and 2 more calls (--json lists all)",
        "",
        "7 of 9 runs of a kernel on a call are wrong, by 1 kernel",
    ]


def test_a_call_without_queries_or_keys_costs_no_other_finding(tmp_path: Path) -> None:
    sizes = ({}, {"q_len": 0}, {"kv_len": 0})
    workloads = written(
        tmp_path, *(random_call(**size, scale=0.5, with_output=True) for size in sizes)
    )
    kernels = [CAPTURED, find(f"{FAULTY}:without_options")]
    found = diagnose(workloads, kernels, settings(), in_process=True)
    assert [(each.call, each.cause) for each in found.found] == [("model-000000", "wrong-scale")]
    assert found.unreadable == {
        "model-000001": "model-000001: a query of 1×2×0×32 has no output that could be judged"
    }
    assert found.right["model-000002"] == [kernel.name for kernel in kernels]
