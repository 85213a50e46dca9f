"""Functions that a compiled graph calls while it is traced."""

from __future__ import annotations

import torch

from capture.hooks.graph_constant import constant_in_graphs


def test_constant_function_has_pytorchs_mark() -> None:
    def ours() -> None: ...

    def theirs() -> None: ...

    torch.compiler.assume_constant_result(theirs)
    assert vars(constant_in_graphs(ours)) == vars(theirs)
