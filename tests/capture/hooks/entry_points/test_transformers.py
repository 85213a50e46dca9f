"""Models that call attention through transformers' registry are recorded as they ran."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from capture import AttentionCall, load, record
from capture.recording.recording import Recording
from replay.accuracy.reference import attention
from tests.factories import normal
from tests.flash_attn_stand_in import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

TOKENS = torch.arange(1, 13)[None]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "intermediate_size": 32,
    "head_dim": 8,
}


def language_model(kind: str, implementation: str, **config: Any) -> Any:
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}Config")(**{**SIZES, **config})
    model = getattr(transformers, f"{kind}ForCausalLM")(made).eval()
    model.set_attn_implementation(implementation)
    return model


def generated(model: Any, tokens: int) -> Tensor:
    output: Tensor = model.generate(TOKENS, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return output


def recorded(
    model: Any, run: Callable[[], Tensor], out: Path, **options: Any
) -> tuple[list[AttentionCall], Recording]:
    """Return the calls; check that recording changed no bit and that the calls are repeatable."""
    with torch.no_grad():
        expected = run()
        with record(model, out, max=50, **options) as recording:
            assert torch.equal(run(), expected)
        assert torch.equal(run(), expected)
    calls = list(load(out))
    assert recording.problems == []
    assert recording.seen == recording.kept == len(calls)
    for call in calls:
        assert call.output is not None
        assert torch.allclose(attention(call), call.output.double(), atol=1e-5)
    return calls, recording


@pytest.mark.parametrize(
    ("kind", "config", "features"),
    [
        ("Llama", {}, ()),
        ("Gemma2", {"sliding_window": 4}, ("softcap",)),
        (
            "GptOss",
            {"sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
            ("sinks",),
        ),
    ],
)
def test_models_own_eager_attention(
    kind: str, config: dict[str, Any], features: tuple[str, ...], tmp_path: Path
) -> None:
    model = language_model(kind, "eager", **config)
    calls, _ = recorded(model, lambda: generated(model, 3), tmp_path / "calls")
    assert len(calls) == 6
    for call in calls:
        assert (call.origin.entry_point, call.origin.backend) == ("transformers", "eager")
        assert call.features == features
        assert call.origin.module.endswith("self_attn")
    assert [call.origin.phase for call in calls] == ["prefill"] * 2 + ["decode"] * 4


def test_position_bias_is_part_of_the_mask(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4
    )
    model = transformers.T5Model(config).eval()
    model.set_attn_implementation("eager")

    calls, _ = recorded(
        model,
        lambda: model(input_ids=TOKENS, decoder_input_ids=TOKENS).last_hidden_state,
        tmp_path / "calls",
    )
    assert len(calls) == 6
    assert all(call.attn_mask is not None for call in calls)


@pytest.mark.slow  # compiles FlexAttention
def test_flex_attention_with_a_block_mask(tmp_path: Path) -> None:
    model = language_model("Llama", "flex_attention")
    calls, _ = recorded(model, lambda: model(TOKENS).logits, tmp_path / "calls")
    for call in calls:
        assert (call.origin.entry_point, call.origin.backend) == ("transformers", "flex")
        assert call.attn_mask is not None
        assert torch.equal(call.attn_mask[0, 0], torch.ones(12, 12, dtype=torch.bool).tril())


def use_flash_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make transformers' own code path to flash-attn use a stand-in for the library."""
    utils = pytest.importorskip("transformers.modeling_flash_attention_utils")
    functions = (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)
    helpers = (utils._pad_input, utils._unpad_input)
    monkeypatch.setattr(utils, "_lazy_imports", lambda *others, **options: (*functions, *helpers))
    monkeypatch.setattr(utils, "_loaded_implementation", None)


@pytest.fixture
def _flash_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    use_flash_stand_in(monkeypatch)


def with_flash(model: Any) -> Any:
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "flash_attention_2"
    return model


@pytest.mark.usefixtures("_flash_functions")
@pytest.mark.parametrize("kind", ["Mistral", "Gemma2"])
def test_flash_attention_2_with_a_window(kind: str, tmp_path: Path) -> None:
    model = with_flash(language_model(kind, "eager", sliding_window=4))
    calls, _ = recorded(model, lambda: generated(model, 2), tmp_path / "calls")
    windowed = [call for call in calls if "window" in call.features]
    assert windowed
    for call in windowed:
        assert call.variant.window == (3, None)
        assert call.attn_mask is None
    assert {call.origin.backend for call in calls} == {"fa2"}
    assert all(("softcap" in call.features) == (kind == "Gemma2") for call in calls)


