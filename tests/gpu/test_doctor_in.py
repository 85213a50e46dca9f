"""The doctor runs kernels in CUDA graphs and in compiled code, and names what fails there."""

from pathlib import Path
from typing import Any

import pytest
import torch

import attention_replay as ar
from tests.factories import random_call

KERNELS = """
import os
import torch
from torch.nn.functional import scaled_dot_product_attention as honest

stream = torch.cuda.Stream()
is_capturing = torch.cuda.is_current_stream_capturing
kept = {}

@torch.compiler.assume_constant_result
def largest(tensor):
    return tensor.abs().amax().item()

def kept_for(key, make):
    version = make, key.data_ptr(), key._version
    if version not in kept:
        kept[version] = key, make(key)  # holds the key, so that its address is not used again
    return kept[version][1]

def scale_on_the_host(query, key, value, *others, **options):
    most = largest(key)
    return honest(query, key.clamp(-most, most), value, *others, **options)

def keeps_a_scale(query, key, value, *others, **options):
    most = kept_for(key, largest)
    return honest(query, key.clamp(-most, most), value, *others, **options)

def keeps_its_keys(query, key, value, *others, **options):
    return honest(query, kept_for(key, torch.clone), value, *others, **options)

def on_the_default_stream(*tensors, **options):
    with torch.cuda.stream(torch.cuda.default_stream()):
        return honest(*tensors, **options)

def on_a_stream_that_nothing_joins(*tensors, **options):
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        output = honest(*tensors, **options)
    if not is_capturing():
        stream.synchronize()
    return output

def causal_in_a_graph(query, key, value, attn_mask, dropout_p, is_causal, **options):
    return honest(query, key, value, is_causal=is_capturing(), **options)

def crashes_in_a_graph(*tensors, **options):
    return os.abort() if is_capturing() else honest(*tensors, **options)
"""
EXPECTED = {
    "graph": {
        "honest": "",
        "scale_on_the_host": "cannot-be-captured",
        "keeps_a_scale": "stale-in-graph",
        "keeps_its_keys": "stale-in-graph",
        "on_the_default_stream": "other-stream",
        "on_a_stream_that_nothing_joins": "other-stream",
        "causal_in_a_graph": "replay-differs",
        "crashes_in_a_graph": "unknown",
        **dict.fromkeys(("torch-default", "torch-flash", "triton-fa2", "triton-fp8"), ""),
    },
    # Our kernels are not among these, because they import modules in a call, which splits graphs.
    "compile": {
        "honest": "",
        "scale_on_the_host": "compile-differs",
        **dict.fromkeys(("torch-default", "torch-flash"), ""),
    },
}


@pytest.mark.parametrize("mode", EXPECTED)
def test_the_cause_is_named(mode: str, tmp_path: Path) -> None:
    file = tmp_path / "kernels.py"
    file.write_text(KERNELS)
    size: dict[str, Any] = {
        "q_len": 512,
        "kv_len": 512,
        "head_dim": 64,
        "dtype": torch.bfloat16,
        "device": "cuda",
    }
    call = random_call(**size, origin={"module": "layers.3"})
    names = {
        name if "-" in name else f"{file}:{name}": cause for name, cause in EXPECTED[mode].items()
    }
    found = ar.doctor([call], [*names], inside=mode, timeout=120)
    assert not found.untried
    assert {each.layer for each in found.found} == {"layers.3"}
    assert {each.tried for each in found.found} == {("eager", mode)}
    causes = {each.kernel: each.cause for each in found.found}
    assert causes == {name: cause for name, cause in names.items() if cause}
