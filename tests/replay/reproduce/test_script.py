"""Scripts run on their own, for calls with any feature."""

import contextlib
import io
import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from capture.call.attention_call import AttentionCall
from capture.storage.call_file import PackedCall
from replay.accuracy.thresholds import Thresholds
from replay.reproduce.kernel_call import KernelCall
from replay.reproduce.script import Shown, write_script
from replay.reproduce.trials import TrialOutcome
from replay.rows.errors_of_output import AccuracyClass
from tests.factories import normal, random_call
from tests.variant_calls import CALLS

FULL = {
    "strides": random_call(q_heads=4, kv_heads=2, dtype=torch.float16),
    "expanded mask": random_call(attn_mask=(normal(1, 1, 1, 13) > 0).expand(1, 2, 9, 13)),
    "sinks": CALLS["sinks"],
    "packed": CALLS["packed"],
    "paged": CALLS["scaled, paged"],
}
KEY = normal(1, 2, 13, 32)
FULL["value in key"] = replace(random_call(), key=KEY, value=KEY[..., :16])
FULL["strides"] = replace(
    FULL["strides"], query=normal(1, 9, 4, 64, dtype=torch.float16).transpose(1, 2)[..., :32]
)


def write(call: AttentionCall, directory: Path, lines: list[str], kind: AccuracyClass) -> None:
    PackedCall.of(call).write(directory / "call.safetensors")
    stored = directory / "stored"
    save_file({}, stored)
    source = KernelCall([*lines, "return output"])
    outcome = TrialOutcome("inaccurate", "", kind)
    shown = Shown("mine", source, call, "call.safetensors", outcome, call.device, 60.0)
    write_script(shown, directory, stored, Thresholds())


def run(directory: Path) -> tuple[int, str]:
    """Run the script in this process, to save seconds; return exit code and output."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(directory / "reproduce.py"), run_name="__main__")
    assert isinstance(ended.value.code, int)
    return ended.value.code, printed.getvalue()


EQUAL = """
given = dict(locals())
for name, each in load_file(HERE / "inputs.safetensors").items():
    assert torch.equal(given[name], each), name
for name, each in json.loads((HERE / "strides.json").read_text()).items():
    assert list(given[name].stride()) == each, name
output = stored["output"].to(DTYPE)
"""


@pytest.mark.parametrize("kind", FULL)
def test_script_restores_every_tensor(kind: str, tmp_path: Path) -> None:
    call = FULL[kind]
    tensors = {name: each for name, each in call.tensors().items() if name != "output"}
    copies = {name: each.clone().contiguous() for name, each in tensors.items()}
    save_file(copies, tmp_path / "inputs.safetensors")
    strides = {name: list(each.stride()) for name, each in tensors.items() if each.ndim == 4}
    (tmp_path / "strides.json").write_text(json.dumps(strides))
    write(call, tmp_path, EQUAL.strip().splitlines(), "exact")
    code, said = run(tmp_path)
    assert code == 0, said
    assert said.endswith("does not fail\n")


RIGHT = 'output = stored["output"].to(DTYPE)'


@pytest.mark.parametrize(
    ("wrong", "kind", "said"),
    [
        ("", "exact", "does not fail"),
        ("", "quantised", "does not fail"),
        ("output[0, 1, 3] += 1", "exact", "worst row: batch 0, head 1, query 3"),
        ("output[0, 1, 3, 5] = float('nan')", "exact", "the first at [0, 1, 3, 5]"),
        ("output = output[:, :, 1:]", "exact", "returned [1, 2, 8, 32] in torch.float32, not"),
        ("output = output.half()", "exact", "returned [1, 2, 9, 32] in torch.float16, not"),
        ("raise ValueError('no')", "exact", "FAILS: ValueError: no"),
        ("output[0, 1] *= 1.5", "quantised", "worst head: relative L1 0.5"),
        ("output[0, 0, 4] = 0", "quantised", "worst row: batch 0, head 0, query 4"),
    ],
)
def test_script_names_errors(wrong: str, kind: AccuracyClass, said: str, tmp_path: Path) -> None:
    write(random_call(), tmp_path, [RIGHT, wrong], kind)
    code, printed = run(tmp_path)
    assert code == int(bool(wrong))
    assert said in printed
