"""Formats of caches round as their formulas say, and the layers that exceed a budget are named."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import attention_replay as ar
from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import is_scaled
from capture.storage.capture_record import CaptureRecord
from capture.storage.dataset import Dataset
from replay.accuracy.cache_formats import DEFAULT, CacheFormat, rotation_of
from replay.accuracy.reference import attention
from replay.api import cache_decode_times
from replay.api.cache_decode_times import decode_times
from replay.diagnosis.cache_errors import CacheError
from replay.diagnosis.cache_tables import CacheErrors
from replay.rows.row import Row
from tests.factories import call_facts, census, normal, random_call, row, save_calls
from tests.replay.diagnosis.test_examinations import RunCli
from tests.variant_calls import CALLS, mla_call


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("bf16", [1.0, 1.0 + 3 * 2**-8], [1.0, 1.0 + 2**-6]),
        ("fp8", [896.0, 34.4, 0.6], [448.0, 36.0, 0.625]),
        ("fp8-token", [896.0, 33.9, 0.57], [896.0, 32.0, 0.5625]),
        ("fp8-token", [448.0, 1.0625, 1.07], [448.0, 1.0, 1.125]),  # a tie rounds to even
        ("int8-token", [1.27, -0.018, 0.012], [1.27, -0.02, 0.01]),
        ("int8-token", [0.0, 0.0], [0.0, 0.0]),
        ("int8-token-truncated", [1.27, -0.018, 0.012], [1.27, -0.01, 0.01]),
        ("int4-group", [-1.0, 0.45, 2.0], [-1.0, 0.4, 2.0]),
        ("int4-group", [1.0] * 32 + [9.0, 0.0], [1.0] * 32 + [9.0, 0.0]),
    ],
)
def test_numbers_equal_those_by_hand(name: str, given: list[float], expected: list[float]) -> None:
    found = CacheFormat.parse(name).value(torch.tensor([[[given]]]))
    torch.testing.assert_close(found, torch.tensor([[[expected]]]))


@pytest.mark.parametrize(
    ("name", "shared"),
    {
        "bf16": (1, 2, 3, 40),
        "fp8": (1, 2, 3, 40),
        "fp8-tensor": (...,),
        "fp8-head": (slice(None), 2),
        "fp8-token": (1, 2, 3),
        "int8-token": (1, 2, 3),
        "int8-token-truncated": (1, 2, 3),
        "int4-group": (1, 2, 3, slice(32, 64)),
        "int4-group-rotated": (1, 2, 3),
    }.items(),
)
def test_large_element_changes_those_that_share_its_scale(name: str, shared: Any) -> None:
    chosen, tensor = CacheFormat.parse(name), normal(2, 4, 5, 64)
    large = tensor.clone()
    large[1, 2, 3, 40] = 90.0
    changed = chosen.key(large) != chosen.key(tensor)
    assert changed[shared].float().mean() > 0.5
    changed[shared] = False
    assert not changed.any()


@pytest.mark.parametrize("width", [48, 64])
def test_rotation_keeps_scores_and_spreads_a_large_channel(width: int) -> None:
    rotation, plain = rotation_of(width), CacheFormat.parse("int4-group")
    rotated = CacheFormat.parse("int4-group-rotated")
    query, key = normal(1, 1, 4, width).double(), normal(1, 1, 5, width, seed=1).double()
    key[..., 3] *= 50
    torch.testing.assert_close((query @ rotation) @ (key @ rotation).mT, query @ key.mT)
    scores = (query @ rotation) @ plain.value(key @ rotation).double().mT
    torch.testing.assert_close(
        query @ rotated.key(key).double().mT, scores, rtol=1e-5, atol=1e-4, msg="query and key"
    )
    error, rotated_error = ((each.key(key) - key).norm(dim=-1) for each in (plain, rotated))
    assert torch.count_nonzero(rotation).item() == width * (width & -width)
    assert width == 48 or (rotated_error < error).all()
    assert torch.equal(rotated.value(key), plain.value(key))


def relative_l1(call: AttentionCall, name: str) -> float:
    found = ar.cache_formats([call], name, device="cpu", progress=False)
    assert found.left_out == {}
    return found.found[0].relative_l1


def test_error_is_that_of_rounded_keys_with_rounded_values() -> None:
    call = random_call(q_heads=4, kv_heads=2, head_dim=64, v_head_dim=32)
    call = replace(call, value=call.value * 100)
    exact = attention(call)
    for name in ("fp8-head", "int4-group", "int4-group-rotated"):
        chosen = CacheFormat.parse(name)
        rounded = attention(replace(call, key=chosen.key(call.key), value=chosen.value(call.value)))
        expected = (rounded - exact).abs().sum() / exact.abs().sum()
        assert relative_l1(call, name) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("name", [name for name in CALLS if not is_scaled(CALLS[name])])
def test_every_kind_of_call_has_errors_without_its_hidden_keys(name: str) -> None:
    call = CALLS[name]
    error = relative_l1(call, "fp8-tensor")
    assert 0.005 < error < 0.1
    if call.seqused_k is not None and call.page_table is None:
        hidden = torch.arange(call.shape.kv_len) >= call.seqused_k[:, None]
        hidden = hidden[:, None, :, None]
        for odd in (1e4, torch.nan):
            key, value = (each.masked_fill(hidden, odd) for each in (call.key, call.value))
            assert relative_l1(replace(call, key=key, value=value), "fp8-tensor") == error


def test_latent_values_are_rounded_with_their_keys() -> None:
    call = mla_call(q_len=1, dtype=torch.float32)
    call.key[..., 512:] *= 100  # the values' scale is that of the keys, which have a larger maximum
    apart = replace(call, value=call.value.clone())
    assert relative_l1(call, "int8-token") > 3 * relative_l1(apart, "int8-token")


def layers(*paths: str, phase: str = "decode", **sizes: Any) -> list[AttentionCall]:
    """Return a call of each layer. Values of every third, from the second, exceed FP8's largest."""
    calls = [random_call(origin={"module": path, "phase": phase}, **sizes) for path in paths]
    return [replace(call, value=call.value * 1e3 ** (at % 3 == 1)) for at, call in enumerate(calls)]


