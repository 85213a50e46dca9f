"""`attention_kernels.attention` picks a kernel, refuses calls, and returns right results."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_kernels import (
    AttentionOptions,
    dispatch,
    flash_attn_func,
    flash_attn_varlen_func,
    gradients,
)
from attention_kernels.launch.launcher import PlanCache
from attention_kernels.operators import attention
from tests.attention_kernels.calls import DEVICE, half, normal, offsets


def inputs(
    q_len: int, kv_len: int, heads: int = 4, kv_heads: int = 4, head_dim: int = 32
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    query, key, value = (half(2, *size, head_dim, seed=seed) for seed, size in enumerate(sizes))
    return query, key, value


@pytest.fixture
def picked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of the kernels that run."""
    names: list[str] = []
    for name in ("DecodeOfShape", "masked_prefill", "prefill"):
        kernel = getattr(dispatch, name)

        def noted(*tensors: Any, _name: str = name, _kernel: Any = kernel, **options: Any) -> Any:
            names.append(_name)
            return _kernel(*tensors, **options)

        monkeypatch.setattr(dispatch, name, noted)
    monkeypatch.setattr(dispatch, "has_gluon_kernels", lambda device: False)
    monkeypatch.setattr(dispatch, "_kernels", PlanCache())
    return names


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("DecodeOfShape", (3, 70, 8, 2), {"enable_gqa": True, "scale": 0.3}),
        ("prefill", (40, 70), {"is_causal": True}),
        ("prefill", (16, 70, 16, 2), {"enable_gqa": True}),  # too many rows per key head
        ("prefill", (40, 70), {"attn_mask": True}),
        ("masked_prefill", (40, 70), {"attn_mask": True}),
    ],
)
def test_attention_equals_sdpa(
    picked: list[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    sizes: tuple[int, ...],
    options: dict[str, Any],
) -> None:
    query, key, value = inputs(*sizes)
    if "attn_mask" in options:
        options = {"attn_mask": torch.rand(1, 1, *sizes[:2], device=DEVICE) > 0.5}
        monkeypatch.setattr(dispatch, "WORTH_LOOKING", 0 if name == "masked_prefill" else 2**20)
    output = attention(query, key, value, **options)
    expected = scaled_dot_product_attention(query.float(), key.float(), value.float(), **options)
    assert picked == [name]
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=3e-3)


def test_wide_heads_are_decoded_where_the_value_is_in_the_key(picked: list[str]) -> None:
    query, key, _ = inputs(1, 50, 128, 1, 320)
    attention(query, key, key[..., :288], enable_gqa=True)
    assert picked == ["DecodeOfShape"]
    with pytest.raises(NotImplementedError, match="head dimensions 320 and 288: at most 256"):
        attention(query, key, key[..., :288].clone(), enable_gqa=True)


WIDTHS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "hopper": (64, 64, {"options": AttentionOptions(True, (9, None))}),
    "hopper, wide": (192, 128, {"options": AttentionOptions(bottom_right=True)}),
    "no Gluon": (64, 64, {}),
    "hopper, other widths": (40, 128, {"options": AttentionOptions(softcap=2.0), "sinks": half(4)}),
    "narrow heads": (24, 24, {}),
    "wide heads": (64, 136, {}),
    "no multiple of 8": (36, 36, {}),
    "float32": (64, 64, {}),
    "negative scale": (64, 64, {"scale": -0.1}),
    "mask": (64, 64, {"attn_mask": torch.ones(20, dtype=torch.bool, device=DEVICE)}),
    "PyTorch's deterministic algorithms": (64, 64, {}),
    "deterministic": (64, 64, {"options": AttentionOptions(deterministic=True)}),
    "invariant": (64, 64, {"invariant": True}),
    "FlashAttention's deterministic": (64, 64, {"deterministic": True}),
}


