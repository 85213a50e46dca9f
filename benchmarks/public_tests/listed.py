"""Lists the tests of the two libraries that are run, and our kernel for each.

FlashAttention's tests call the functions of `attention_kernels.flash_attention`, which choose a
kernel, and their gradients. Omitted are tests of 8 and 4 bits, of rotary embeddings and ALiBi
alone, of CUDA graphs and of merged states; FlashInfer's tests of a log-sum-exp; and tests that
compare the library's own options (`use_tensor_cores`) with each other.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from benchmarks.public_tests.flash_attn_shim import NAME

Against = Literal["PyTorch", "float64", "itself"]
"""`PyTorch`: the test's own formula; flash-attn's tests allow two or three times the error of this
formula in 16 bits. `float64`: attention in float64, if a test compares with another function of the
library. `itself`: the kernel's output for an equivalent call."""


class Listed(NamedTuple):
    """A listed test function of a library."""

    library: Literal["flash-attention", "flashinfer"]
    file: str
    """Path in the library's checkout."""
    name: str
    kernels: tuple[str, ...]
    against: Against = "PyTorch"
    asked: tuple[str, ...] | None = None
    """Functions of the library that the kernel replaces (`Answers`)."""


FA2, FA3, VARLEN = "triton-fa2", "triton-fa3", "triton-varlen"
DECODE, PAGED = "triton-decode", "triton-paged-decode"


def _flashinfer(
    file: str,
    name: str,
    *kernels: str,
    against: Against = "PyTorch",
    asked: tuple[str, ...] | None = None,
) -> Listed:
    return Listed("flashinfer", f"tests/attention/{file}.py", name, kernels, against, asked)


TESTS = (
    *(
        Listed("flash-attention", f"{folder}/test_flash_attn.py", name, (NAME,))
        for folder, name in (
            ("tests", "test_flash_attn_qkvpacked"),
            ("tests", "test_flash_attn_varlen_qkvpacked"),
            ("tests", "test_flash_attn_output"),
            ("tests", "test_flash_attn_varlen_output"),
            ("tests", "test_flash_attn_causal"),
            ("tests", "test_flash_attn_varlen_causal"),
            ("tests", "test_flash_attn_splitkv"),
            ("tests", "test_flash_attn_kvcache"),
            ("hopper", "test_flash_attn_output"),
            ("hopper", "test_flash_attn_varlen_output"),
            ("hopper", "test_flash_attn_kvcache"),
        )
    ),
    *(
        Listed("flash-attention", "tests/test_flash_attn.py", name, (NAME,))
        for name in (
            "test_flash_attn_bwd_overflow",
            "test_flash_attn_bwd_transpose",
            "test_flash_attn_bwd_varlen_overflow",
        )
    ),
    # These repeat a call, and compare outputs, log-sum-exps and gradients.
    *(
        Listed("flash-attention", "tests/test_flash_attn.py", name, (NAME,), "itself")
        for name in (
            "test_flash_attn_race_condition",
            "test_flash_attn_deterministic",
            "test_flash_attn_varlen_deterministic",
        )
    ),
    _flashinfer("test_single_prefill", "test_sinqle_prefill_with_paged_kv_cache", FA2, FA3),
    _flashinfer("test_single_prefill", "test_single_prefill_extreme_negative_logits", FA2, FA3),
    _flashinfer("test_single_prefill", "test_single_prefill_masked_key_never_dominates", FA2, FA3),
    _flashinfer("test_logits_cap", "test_single_decode_logits_soft_cap", DECODE),
    _flashinfer("test_logits_cap", "test_single_prefill_logits_soft_cap", FA2, FA3),
    *(
        _flashinfer("test_sliding_window", name, *kernels, against="itself")
        for name, *kernels in (
            ("test_single_decode_sliding_window", DECODE),
            ("test_single_prefill_sliding_window", FA2, FA3),
        )
    ),
    *(
        _flashinfer("test_sliding_window", name, *kernels, against="float64", asked=(asked,))
        for name, asked, *kernels in (
            ("test_batch_decode_sliding_window", "decode", PAGED),
            ("test_single_decode_prefill_sliding_window_match", "single_decode", DECODE),
            ("test_single_decode_prefill_sliding_window_match", "single_prefill", FA2, FA3),
            ("test_batch_paged_prefill_sliding_window", "paged", VARLEN),
            ("test_batch_ragged_prefill_sliding_window", "ragged", VARLEN, FA2, FA3),
        )
    ),
    *(
        _flashinfer("test_batch_decode_kernels", name, PAGED, against="float64", asked=("decode",))
        for name in (
            "test_batch_decode_with_paged_kv_cache",
            "test_batch_decode_with_tuple_paged_kv_cache",
        )
    ),
    *(
        _flashinfer(
            "test_batch_prefill_kernels", name, *kernels, against="float64", asked=(function,)
        )
        for name, function, *kernels in (
            ("test_batch_prefill_with_paged_kv_cache", "paged", VARLEN),
            ("test_batch_prefill_with_tuple_paged_kv_cache", "paged", VARLEN),
            ("test_batch_prefill_with_ragged_kv_cache", "ragged", VARLEN, FA2, FA3),
        )
    ),
    *(
        _flashinfer("test_batch_prefill_kernels", name, VARLEN)
        for name in (
            "test_ragged_prefill_one_valid_key",
            "test_paged_prefill_fully_masked_rows",
            "test_paged_prefill_split_kv_empty_chunk",
        )
    ),
    _flashinfer(
        "test_non_contiguous_prefill",
        "test_single_prefill_packed_input",
        FA2,
        FA3,
        against="itself",
    ),
    _flashinfer(
        "test_non_contiguous_decode",
        "test_batch_paged_decode_packed_input",
        PAGED,
        against="itself",
    ),
    *(
        _flashinfer("test_attention_sink", name, *kernels, asked=asked)
        for name, kernels, asked in (
            ("test_attention_sink", (VARLEN,), None),
            ("test_attention_sink", (FA2, FA3), ("ragged",)),
            ("test_attention_sink", (PAGED,), ("paged",)),
            ("test_attention_sink_incremental_generation", (VARLEN,), None),
            ("test_attention_sink_incremental_generation", (PAGED,), ("paged",)),
            ("test_attention_sink_chunk_prefill", (VARLEN,), None),
            ("test_attention_sink_chunk_prefill", (FA2, FA3), ("ragged",)),
            ("test_attention_sink_varlen", (VARLEN,), None),
        )
    ),
)