MANY = ("a.0", "a.9", "a.9", "a.2", "a.3")
LLAMA = ("model.layers.2.self_attn", "model.layers.10.self_attn")


def test_tables_flags_and_files_name_the_layers_to_keep(tmp_path: Path, run_cli: RunCli) -> None:
    directory, file = save_calls(tmp_path / "calls", layers(*LLAMA)), tmp_path / "errors.json"
    dataset = Dataset.open(directory)
    rows = census((LLAMA[0], "decode", 2, 5), ("model.layers.3.self_attn", "decode", 2, 5))
    dataset.captures = [CaptureRecord("model", "", census=rows)]
    dataset.save_manifest()
    asked = f"cache-formats --dir {directory} --budget relative_l1=0.2 --device cpu --json {file}"
    code, out, err = run_cli(*asked.split())
    assert code == 0, err
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(DEFAULT)]] == [*DEFAULT]
    assert lines[2].split()[2:] == [LLAMA[1], "1", "of", "2"]
    flags = "--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 10"
    assert f"vLLM, fp8 (no scales in the checkpoint): {flags}" in lines
    assert "vLLM, fp8-token: --kv-cache-dtype fp8_per_token_head" in lines
    words = " ".join(out.split())
    assert "not of the model's text" in words
    assert (
        "errors unknown: 1 layer of the model, such as model.layers.3.self_attn; record all"
        in words
    )
    assert "decode" not in lines[0]
    written = json.loads(file.read_text())
    assert written["keep"]["fp8"] == [LLAMA[1]]
    assert written["vllm"] | {"fp8": flags, "int8-token": ""} == written["vllm"]
    assert len(written["errors"]) == 2 * len(DEFAULT)


