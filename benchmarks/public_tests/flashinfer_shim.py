"""The functions of FlashInfer that its tests call, answered by a kernel of ours.

Names and parameters are the library's. Anything else that the tests import from `flashinfer` is an
`Absent`, which skips the test that calls it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import math
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.public_tests.answers import Answers
from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant

Pages = Tensor | tuple[Tensor, Tensor]

NOT_DONE = {
    "q_scale": "scales of 8-bit tensors",
    "k_scale": "scales of 8-bit tensors",
    "v_scale": "scales of 8-bit tensors",
    "scale_q": "scales of 8-bit tensors",
    "kv_cache_sf": "caches in 4 bits",
    "use_cuda_graph": "CUDA graphs",
    "packed_custom_mask": "masks of one bit an element",
}
CHANGE_NOTHING = {
    *("backend", "use_tensor_cores", "q_data_type", "kv_data_type", "data_type", "non_blocking"),
    *("num_qo_heads", "num_kv_heads", "head_dim", "head_dim_qk", "head_dim_vo", "jit_args"),
    *("jit_kwargs", "head_dim_vo", "use_fp16_qk_reduction"),
}


class Absent:
    """Part of the library that computes no attention."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.name}.{name}")

    def __getitem__(self, key: object) -> Absent:
        return self

    def __or__(self, other: object) -> Absent:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pytest.skip(f"{self.name} is not attention")


class Module(types.ModuleType):
    """A module of the library that has every name."""

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a `Module` for every submodule of `flashinfer`."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "flashinfer":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class FlashInfer:
    """The library's functions, and its wrappers, whose `plan` must precede `run`."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers

    def single_decode_with_kv_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_layout: str = "NHD",
        pos_encoding_mode: str = "NONE",
        **given: Any,
    ) -> Tensor:
        key, value = (_bhsd(each, kv_layout) for each in (k, v))
        given["pos_encoding_mode"] = pos_encoding_mode
        call = call_of(q[None, :, None], key, value, **given)
        return self.answers(call, "single_decode")[0, :, 0]

    def single_prefill_with_kv_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        custom_mask: Tensor | None = None,
        kv_layout: str = "NHD",
        **given: Any,
    ) -> Tensor:
        key, value = (_bhsd(each, kv_layout) for each in (k, v))
        call = call_of(_bhsd(q, "NHD"), key, value, attn_mask=custom_mask, **given)
        return self.answers(call, "single_prefill")[0].transpose(0, 1)

    def wrappers(self) -> dict[str, Any]:
        """Return the classes by name; each test makes its own instances."""
        answers = self.answers
        return {
            "BatchDecodeWithPagedKVCacheWrapper": type("Decode", (Decode,), {"answers": answers}),
            "BatchPrefillWithPagedKVCacheWrapper": type("Paged", (Paged,), {"answers": answers}),
            "BatchAttentionWithAttentionSinkWrapper": type("Sinks", (Paged,), {"answers": answers}),
            "BatchPrefillWithRaggedKVCacheWrapper": type("Ragged", (Ragged,), {"answers": answers}),
        }


class Wrapper:
    """Base of the library's wrappers."""

    answers: Answers
    function = ""

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", **given: Any
    ) -> None:
        self.kv_layout = kv_layout
        self.given = given
        """Options of the instance and, later, of its plan."""

    def _answer(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        **given: Any,
    ) -> Any:
        """Return the output (T, H, D) and, if requested, the log-sum-exp to base 2 (T, H)."""
        if args:  # the variant with sinks has these
            given["sinks"], given["sm_scale"] = args
        call = call_of(query, key, value, **{**self.given, **given})
        if return_lse:
            output, logarithms = self.answers.with_lse(call, self.function)
            logarithms = self._tokens(logarithms[..., None])[..., 0] / math.log(2)
        else:
            output, logarithms = self.answers(call, self.function), None
        output = self._tokens(output)
        if out is not None:
            output = out.copy_(output)
        return (output, logarithms) if return_lse else output

    @staticmethod
    def _tokens(output: Tensor) -> Tensor:
        return output[0].transpose(0, 1)