@pytest.mark.usefixtures("_flash_functions")
def test_soft_cap_of_0_is_invalid(tmp_path: Path) -> None:
    """flash-attn takes 0 as "no cap"; if 0 were recorded as a cap, scores would be divided by 0."""
    model = with_flash(language_model("Gemma2", "eager", attn_logit_softcapping=0.0))
    calls, _ = recorded(model, lambda: model(TOKENS).logits, tmp_path / "calls")
    assert {call.variant.softcap for call in calls} == {None}


@pytest.mark.usefixtures("_flash_functions")
@pytest.mark.parametrize(
    ("kind", "positions", "starts"),
    [
        ("Llama", [*range(5), *range(1), *range(6)], [0, 5, 6, 12]),
        ("Mistral", [*range(5), *range(1), *range(6)], [0, 5, 6, 12]),
        ("Llama", range(12), None),
        ("Llama", range(7, 19), None),
    ],
)
def test_position_ids_that_begin_again_are_packed_sequences(
    kind: str, positions: Iterable[int], starts: list[int] | None, tmp_path: Path
) -> None:
    model = with_flash(language_model(kind, "eager"))
    ids = torch.tensor([[*positions]])
    calls, _ = recorded(
        model, lambda: model(TOKENS, position_ids=ids, use_cache=False).logits, tmp_path / "calls"
    )
    for call in calls:
        found = call.cu_seqlens_q
        assert (None if found is None else found.tolist()) == starts
        assert call.variant.max_seqlen_q == (6 if starts else None)


@pytest.mark.usefixtures("_flash_functions")
def test_padding_is_the_mask_of_a_padded_batch(tmp_path: Path) -> None:
    model = with_flash(language_model("Llama", "eager"))
    tokens = TOKENS.expand(2, -1)
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    with torch.no_grad(), record(model, tmp_path / "calls") as recording:
        model(tokens, attention_mask=mask, use_cache=False)
    assert recording.problems == []
    for call in load(tmp_path / "calls"):
        assert call.attn_mask is not None
        assert call.output is not None
        seen = attention(call)[:, :, 4:]
        assert torch.allclose(seen, call.output[:, :, 4:].double(), atol=1e-5)


def test_implementation_that_a_program_registered(tmp_path: Path) -> None:
    def mine(module, query, key, value, attention_mask, scaling=None, **others):
        scores = query @ key.repeat_interleave(2, 1).mT * scaling
        seen = torch.ones(12, 12).tril().bool() if attention_mask is None else attention_mask
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ value.repeat_interleave(2, 1)).transpose(1, 2), None

    AttentionInterface.register("mine", mine)
    AttentionMaskInterface.register(
        "mine", transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    )
    try:
        model = language_model("Llama", "mine")
        calls, _ = recorded(model, lambda: model(TOKENS).logits, tmp_path / "calls")
    finally:
        del AttentionInterface._global_mapping["mine"]
    assert {(call.origin.entry_point, call.origin.backend) for call in calls} == {
        ("transformers", "transformers.mine")
    }


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"cache": object()}, "a paged key/value cache"),
        ({"indices": normal(1, 5, 2)}, "takes indices"),
        ({"sinks": normal(1, 2, 5, 1)}, "takes a sink for each query"),
    ],
)
def test_call_beyond_sdpas_arguments_is_counted_with_its_reason(
    given: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    def sparse(module, query, key, value, mask, indices=None, sinks=None, **others):
        return query.transpose(1, 2), None

    sparse.__name__ = "eager_attention_forward"
    layer = torch.nn.Module()
    interface = AttentionInterface()
    layer.forward = lambda query: interface.get_interface("eager", sparse)(  # type: ignore[assignment]
        layer, query, query, query, None, **given
    )[0]
    with record(torch.nn.Sequential(layer), tmp_path / "calls") as recording:
        layer(normal(1, 2, 5, 8))
    (row,) = recording.census.to_json()["rows"]
    signature = recording.census.to_json()["signatures"][row["signature"]]
    assert signature["refusal"] == reason
    assert signature["road"] == "transformers"
    assert recording.kept == 0


def test_sdpa_of_transformers_is_recorded_as_sdpa(tmp_path: Path) -> None:
    model = language_model("Llama", "sdpa")
    calls, _ = recorded(model, lambda: model(TOKENS).logits, tmp_path / "calls")
    assert {call.origin.entry_point for call in calls} == {"sdpa"}
    assert all(call.is_causal and call.attn_mask is None for call in calls)


def test_registry_is_restored(tmp_path: Path) -> None:
    before = vars(AttentionInterface).copy()
    model = language_model("Llama", "eager")
    with record(model, tmp_path / "calls"), torch.no_grad():
        model(TOKENS)
    assert vars(AttentionInterface) == before
    assert F.scaled_dot_product_attention.__module__ != "capture.hooks.interceptor"