@pytest.mark.parametrize(
    ("paths", "budget", "kept", "flags"),
    [
        (LLAMA, "cosine=0.9", ["model.layers.10.self_attn"], " --kv-cache-dtype-skip-layers 10"),
        (LLAMA, "rmse=1e-9", [*LLAMA], None),
        (("a.0", "a.1.b.2"), "relative_l1=0.2", ["a.1.b.2"], None),
        (MANY, "relative_l1=0.2", ["a.9", "a.3"], " --kv-cache-dtype-skip-layers 3 9"),
        (LLAMA, "rmse=1e9", [], ""),
        (LLAMA, None, [], None),
    ],
)
def test_flags_need_a_number_and_a_layer_within_the_budget(
    paths: tuple[str, ...], budget: str | None, kept: list[str], flags: str | None
) -> None:
    found = ar.cache_formats(
        layers(*paths), "fp8,fp8-rotated", budget=budget, device="cpu", progress=False
    )
    assert found.kept("fp8") == kept
    assert found.vllm_flags("fp8-rotated") == ""
    assert found.vllm_flags("fp8") == ("" if flags is None else f"--kv-cache-dtype fp8{flags}")


@pytest.mark.parametrize(
    ("calls", "options", "code", "message"),
    [
        ({"phase": "denoise"}, "", 2, "no recorded call reads a cache (calls by phase: 2 denoise)"),
        ({"phase": "denoise"}, "--call * --formats bf16", 0, ""),
        ({}, "--formats fp9", 2, "no format 'fp9': choose from bf16, fp8, fp8-tensor,"),
        ({}, "--budget 2%", 2, "unknown metric '2%' in the budget: choose from cosine,"),
        ({"dtype": torch.float8_e4m3fn}, "", 1, "left out model-000000 and 1 more: its cache"),
    ],
)
def test_wrong_input_is_explained(
    calls: dict[str, Any], options: str, code: int, message: str, tmp_path: Path, run_cli: RunCli
) -> None:
    made = layers(*LLAMA, phase=calls.pop("phase", "decode"))
    made = [
        call.with_tensors({n: t.to(**calls) for n, t in call.tensors().items()}) for call in made
    ]
    directory = save_calls(tmp_path / "calls", made)
    found, _, err = run_cli(*f"cache-formats --dir {directory} --device cpu {options}".split())
    assert (found, message in err) == (code, True), err


def test_calls_of_several_models_are_refused() -> None:
    calls = [random_call(origin={"model": name}) for name in ("a", "b")]
    with pytest.raises(ar.Error, match=r"several models \(a, b\): .*, such as --call 'a-\*'"):
        ar.cache_formats(calls, device="cpu", progress=False)


def test_decode_times_pair_calls_that_both_kernels_ran() -> None:
    def timed(kernel: str, call: str, ms: float, **fields: Any) -> Row:
        return row(kernel, call_facts(call), ms, **fields)

    core = timed("mine", "a", 1.0).time_ms
    rows = [
        *(timed("triton-decode", "a", 4.0), timed("triton-decode", "b", 8.0)),
        *(timed("mine", "a", 9.0, core_time_ms=core), timed("mine", "b", 3.0)),
        *(timed("mine", "c", 5.0), row("triton-decode", call_facts("c"), status="unsupported")),
    ]
    found = cache_decode_times.times_of(rows, {"fp8-token": "mine", "int8-token": "other"})
    assert found == {"fp8-token": ("mine", 2.0, 6.0, 2)}
    errors = [CacheError("a", "layer", "decode", "fp8-token", 0.99, 0.1, 0.2)]
    printed = str(CacheErrors(errors, (CacheFormat.parse("fp8-token"),), decode=found))
    assert "2.0000 ms (16 bits: 6.0000)" in printed


def test_decode_calls_alone_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_this_process(dataset: Dataset, calls: list[str], *given: Any, **options: Any) -> Any:
        formats = [CacheFormat("fp8", "fp8", kernel="torch-flash")]
        return decode_times(dataset, calls, formats, given[1], workers=False, progress=False)

    monkeypatch.setattr(cache_decode_times, "BASELINE", "torch-math")
    monkeypatch.setattr("replay.api.cache_formats.decode_times", in_this_process)
    calls = [*layers(*LLAMA, phase="prefill"), *layers(*LLAMA)[:1]]
    time = ar.cache_formats(calls, "bf16", device="cpu", progress=False).decode["fp8"]
    assert (time.kernel, time.calls, time.ms > 0) == ("torch-flash", 1, True)
