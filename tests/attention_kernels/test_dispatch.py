"""`attention_kernels.attention` picks a kernel, refuses calls, and returns right results."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_kernels import dispatch
from attention_kernels.launch.launcher import PlanCache
from attention_kernels.operators import attention
from tests.attention_kernels.calls import DEVICE, half


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
    "gradients": ({"query": QUERY.clone().requires_grad_()}, "no backward pass"),
    "dimensions": ({"query": QUERY[0]}, "4 dimensions, got 3, 4, 4"),
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
