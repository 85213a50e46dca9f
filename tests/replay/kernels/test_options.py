"""Kernels take options in their names, as in `name[option=value]`."""

from collections.abc import Callable

import pytest
from torch import Tensor

from replay.kernels.registry import (
    Kernel,
    KernelNameError,
    find,
    option_names,
    select,
    with_options,
)


def attention(query: Tensor, key: Tensor, value: Tensor, *rest: object, **more: object) -> Tensor:
    return query


def made(keep: float = 0.5, size: int = 4) -> Kernel:
    if keep > 1:
        raise ValueError(f"at most 1, not {keep}")
    return Kernel("mine", attention, about=f"{keep} {size}", options=made)


@pytest.fixture(autouse=True)
def mine(kernels: Callable[..., Kernel]) -> Kernel:
    return kernels("mine", attention, about="0.5 4", options=made)


@pytest.mark.parametrize(
    ("name", "about"),
    [("mine", "0.5 4"), ("mine[keep=0.1]", "0.1 4"), ("mine[keep=1.0,size=8]", "1.0 8")],
)
def test_name_with_options_is_found(name: str, about: str) -> None:
    found = find(name)
    assert (found.name, found.about) == (name, about)
    assert find(found.name).name == found.name
    assert select(name) == ([found], [name])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("mine[depth=3]", "mine has no option 'depth': it has keep, size"),
        ("mine[keep]", "mine[keep]: keep has no value: write keep=VALUE"),
        ("mine[size=2,keep=]", "keep has no value"),
        ("mine[keep=0.5,keep=0.6]", "keep is given twice: leave one of them out"),
        ("mine[keep=much]", "'much' is not a valid float"),
        ("mine[size=1.5]", "'1.5' is not a valid int"),
        ("mine[keep=2]", "at most 1, not 2"),
        ("mine[]", "mine has no option ''"),
        ("torch-math[keep=1]", "no kernel 'torch-math[keep=1]': torch-math has no options"),
        ("mine[keep=0.5", "no kernel 'mine[keep=0.5': its options end with ]"),
    ],
)
def test_options_that_make_no_sense_are_refused(name: str, sentence: str) -> None:
    with pytest.raises(KernelNameError) as stopped:
        find(name)
    assert sentence in str(stopped.value)


def test_options_reach_the_kernels_that_have_them(mine: Kernel) -> None:
    given = {"keep": 0.1, "page_size": 8}
    assert with_options(mine, given).name == "mine[keep=0.1]"
    assert option_names(mine) == ["keep", "size"]
    plain = find("torch-math")
    assert with_options(plain, given) is plain
