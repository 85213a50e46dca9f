"""With a kernel, every followed function returns what it returned before, or is refused by name."""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from diffusers.models import attention_dispatch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from torch.utils._pytree import tree_flatten
from transformers import AttentionInterface

from capture.hooks.entry_points.libraries import FOLLOWED
from replay import use_kernel
from tests import flash_attn_stand_in
from tests.capture.hooks.entry_points import comfyui_stand_in
from tests.factories import normal

STARTS, LENGTHS = torch.tensor([0, 2, 6]).int(), torch.tensor([5, 7]).int()
QUERY, KEY, VALUE = normal(1, 6, 4, 8), normal(1, 6, 2, 8, seed=1), normal(1, 6, 2, 8, seed=2)
QKV, KV = normal(1, 6, 3, 4, 8), normal(1, 6, 2, 2, 8, seed=1)
VARLEN = (QUERY[0], KEY[0], VALUE[0], STARTS, STARTS, 4, 4)
PAGES = torch.tensor([[3, 0], [1, 2]]).int()
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "flash_attn_func": (QUERY, KEY, VALUE),
    "flash_attn_qkvpacked_func": (QKV,),
    "flash_attn_kvpacked_func": (QUERY, KV),
    "flash_attn_varlen_func": VARLEN,
    "flash_attn_varlen_qkvpacked_func": (QKV[0], STARTS, 4),
    "flash_attn_varlen_kvpacked_func": (QUERY[0], KV[0], STARTS, STARTS, 4, 4),
    "flash_attn_with_kvcache": (QUERY, KEY, VALUE),
    "flash_mla_with_kvcache": (normal(2, 1, 4, 24), normal(4, 4, 1, 24), PAGES, LENGTHS, 16, None),
    "varlen_attn": VARLEN,
    "attention_basic": (*[QUERY.flatten(2)] * 3, 4),
}
LIBRARIES = {
    f"{module}.{name}": (module, name)
    for module, (kernel, names) in FOLLOWED.items()
    for name in names
    if kernel
}


def same(result: Any, expected: Any) -> None:
    (parts, form), (own_parts, own_form) = tree_flatten(result), tree_flatten(expected)
    assert (type(result), form) == (type(expected), own_form)
    for part, own in zip(parts, own_parts, strict=True):
        torch.testing.assert_close(part, own, atol=1e-5, rtol=0)
        assert not isinstance(own, Tensor) or part.is_contiguous() >= own.is_contiguous()


class Both(NamedTuple):
    output: Tensor
    lse: Tensor | None


LSE = torch.zeros(1, 4, 6)
FORMS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "tensor": (lambda output: output, ""),
    "wider tensor": (lambda output: output.double(), ""),
    "tuple of one": (lambda output: (output,), ""),
    "no lse": (lambda output: (output, None), ""),
    "named, no lse": (lambda output: Both(output, None), ""),
    "lse": (lambda output: (output, LSE), "also returns the log-sum-exp"),
    "list": (lambda output: [output, LSE, None], "also returns the log-sum-exp"),
    "named": (lambda output: Both(output, LSE), "also returns the log-sum-exp"),
    "number": (lambda output: (output, 1), "returns a tuple of 2"),
    "dictionary": (lambda output: {"output": output}, "returns a dict"),
    "merged heads": (lambda output: output.flatten(-2), "returns a tensor of another shape"),
}
"""Form of a function's result, and what no kernel returns of it."""


def attention_basic(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: None = None) -> Tensor:
    return comfyui_stand_in.attend(q, k, v, heads, mask, False, False)


def registered(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None) -> Tensor:
    tensors = (each.transpose(1, 2) for each in (query, key, value))
    return flash_attn_stand_in.flash_attn_func(*tensors, causal=True)


def flash(query: Tensor, key: Tensor, value: Tensor, **others: Any) -> Tensor:
    return flash_attn_stand_in.flash_attn_func(query, key, value)


STAND_INS = vars(flash_attn_stand_in) | {
    "varlen_attn": flash_attn_stand_in.flash_attn_varlen_func,
    "transformers": registered,
    "diffusers": flash,
    "comfyui": attention_basic,
}


