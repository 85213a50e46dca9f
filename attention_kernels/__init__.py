"""Attention kernels in Triton and Gluon: functions of tensors with SDPA-like arguments.

`attention` takes the arguments of `scaled_dot_product_attention` and runs the fastest exact kernel
for the call. `flash_attn_func`, `flash_attn_varlen_func` and `flash_attn_with_kvcache` take those
of FlashAttention. The other functions are the kernels themselves. A kernel is imported on first
use, so importing this package is quick and does not need Triton.

A folder imports only from the folders listed below it:

    integrations/       attention of transformers, diffusers, ComfyUI and SDPA's flash backend
    flash_attention.py  FlashAttention's functions
    flash_arguments.py  checks and translation of their arguments
    flash_operators.py  PyTorch operators for packed sequences and key/value caches
    operators.py        PyTorch operator and function `attention`
    gradients.py        PyTorch operators for gradients
    dispatch.py         choice of a kernel for a call
    sparse/             decode of chosen tokens, and prefill over chosen blocks of keys
    decode/             a few queries over a cache: in one piece, in pages, in 8 bits; batches
    quantised/          prefill with 8-bit operands, for any GPU and for Hopper
    portable/           prefill in Triton for any GPU; calls hopper/ where that is faster
    hopper/             prefill in Gluon for Hopper (docs/kernel-notes.md draws how it works)
    tiles/              parts of kernels: masking, online softmax, products, visited blocks
    launch/             the host's side of a launch: plans, descriptors, workspace, shape checks
    options.py          arguments of a call that SDPA does not have

A file is named after its function (`prefill.py`, `paged_decode.py`). `…_kernel.py` holds the code
that the GPU runs; the file of the same name without `_kernel` plans and launches it. With
TRITON_INTERPRET=1 set before the import, the Triton kernels run on the CPU in Triton's interpreter,
which tests their results but not their speed.

Suffixes of names: B batch, Hq query heads, Hkv key/value heads, H heads of either kind, S sequence,
D head dimension, T tokens of all batch elements, concatenated.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention_kernels.decode.contiguous_decode import contiguous_decode
    from attention_kernels.decode.paged_batch import paged_batch
    from attention_kernels.decode.paged_decode import paged_decode
    from attention_kernels.decode.quantised_cache import quantise_cache
    from attention_kernels.decode.quantised_decode import quantised_decode
    from attention_kernels.decode.split_kv import attend_to_cache
    from attention_kernels.flash_attention import (
        flash_attn_func,
        flash_attn_varlen_func,
        flash_attn_with_kvcache,
    )
    from attention_kernels.hopper.hopper_prefill import hopper_prefill
    from attention_kernels.integrations import register
    from attention_kernels.operators import attention, warm_up
    from attention_kernels.options import PLAIN, AttentionOptions
    from attention_kernels.portable.masked_prefill import masked_prefill
    from attention_kernels.portable.prefill import prefill
    from attention_kernels.portable.varlen import KeyRanges, packed_prefill, padded_prefill
    from attention_kernels.quantised.quantise import quantise_key_value
    from attention_kernels.quantised.quantised_prefill import attend_to_quantised, quantised_prefill
    from attention_kernels.sparse.block_choice import choose_blocks, visited_of
    from attention_kernels.sparse.block_policy import BlockPolicy, kept_blocks
    from attention_kernels.sparse.block_sparse import block_sizes, block_sparse_attention
    from attention_kernels.sparse.sparse_decode import paged_sparse_decode, sparse_decode
    from attention_kernels.sparse.token_choice import choose_paged_tokens, choose_tokens

__version__ = "0.1.0"

_MODULES = {
    "PLAIN": "options",
    "AttentionOptions": "options",
    "BlockPolicy": "sparse.block_policy",
    "KeyRanges": "portable.varlen",
    "attend_to_cache": "decode.split_kv",
    "attend_to_quantised": "quantised.quantised_prefill",
    "attention": "operators",
    "block_sizes": "sparse.block_sparse",
    "block_sparse_attention": "sparse.block_sparse",
    "choose_blocks": "sparse.block_choice",
    "choose_paged_tokens": "sparse.token_choice",
    "choose_tokens": "sparse.token_choice",
    "contiguous_decode": "decode.contiguous_decode",
    "flash_attn_func": "flash_attention",
    "flash_attn_varlen_func": "flash_attention",
    "flash_attn_with_kvcache": "flash_attention",
    "hopper_prefill": "hopper.hopper_prefill",
    "kept_blocks": "sparse.block_policy",
    "masked_prefill": "portable.masked_prefill",
    "packed_prefill": "portable.varlen",
    "padded_prefill": "portable.varlen",
    "paged_batch": "decode.paged_batch",
    "paged_decode": "decode.paged_decode",
    "paged_sparse_decode": "sparse.sparse_decode",
    "prefill": "portable.prefill",
    "quantise_cache": "decode.quantised_cache",
    "quantise_key_value": "quantised.quantise",
    "quantised_decode": "decode.quantised_decode",
    "quantised_prefill": "quantised.quantised_prefill",
    "register": "integrations",
    "sparse_decode": "sparse.sparse_decode",
    "visited_of": "sparse.block_choice",
    "warm_up": "operators",
}
"""Module of each public name. No public function has the name of a folder or file here: importing
that module would replace the function in this namespace."""

__all__ = [
    "PLAIN", "AttentionOptions", "BlockPolicy", "KeyRanges", "attend_to_cache",
    "attend_to_quantised", "attention", "block_sizes", "block_sparse_attention", "choose_blocks",
    "choose_paged_tokens", "choose_tokens", "contiguous_decode", "flash_attn_func",
    "flash_attn_varlen_func", "flash_attn_with_kvcache", "hopper_prefill", "kept_blocks",
    "masked_prefill", "packed_prefill", "padded_prefill", "paged_batch", "paged_decode",
    "paged_sparse_decode", "prefill", "quantise_cache", "quantise_key_value", "quantised_decode",
    "quantised_prefill", "register", "sparse_decode", "visited_of", "warm_up",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used.

    Raises:
        ImportError: the name needs Triton or a newer version of Triton.
    """
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except (
        ImportError,
        AttributeError,
    ) as error:  # old versions of Triton lack some modules and names
        raise ImportError(_refusal(name, error)) from error
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def _refusal(name: str, error: Exception) -> str:
    """Return a sentence that explains why a kernel cannot be imported and what to do about it."""
    try:
        installed = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return f"{__name__}.{name} needs Triton: pip install triton"
    if isinstance(error, ModuleNotFoundError) and error.name and "triton" not in error.name:
        # Triton's interpreter needs NumPy, which neither Triton nor PyTorch requires.
        return f"{__name__}.{name} needs {error.name}: pip install {error.name}"
    least = "3.6" if name == "hopper_prefill" else "3.4"
    return f"{__name__}.{name} needs Triton {least} or newer ({installed} is installed): {error}"