@pytest.mark.parametrize("name", WIDTHS)
def test_gradients_are_hoppers_where_it_supports_the_call(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper = pytest.importorskip("attention_kernels.hopper.hopper_backward")
    head_dim, v_head_dim, options = WIDTHS[name]
    taken: list[dict[str, Any]] = []

    def noted(*tensors: Tensor | None, **given: Any) -> Any:
        taken.append(given)
        return gradients.backward(*tensors[:4], None, *tensors[4:], **given)

    monkeypatch.setattr(hopper, "hopper_backward", noted)
    monkeypatch.setattr(gradients, "has_gluon_kernels", lambda device: name != "no Gluon")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: "PyTorch" in name)
    shapes = (4, 20, head_dim), (2, 20, head_dim), (2, 20, v_head_dim)
    dtype = torch.float32 if name == "float32" else torch.float16
    leaves = [normal(1, *shape, dtype=dtype).requires_grad_() for shape in shapes]
    if "deterministic" in options:
        output = flash_attn_func(*(each.transpose(1, 2) for each in leaves), **options)
    else:
        output = attention(*leaves, enable_gqa=True, **options)
    torch.autograd.grad(output.sum(), leaves)
    wanted = [options["options"]] if "hopper" in name else []
    assert [given["options"] for given in taken] == wanted


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_packed_sequences_are_hoppers(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper = pytest.importorskip("attention_kernels.hopper.hopper_backward")
    taken: list[int] = []

    def noted(*given: Any, **options: Any) -> Any:
        *tensors, is_causal, scale, sequences = given
        taken.append(sequences.batches)
        return gradients.backward(
            *tensors[:4], None, *tensors[4:], is_causal, scale, sequences, **options
        )

    monkeypatch.setattr(hopper, "hopper_backward", noted)
    monkeypatch.setattr(gradients, "has_gluon_kernels", lambda device: True)
    leaves = [normal(20, 2, 64, dtype=torch.float16).requires_grad_() for _ in range(3)]
    starts = offsets(5, 15)
    output = flash_attn_varlen_func(
        *leaves, starts, starts, 15, 15, causal=True, deterministic=deterministic
    )
    torch.autograd.grad(output.sum(), leaves)
    assert taken == ([] if deterministic else [2])


@pytest.mark.parametrize("lengths", [(3, 0), (0, 3)])
def test_a_call_without_keys_or_queries_gets_zeros(lengths: tuple[int, int]) -> None:
    query, key, value = inputs(*lengths)
    output, lse = attention(query, key, value, return_lse=True)
    assert not output.any()
    assert (output.shape, lse.shape) == (query.shape, query.shape[:3])


INPUTS = dict(zip(("query", "key", "value"), inputs(40, 70), strict=True))
QUERY, KEY, VALUE = INPUTS.values()
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"dropout_p": 0.1}, "has no dropout"),
    "dimensions": ({"query": QUERY[0]}, r"4 dimensions \(batch, .*\), got 3, 4, 4"),
    "shapes": ({"key": KEY[:, :, 1:]}, "do not fit together"),
    "heads": ({"query": QUERY.repeat(1, 2, 1, 1)}, "pass enable_gqa=True"),
    "dtype": ({"query": QUERY.double()}, "got torch.float64, torch.float16"),
    "mask beside causal": ({"attn_mask": QUERY, "is_causal": True}, "exclude each other"),
    "shape of the mask": ({"attn_mask": torch.ones(2, 70, device=DEVICE)}, r"\(2, 70\) does not"),
    "dtype of the mask": ({"attn_mask": torch.ones(70, device=DEVICE).int()}, "bool or float"),
    "device": ({name: each.cpu() for name, each in INPUTS.items()}, "CUDA GPU"),
    "FP8": ({name: QUERY.to(torch.float8_e4m3fn) for name in INPUTS}, "float8_e4m3fn: convert"),
    "array": ({"key": KEY.tolist()}, "^key must be a tensor, got list"),
    "mask in a list": ({"attn_mask": [True]}, "^attn_mask must be a tensor or None, got list"),
    "no options": ({"options": None}, "^options must be AttentionOptions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_attention_refuses(name: str, picked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    changes, message = REFUSED[name]
    monkeypatch.setattr(dispatch, "_wrong_device", dispatch._wrong_device.__wrapped__)
    if name == "device":
        monkeypatch.setattr(dispatch.INTERPRETED, "value", False)
    with pytest.raises((NotImplementedError, ValueError, TypeError), match=message):
        attention(**{**INPUTS, **changes})
    assert picked == []