def installed(
    entry: str, form: Callable[[Tensor], Any], patch: pytest.MonkeyPatch
) -> tuple[list[str], Callable[..., Any]]:
    """Put a function in an entry point's place; return its runs and a call through the entry."""
    module, name = LIBRARIES.get(entry, ("comfy.ldm.modules.attention", "attention_basic"))
    registry, _, registered_as = entry.partition(" ")
    stand_in = STAND_INS[name if entry in LIBRARIES else registry]
    runs: list[str] = []

    @functools.wraps(stand_in)
    def function(*args: Any, **kwargs: Any) -> Any:
        runs.append(stand_in.__name__)
        result = stand_in(*args, **kwargs)
        return form(result[0] if isinstance(result, tuple) else result)

    if registry == "transformers":
        patch.setitem(AttentionInterface._global_mapping, registered_as, function)
        tensors = (each.transpose(1, 2) for each in (QUERY, KEY, VALUE))
        looked_up = lambda *args: AttentionInterface()[registered_as](*args)  # noqa: E731
        return runs, functools.partial(looked_up, nn.Module(), *tensors, None)
    if entry == "diffusers":
        backend = attention_dispatch.AttentionBackendName.SAGE
        patch.setitem(attention_dispatch._AttentionBackendRegistry._backends, backend, function)
        dispatch: Any = attention_dispatch.dispatch_attention_fn
        return runs, functools.partial(dispatch, QUERY, KEY, VALUE, backend=backend)
    package = ModuleType(module)
    vars(package)[name] = function
    patch.setitem(sys.modules, module, package)
    return runs, functools.partial(function, *ARGUMENTS[name])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("entry", [*LIBRARIES, "transformers mine", "diffusers", "comfyui"])
def test_function_returns_the_same_form_or_is_refused(
    entry: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, beyond = FORMS[form]
    runs, call = installed(entry, make, monkeypatch)
    expected = call()
    for own_runs in (2,) if beyond else (1, 0):
        runs.clear()
        with use_kernel("eager") as swap:
            for _ in range(2):
                same(call(), expected)
        assert len(runs) == own_runs
        reasons = {f"{runs[0]} {beyond}": 2} if beyond else {}
        assert (swap.hits, swap.fallbacks) == (0 if beyond else 2, reasons)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "options",
    [{}, {"return_lse": True}, {"return_aux": AuxRequest(lse=True)}, {"return_attn_probs": True}],
    ids=str,
)
def test_requested_results_are_the_functions_own(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = QUERY.transpose(1, 2)
    call = functools.partial(flex_attention, tensor, tensor, tensor)
    if "return_attn_probs" in options:
        _, call = installed("flash_attn_interface.flash_attn_func", FORMS["lse"][0], monkeypatch)
    expected = call(**options)
    with use_kernel("eager") as swap:
        same(call(**options), expected)
    reasons = {"the model asks for the log-sum-exp": 1} if options else {}
    assert (swap.hits, swap.fallbacks) == (1 - len(reasons), reasons)


@pytest.mark.parametrize("entry", ["flash_attn_interface.flash_attn_func", "transformers mine"])
def test_function_that_cannot_run_here_is_replaced(
    entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(output: Tensor) -> None:
        raise RuntimeError("needs another GPU")

    _, call = installed(entry, fails, monkeypatch)
    with use_kernel("eager") as swap:
        result = call()
    assert swap.hits == 1
    output = result[0] if entry == "transformers mine" else result
    assert output.shape == QUERY.shape
    assert result is output or result[1:] == (None,)


@pytest.mark.parametrize(
    ("function", "weights", "runs"), [("mine", LSE[..., None], 1), ("flex_attention", LSE, 0)]
)
def test_attention_weights_may_be_none(
    function: str, weights: Tensor, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' own functions return no weights, and FlexAttention a log-sum-exp instead."""
    entry = f"transformers {function}"
    own_runs, call = installed(entry, lambda output: (output, weights), monkeypatch)
    with use_kernel("eager") as swap:
        _, returned = call()
    assert (swap.hits, returned, len(own_runs)) == (1, None, runs)
