"""The functions of flash-attn 2 and 3 that their tests call, from `attention_kernels`.

Helpers such as padding are the tests' own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from attention_kernels import flash_attention

NAME = "flash_attention"
"""Name of the functions in place of a kernel's."""


def no_rotary(*args: Any, **kwargs: Any) -> None:
    """Stand in for a function that computes no attention."""
    pytest.skip("rotary embeddings")


def nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for the function that plans a call of the library's own kernels."""


class FlashAttn:
    """flash-attn's functions; a call that ours refuse skips the test, with the reason."""

    def __init__(self) -> None:
        self.calls = 0
        """Number of calls that were computed."""

    def flash_attn_func(self, *args: Any, **given: Any) -> Any:
        return self._computed(flash_attention.flash_attn_func, *args, **given)

    def flash_attn_kvpacked_func(self, q: Tensor, kv: Tensor, *args: Any, **given: Any) -> Any:
        return self.flash_attn_func(q, *kv.unbind(2), *args, **given)

    def flash_attn_qkvpacked_func(self, qkv: Tensor, *args: Any, **given: Any) -> Any:
        return self.flash_attn_func(*qkv.unbind(2), *args, **given)

    def flash_attn_varlen_func(self, *args: Any, **given: Any) -> Any:
        return self._computed(flash_attention.flash_attn_varlen_func, *args, **given)

    def flash_attn_varlen_kvpacked_func(
        self, q: Tensor, kv: Tensor, *args: Any, **given: Any
    ) -> Any:
        return self.flash_attn_varlen_func(q, *kv.unbind(1), *args, **given)

    def flash_attn_varlen_qkvpacked_func(
        self, qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **given: Any
    ) -> Any:
        lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        return self.flash_attn_varlen_func(*qkv.unbind(1), *lengths, *args, **given)

    def flash_attn_with_kvcache(self, *args: Any, **given: Any) -> Any:
        return self._computed(flash_attention.flash_attn_with_kvcache, *args, **given)

    def _computed(self, function: Callable[..., Any], *args: Any, **given: Any) -> Any:
        try:
            result = function(*args, **given)
        except NotImplementedError as reason:
            pytest.skip(str(reason))
        self.calls += 1
        return result
