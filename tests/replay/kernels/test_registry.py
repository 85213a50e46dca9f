"""Kernel names have a syntax, and misspelt names get suggestions."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

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


def test_a_name_is_taken_once(kernels: Callable[..., Kernel]) -> None:
    kernels("mine", same)
    with pytest.raises(ValueError, match="'mine' is registered already"):
        kernels("mine", same)
    with pytest.raises(ValueError, match="'torch-math' is registered already"):
        register_kernel("torch-math")(same)


def test_default_and_all_kernels_leave_out_variants(kernels: Callable[..., Kernel]) -> None:
    kernels("slow", same, default=False)
    names = {kernel.name for kernel in select(None)[0]}
    assert names >= {"torch-math", "flex"}
    assert not names & {"slow", "torch-math-compiled"}
    known = catalogue().values()
    assert select("all") == ([kernel for kernel in known if not kernel.variant_of], [])
    assert set(known) == set(select("all", variants=True)[0])


PER_WARP = "sage2-fp8-sm90[quant=per_warp,accum=fp32+fp32]"
SDPA = ("default", "math", "flash", "efficient", "cudnn")


@pytest.mark.parametrize(
    ("patterns", "chosen", "named"),
    [
        (
            "torch-*-compiled, torch-math,flex,torch-math",
            [*(f"torch-{backend}-compiled" for backend in SDPA), "torch-math", "flex"],
            ["torch-math", "flex"],
        ),
        ("sage1,sparge,flex", ["sage1", "sparge", "flex"], ["sage1", "sparge", "flex"]),
        (f"{PER_WARP}, sage1", [PER_WARP, "sage1"], [PER_WARP, "sage1"]),
        ("sage2-fp8-*[*per_warp*fp32+fp32]", [PER_WARP.replace("sm90", "cuda"), PER_WARP], []),
    ],
)
def test_only_names_in_full_are_named(patterns: str, chosen: list[str], named: list[str]) -> None:
    found, found_named = select(patterns)
    assert [kernel.name for kernel in found] == chosen
    assert set(found_named) == set(named)


def test_variants_are_selected_with_their_base() -> None:
    chosen, named = select("sparge,sage1", variants=True)
    assert [kernel.name for kernel in chosen] == [
        "sparge",
        *(f"sparge[topk={share}]" for share in (0.25, 0.5, 0.75, 1.0)),
        "sage1",
        "sage1[smooth_k=on]",
        "sage1[smooth_k=off]",
    ]
    assert named == ["sparge", "sage1"]
    variants = {kernel.name for kernel in catalogue().values() if kernel.variant_of}
    assert {kernel.name for kernel in select(None, variants=True)[0]} >= variants
    in_glob = {kernel.name for kernel in select("sage2*")[0]}
    assert in_glob == {name for name in catalogue() if name.startswith("sage2")}


@pytest.mark.parametrize(
    ("patterns", "sentence"),
    [
        ("torch-mth", r"no kernel 'torch-mth': did you mean torch-math\b"),
        ("torch-math,qqqqq", "no kernel 'qqqqq': `replay kernels` lists them"),
        ("zzz*", r"no kernel 'zzz\*'"),
        ("sage[12]", r"no kernel 'sage\[12\]'"),
        ("mine.py", "no kernel 'mine.py': name a function in it, mine.py:FUNCTION"),
        (" , ", "--kernels names no kernel"),
        ("", "--kernels names no kernel"),
    ],
)
def test_name_that_fits_nothing_is_refused(patterns: str, sentence: str) -> None:
    with pytest.raises(KernelNameError, match=sentence):
        select(patterns)


@pytest.mark.parametrize("name", ["", "  ", "two\nlines", "\x1b[31mred", "half a letter \udc80"])
def test_a_name_is_one_printable_line(name: str) -> None:
    with pytest.raises(ValueError, match="one printable line"):
        Kernel(name, lambda **arguments: torch.zeros(1))
    with pytest.raises(KernelNameError, match="one printable line"):
        find(f"{name}\n.py:f")
