"""`attention` is one operator in compiled code, for all lengths, and refuses calls by name."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import attention_kernels as ak
from attention_kernels import operators
from tests.attention_kernels.calls import DEVICE, half

Tensors = tuple[Tensor, Tensor, Tensor]


def tensors(q_len: int, kv_len: int, is_BSHD: bool = False) -> Tensors:
    given = half(2, 4, q_len, 32), half(2, 4, kv_len, 32, seed=1), half(2, 4, kv_len, 16, seed=2)
    if is_BSHD:
        query, key, value = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in given)
        return query, key, value
    return given


def layer(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    output, lse = ak.attention(query * 1, key, value, return_lse=True, **options)
    return output * 2, lse + 1


def test_compiled_code_and_its_gradients_are_one_graph_for_all_lengths() -> None:
    options = {"sinks": half(4), "options": ak.AttentionOptions(window=(9, 0), softcap=5.0)}
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for step, length in enumerate((20, 21, 40, 77)):
        given = [each.requires_grad_() for each in tensors(length, length)]
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            outputs = compiled(*given, **options)
        found, expected = (
            (*results, *torch.autograd.grad([each.sum() for each in results], given))
            for results in (outputs, layer(*given, **options))
        )
        for ours, right in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("q_len", [3, 20], ids=["decode", "prefill"])
@pytest.mark.parametrize("is_BSHD", [False, True])
def test_operator_passes_pytorchs_own_checks(q_len: int, is_BSHD: bool) -> None:
    mask = torch.ones(q_len, 30, dtype=torch.bool, device=DEVICE)
    options = (mask, False, 0.2, "exact", half(4), *(False, None, None, None, False, True, False))
    for return_lse in (False, True):
        given = [each.requires_grad_(return_lse) for each in tensors(q_len, 30, is_BSHD)]
        torch.library.opcheck(
            torch.ops.attention_kernels.attention.default, (*given, *options, return_lse)
        )


def test_autocast_converts_tensors() -> None:
    query, key, value = (each.float() for each in tensors(20, 30))
    compiled = torch.compile(ak.attention, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16):
        for attend in (ak.attention, compiled):
            assert attend(query, key, value).dtype == torch.bfloat16


def test_fake_tensors_run_no_kernel() -> None:
    with FakeTensorMode() as mode:
        query, key, value = (mode.from_tensor(each) for each in tensors(20, 30))
        output, lse = ak.attention(query, key, value, return_lse=True)
    assert (output.shape, lse.shape) == ((2, 4, 20, 16), (2, 4, 20))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp4"}, "expected one of exact, fp8, int8, fastest"),
        ({"precision": "fp8", "return_lse": True}, "precision='fp8': .* no log-sum-exp"),
        ({"precision": "int8", "attn_mask": torch.zeros(20, 30)}, "attn_mask in torch.float32"),
    ],
)
def test_precision_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    options = {
        n: each.to(DEVICE) if isinstance(each, Tensor) else each for n, each in options.items()
    }
    with pytest.raises((ValueError, NotImplementedError), match=message):
        ak.attention(*tensors(20, 30), **options)


@pytest.mark.parametrize("precision", ["fp8", "int8", "fastest"])
def test_precision_chooses_the_products(precision: str) -> None:
    given = tensors(20, 30)
    output, exact = ak.attention(*given, precision=precision), ak.attention(*given)
    assert torch.equal(output, exact) == (precision == "fastest")
    torch.testing.assert_close(output, exact, atol=0.1, rtol=0)


def test_warm_up_runs_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(operators, "attend", lambda *given: found.append(given))
    shapes = [((1, 4, 20, 32), (1, 2, 30, 32)), ((1, 4, 1, 32), (1, 4, 30, 32), (1, 4, 30, 16))]
    ak.warm_up(shapes, dtype=torch.float16, device=DEVICE, is_causal=True)
    assert [tuple(tuple(each.shape) for each in given[:3]) for given in found] == [
        (*shapes[0], shapes[0][1]),
        shapes[1],
    ]
    assert all(given[4] for given in found)  # is_causal
    with pytest.raises(TypeError, match=r"each call, got \(1, 4, 20, 32\): pass a list of calls"):
        ak.warm_up(shapes[0])
