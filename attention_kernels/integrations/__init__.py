"""Registration of this package's attention with the libraries that models come from."""

from __future__ import annotations

import importlib

LIBRARIES = ("comfyui", "diffusers", "torch", "transformers")
NAME = "attention_kernels"
"""Name by which the libraries know the attention of this package."""
PRECISIONS = {NAME: "exact", f"{NAME}_fp8": "fp8", f"{NAME}_int8": "int8"}
"""Precision of `attention` by the name that the libraries know, except `torch`, which has `NAME`
alone."""


def register(library: str) -> None:
    """Make this package's attention available in a library, by the name `attention_kernels`.

    `attention_kernels_fp8` and `attention_kernels_int8` compute products in 8 bits and raise for
    calls that no 8-bit kernel computes (`precision` of `attention`); `torch` lacks them.

    Args:
        library: `transformers`, for `attn_implementation="attention_kernels"`; `diffusers`, for
            `model.set_attention_backend("attention_kernels")`; `comfyui`, for
            `get_attention_function("attention_kernels")`; `torch`, for
            `torch.nn.attention.activate_flash_attention_impl("attention_kernels")`.

    Raises:
        ValueError: no such library.
        ImportError: the library is not installed, or is too old.
    """
    if library not in LIBRARIES:
        raise ValueError(f"unknown library {library!r}: expected one of {', '.join(LIBRARIES)}")
    importlib.import_module(f"{__name__}.{library}_attention").register()