class Ragged(Wrapper):
    """Wrapper for packed queries and keys."""

    function = "ragged"

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        custom_mask: Tensor | None = None,
        **given: Any,
    ) -> None:
        if custom_mask is not None:
            pytest.skip("masks of packed sequences")
        self.starts = (qo_indptr, kv_indptr)
        self.given |= given

    def run(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **given: Any) -> Any:
        starts_q, starts_k = (each.to(q.device, torch.int32) for each in self.starts)
        query, key, value = (_bhsd(each, "NHD") for each in (q, k, v))
        given |= {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k}
        return self._answer(query, key, value, *args, **given)


class Decode(Wrapper):
    """Wrapper for one query of each sequence, with keys in pages."""

    function = "decode"

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **given: Any,
    ) -> None:
        self.page_size = page_size
        self.table = page_table(indptr, indices)
        self.lengths = lengths(indptr, last_page_len, page_size)
        self.given |= given

    def run(self, q: Tensor, paged_kv_cache: Pages, *args: Any, **given: Any) -> Any:
        return self._on_pages(q[:, :, None], paged_kv_cache, *args, **given)

    def _on_pages(self, query: Tensor, cache: Pages, *args: Any, **given: Any) -> Any:
        parts: Sequence[Tensor] = cache.unbind(1) if isinstance(cache, Tensor) else cache
        if parts[0].ndim == 3:  # pages of one token
            parts = [each[:, None] for each in parts]
        if self.kv_layout == "NHD":
            parts = [each.transpose(1, 2) for each in parts]
        pages: dict[str, Any] = {
            "page_table": self.table.to(query.device),
            "seqused_k": self.lengths.to(query.device),
        }
        key, value = parts
        return self._answer(query, key, value, *args, **pages, **given)

    @staticmethod
    def _tokens(output: Tensor) -> Tensor:
        return output[:, :, 0]


class Paged(Decode):
    """Wrapper for packed queries with keys in pages."""

    function = "paged"

    def plan(  # type: ignore[override]
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        custom_mask: Tensor | None = None,
        **given: Any,
    ) -> None:
        if custom_mask is not None:
            pytest.skip("masks of packed sequences")
        self.starts_q = qo_indptr
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        super().plan(*pages, num_qo_heads, num_kv_heads, head_dim_qk, page_size, **given)

    def run(self, q: Tensor, paged_kv_cache: Pages, *args: Any, **given: Any) -> Any:
        starts = self.starts_q.to(q.device, torch.int32)
        query = _bhsd(q, "NHD")
        return self._on_pages(query, paged_kv_cache, *args, cu_seqlens_q=starts, **given)

    @staticmethod
    def _tokens(output: Tensor) -> Tensor:
        return Wrapper._tokens(output)


def page_table(indptr: Tensor, indices: Tensor) -> Tensor:
    """Return the page table (B, maximum pages) int32; -1 after a sequence's last page."""
    rows = indices.split(indptr.diff().tolist())
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1).int()


def lengths(indptr: Tensor, last_page_len: Tensor, page_size: int) -> Tensor:
    """Return the tokens of each sequence, (B,) int32."""
    pages = indptr.diff()
    return ((pages - 1).clamp(min=0) * page_size + last_page_len.to(pages) * (pages > 0)).int()


def call_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    causal: bool = False,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    pos_encoding_mode: str = "NONE",
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    **given: Any,
) -> AttentionCall:
    """Translate FlashInfer's options into ours; its masks are aligned to the bottom right."""
    if pos_encoding_mode != "NONE":
        pytest.skip("rotary embeddings or ALiBi")
    for name, what in NOT_DONE.items():
        if given.get(name) not in (None, False):
            pytest.skip(what)
    if unknown := given.keys() - NOT_DONE.keys() - CHANGE_NOTHING:
        raise TypeError(f"the shim of FlashInfer has no argument {min(unknown)!r}")
    return AttentionCall(
        query,
        key,
        value,
        attn_mask,
        is_causal=causal,
        scale=sm_scale,
        enable_gqa=query.shape[1] != key.shape[1],
        sinks=sinks,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        page_table=page_table,
        variant=AttentionVariant(
            bottom_right=True,
            window=(window_left if window_left >= 0 else None, None),
            softcap=logits_soft_cap or None,
        ),
    )


def _bhsd(tensor: Tensor, layout: str) -> Tensor:
    """Return one sequence, or several concatenated, as (1, H, S, D)."""
    return (tensor.transpose(0, 1) if layout == "NHD" else tensor)[None]
