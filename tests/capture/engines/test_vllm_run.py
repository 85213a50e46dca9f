"""`capture --engine vllm`, with a stand-in for vLLM."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from capture import load
from tests.capture.engines import engine_stand_in
from tests.capture.engines.engine_stand_in import LLM, Model
from tests.in_this_process import RunCli


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [{"prompt": [3] * length, "max_tokens": 4} for length in (5, 40, 1)]
    (tmp_path / "prompts").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path / "prompts"


@pytest.fixture
def run(run_cli: RunCli, prompts: Path, tmp_path: Path) -> Any:
    def capture(*options: str) -> tuple[int, str, str]:
        to = ("--prompts", str(prompts), "--out", str(tmp_path / "calls"), "--max", "6")
        return run_cli("--engine", "vllm", "--model", "a/llama", *to, *options)

    return capture


def test_prompts_are_recorded_in_the_engine(run: Any, tmp_path: Path) -> None:
    code, stdout, _ = run("--seed", "5", "--set", "max_model_len=512", "--dtype", "bf16")
    assert code == 0
    assert stdout.startswith("recorded 6 of 10 attention calls")
    assert LLM.latest.options == {
        "seed": 5,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "max_model_len": 512,
    }
    dataset = load(tmp_path / "calls")
    assert {call.origin.phase for call in dataset} == {"prefill", "mixed", "decode"}
    assert {call.origin.model for call in dataset} == {"llama"}
    assert dataset.captures[0].settings["engine"] == "vllm"


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ("enforce_eager=false", "PIECEWISE"),
        ('compilation_config={"level": 3}', "PIECEWISE"),
        ('compilation_config={"cudagraph_mode": "FULL"}', "FULL"),
    ],
)
def test_calls_in_whole_graphs_are_counted(run: Any, given: str, mode: str) -> None:
    code, stdout, stderr = run("--set", given)
    assert LLM.latest.options["compilation_config"]["cudagraph_mode"] == mode
    assert not LLM.latest.options["enforce_eager"]
    # Of three steps in graphs, the last one is not counted.
    refusal = "(inside a CUDA graph of a whole step; start vLLM with --enforce-eager or"
    assert (f"refused: 4 {refusal}" in stderr) == (mode == "FULL")
    assert code == 0
    assert f"of {8 if mode == 'FULL' else 10} attention calls" in stdout


def test_trace_is_answered_at_its_times(run_cli: RunCli, tmp_path: Path) -> None:
    year = 3.2e10  # in milliseconds; the engine does not wait while it has nothing to do
    lengths = [(0, 5, 3), (year, 40, 2), (year + 1, 7, 4)]
    names = ("timestamp", "input_length", "output_length")
    lines = [json.dumps(dict(zip(names, each, strict=True))) for each in lengths]
    (tmp_path / "trace").write_text("\n".join(lines))
    command = ("--engine", "vllm", "--model", "llama", "--trace", str(tmp_path / "trace"))
    code, _, _ = run_cli(*command, "--out", str(tmp_path / "calls"), "--max", "4")
    assert code == 0
    (first, *_), answered = LLM.latest.llm_engine.steps, LLM.latest.llm_engine.tokens
    assert first == [5]  # the others had not arrived
    assert sorted(map(len, answered)) == [2, 3, 4]


def test_compiled_code_of_the_engine_runs_as_before(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, found = Model.forward, set()

    def watched(*given: Any) -> Any:
        stance = torch._dynamo.eval_frame._stance.stance
        found.add((stance, len(_get_current_dispatch_mode_stack())))
        return forward(*given)

    monkeypatch.setattr(Model, "forward", watched)
    assert run()[0] == 0
    assert found == {("default", 0)}


@pytest.mark.parametrize(
    ("options", "replaced", "sentence"),
    [
        (["--steps", "4"], None, "--steps has no effect with --engine: leave it out"),
        (["--trace", "x"], None, "--prompts and --trace exclude each other: leave out one of"),
        ([], "WorkerWrapperBase", "vLLM runs the model in other processes: to "),
        ([], "VOCABULARY", "vLLM refuses request 1: token id 3 is out of"),
        ([], "CONTEXT", "1 of 3 requests do not fit into vLLM's max_model_len of"),
        (["--set", "compilation_config=3"], None, "vLLM does not start with this --model and "),
        ([], "vllm", "--engine vllm needs vLLM, which is not installed: run this command in "),
    ],
)
def test_unusable_options_are_refused(
    run: Any, options: list[str], replaced: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins = {"WorkerWrapperBase": lambda _: None, "VOCABULARY": 3, "CONTEXT": 40}
    if replaced == "vllm":
        monkeypatch.delitem(sys.modules, "vllm")
    elif replaced:
        monkeypatch.setattr(engine_stand_in, replaced, stand_ins[replaced])
    code, _, stderr = run(*options)
    assert (code, stderr.splitlines()[-1].startswith(f"capture: {sentence}")) == (2, True), stderr
