"""Names of kernels: their syntax, and suggestions for misspelt names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.kernels.registry import (
    Kernel,
    KernelNameError,
    catalogue,
    find,
    register_kernel,
    select,
)


def same(query: Tensor, *_: object, **__: object) -> Tensor:
    """Returns the query.

    More words.
    """
    return query


@pytest.mark.usefixtures("kernels")
def test_the_decorator_registers_and_returns_the_function() -> None:
    assert register_kernel("mine", accuracy_class="quantised", default=False)(same) is same
    kernel = catalogue()["mine"]
    assert kernel.attention is same
    assert (kernel.accuracy_class, kernel.default) == ("quantised", False)
    assert kernel.about == "Returns the query."
    assert kernel.unavailable(torch.device("cpu")) is None
    assert kernel.prepare is None


@pytest.mark.usefixtures("kernels")
def test_the_decorator_passes_everything_on(make_call: Callable[..., AttentionCall]) -> None:
    def unavailable(device: torch.device) -> str:
        return f"not on {device}"

    def unsupported(call: AttentionCall) -> str:
        return f"not {call.shape}"

    def prepare(call: AttentionCall) -> Callable[[], Tensor]:
        return lambda: call.query

    register_kernel(
        "mine", unavailable=unavailable, unsupported=unsupported, prepare=prepare, about="about"
    )(same)
    assert catalogue()["mine"] == Kernel(
        "mine", same, "exact", unavailable, unsupported, prepare, True, "about"
    )


def test_a_name_is_taken_once(kernels: Callable[..., Kernel]) -> None:
    kernels("mine", same)
    with pytest.raises(ValueError, match="'mine' is registered already"):
        kernels("mine", same)
    with pytest.raises(ValueError, match="'torch-math' is registered already"):
        register_kernel("torch-math")(same)


def test_default_kernels(kernels: Callable[..., Kernel]) -> None:
    kernels("slow", same, default=False)
    chosen, named = select(None)
    names = [kernel.name for kernel in chosen]
    assert "torch-math" in names
    assert "flex" in names
    assert "slow" not in names
    assert "torch-math-compiled" not in names
    assert named == []
    everything, named = select("all")
    known = catalogue().values()
    assert [kernel for kernel in known if not kernel.variant_of] == everything
    assert set(known) == set(select("all", variants=True)[0])
    assert named == []


def test_only_names_in_full_are_named() -> None:
    chosen, named = select("torch-*-compiled, torch-math,flex,torch-math")
    assert [kernel.name for kernel in chosen] == [
        "torch-default-compiled",
        "torch-math-compiled",
        "torch-flash-compiled",
        "torch-efficient-compiled",
        "torch-cudnn-compiled",
        "torch-math",
        "flex",
    ]
    assert set(named) == {"torch-math", "flex"}


@pytest.mark.parametrize(
    ("patterns", "sentence"),
    [
        ("torch-mth", r"no kernel 'torch-mth': did you mean torch-math\b"),
        ("torch-math,qqqqq", "no kernel 'qqqqq': see `replay kernels`"),
        ("zzz*", r"no kernel 'zzz\*'"),
        ("mine.py", "no kernel 'mine.py': name a function in it, mine.py:FUNCTION"),
        (" , ", "--kernels names no kernel"),
        ("", "--kernels names no kernel"),
    ],
)
def test_a_name_that_fits_nothing(patterns: str, sentence: str) -> None:
    with pytest.raises(KernelNameError, match=sentence):
        select(patterns)


@pytest.mark.parametrize("name", ["", "  ", "two\nlines", "\x1b[31mred", "half a letter \udc80"])
def test_a_name_is_one_printable_line(name: str) -> None:
    with pytest.raises(ValueError, match="one printable line"):
        Kernel(name, lambda **arguments: torch.zeros(1))
    with pytest.raises(KernelNameError, match="one printable line"):
        find(f"{name}\n.py:f")
