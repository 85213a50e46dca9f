"""Kernels that are right in eager mode and wrong in compiled code; `tests/gpu` has CUDA graphs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from replay.diagnosis.examine import Examined, examine
from replay.diagnosis.examine_inside import HYPOTHESES, examine_inside
from replay.diagnosis.subject import Evidence
from replay.isolation.process_state import ProcessState
from replay.kernels.registry import Kernel
from tests.factories import random_call, settings
from tests.replay.diagnosis import faulty

RunCli = Callable[..., tuple[int, str, str]]
FILE, FAULTY = __file__, str(Path(faulty.__file__))
CALL = random_call(batch=2, q_len=40, kv_len=40)

_kept: dict[tuple[int, int], tuple[Tensor, float]] = {}


@torch.compiler.assume_constant_result
def largest(tensor: Tensor) -> float:
    """Return the largest value, from a cache that is right in eager mode."""
    place = tensor.data_ptr(), tensor._version
    return _kept.setdefault(place, (tensor, float(tensor.abs().amax())))[1]


def keeps_a_scale(query, key, value, *others, **options):
    most = largest(key)
    return scaled_dot_product_attention(query, key.clamp(-most, most), value, *others, **options)


def reads_an_address(query, key, value, *others, **options):
    if query.data_ptr() % 16:
        query = query.clone()
    return scaled_dot_product_attention(query, key, value, *others, **options)


BREAK = reads_an_address.__code__.co_firstlineno + 1


def branches_on_the_length(query, key, value, *others, **options):
    options["is_causal"] = torch.compiler.is_compiling() and query.shape[2] < 40
    return scaled_dot_product_attention(query, key, value, **options)


@torch.library.custom_op("doctor_test::transposed", mutates_args=())
def transposed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    output = scaled_dot_product_attention(query, key, value)
    return output.transpose(1, 2).contiguous().transpose(1, 2)


@transposed.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.empty_like(query)


def has_other_strides_than_declared(query, key, value, *others, **options):
    return transposed(query, key, value)


@pytest.mark.parametrize(
    ("attention", "cause", "sentence"),
    [
        (keeps_a_scale, "compile-differs", "with new values, and right if compiled with them"),
        (branches_on_the_length, "compile-differs", "another length (30 queries, 30 keys)"),
        (has_other_strides_than_declared, "compile-error", "AssertionError: expected size"),
        (reads_an_address, "graph-break", f"test_examine_inside.py, line {BREAK})"),
    ],
)
def test_the_cause_is_named(attention: Callable[..., Tensor], cause: str, sentence: str) -> None:
    with torch.no_grad():
        kernel, state = Kernel("kernel", attention), ProcessState()
        assert examine(kernel, CALL, settings(), state) == Examined()
        evidence = examine_inside("compile", kernel, CALL, settings(), state).evidence
    assert evidence is not None
    assert evidence.cause == cause
    assert sentence in evidence.sentence


def test_findings_name_the_modes(run_cli: RunCli, recorded: Path) -> None:
    names = ("keeps_a_scale", "reads_an_address")
    kernels = ",".join([*(f"{FILE}:{name}" for name in names), f"{FAULTY}:scales_query"])
    asked = ("--dir", str(recorded), "--call", "model-000001", "--kernels", kernels)
    options = ("--in", "compile", "--device", "cpu", "--in-process", "--json", "-")
    code, out, err = run_cli("doctor", *asked, *options)
    assert code == 1
    assert [(each["layer"], each["cause"], each["tried"]) for each in json.loads(out)] == [
        ("layers.1", "compile-differs", ["eager", "compile"]),
        ("layers.1", "graph-break", ["eager", "compile"]),
        ("layers.1", "input-changed", ["eager"]),
    ]
    assert "  use instead: this kernel as a custom operator (torch.library.custom_op)\n" in err
    last = "2 of 5 runs of a kernel on a call are wrong, by 2 kernels; 1 splits a compiled graph"
    assert err.splitlines()[-1] == last


def test_no_kernel_is_blamed_if_sdpa_fails_too(
    run_cli: RunCli, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Evidence("compile-error", "there is no C compiler")
    monkeypatch.setitem(HYPOTHESES, "compile", lambda kernel: broken)
    asked = ("--dir", str(recorded), "--kernels", "torch-math", "--in", "compile", "--json", "-")
    code, out, err = run_cli("doctor", *asked, "--in-process", "--device", "cpu")
    assert (code, json.loads(out)) == (3, [])
    assert "torch-math was not tried in compiled code on some calls: SDPA is wrong there too" in err
