"""Masks that real models pass to SDPA are recorded and recognised."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from capture import load, record
from capture.call.mask_structure import structure_of
from replay.accuracy.reference import attention
from tests.capture.hooks.entry_points.test_transformers import SIZES
from tests.capture.recording.callers import assert_good
from tests.factories import tiny_llama

Run = Callable[[Any], object]
IDS = torch.arange(2, 22).reshape(2, 10)
PADDED = torch.tensor([[1] * 10, [1] * 6 + [0] * 4])
"""Attention mask in which the second sequence is shorter."""
LOWEST = torch.zeros(2, 1, 10, 10).masked_fill_(
    ~(torch.ones(10, 10).tril() * PADDED[:, None, None]).bool(), torch.finfo(torch.float32).min
)
"""Mask that combines causality and padding, as in transformers' eager attention."""


def tiny(name: str, **config: Any) -> Any:
    torch.manual_seed(0)
    auto = transformers.AutoModel if name == "bert" else transformers.AutoModelForCausalLM
    made = transformers.AutoConfig.for_model(name, **SIZES, **config)
    return auto.from_config(made, attn_implementation="sdpa").eval()


def generating(**options: Any) -> Run:
    usual = {"attention_mask": torch.ones_like(IDS), "do_sample": False, "pad_token_id": 0}
    return lambda model: model.generate(IDS, max_new_tokens=3, **{**usual, **options})


def masked(mask: torch.Tensor) -> Run:
    return lambda model: model(IDS, attention_mask=mask)


def packed(model: Any) -> None:
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0, 1]])
    model(IDS[:1], position_ids=places, use_cache=False)


def in_two_chunks(model: Any) -> None:
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    for chunk in IDS.split(5, dim=1):
        model(chunk, past_key_values=cache)


WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[Callable[[], Any], Run, set[str]]] = {
    "static cache": (tiny_llama, generating(cache_implementation="static"), {"padding", "no mask"}),
    "two chunks": (tiny_llama, in_two_chunks, {"bottom-right causal, padding"}),
    "eager mask": (tiny_llama, masked(LOWEST), {"causal, padding"}),
    "left padding": (
        tiny_llama,
        generating(attention_mask=PADDED.flip(1)),
        {"causal, left padding", "left padding"},
    ),
    "right padding": (tiny_llama, masked(PADDED), {"causal, padding"}),
    "packed": (tiny_llama, packed, {"3 packed sequences, causal"}),
    "Mistral": (lambda: tiny("mistral", sliding_window=4), generating(), {"window 3/0", "no mask"}),
    "Gemma 3": (lambda: tiny("gemma3_text", **WINDOW), lambda model: model(IDS), {"window 3/0"}),
    "BERT": (lambda: tiny("bert"), masked(PADDED), {"padding"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_masks_of_models(name: str, tmp_path: Path) -> None:
    build, run, expected = MODELS[name]
    model = build()
    with torch.no_grad(), record(model, tmp_path, name="model", max=1000):
        run(model)
    data = load(tmp_path)
    assert_good(data)
    calls = [call for call in data if call.attn_mask is not None]
    found = [structure_of(call) for call in calls]
    assert {str(each) for each in found} == expected
    said = {entry.header.mask_structure for entry in data.entries}
    assert said - {""} == expected
    for call, structure in zip(calls, found, strict=True):
        if (restated := structure.restated(call)) is not None:
            torch.testing.assert_close(attention(restated), attention(call))
