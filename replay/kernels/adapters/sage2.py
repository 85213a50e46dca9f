"""SageAttention 2 and 2++ (`sageattention` 2.x, built from source): INT8 QKᵀ, float16 or FP8 PV.

`sage2` is `sageattn`, which picks a function by the GPU's architecture. The other kernels are these
functions, with a variant for each combination of options that has an effect:

- `quant`: `qk_quant_gran`, one scale for the rows of each warp or of each thread
- `accum`: `pv_accum_dtype`, the dtype in which PV is summed
- `smooth_k`: subtract the key's mean over the sequence before quantising (not in place)
- `smooth_v`: subtract the value's mean; omitted if `accum` makes the function ignore `smooth_v`
- `quantizer`: `quantization_backend`, the code that quantises

All take BHSD (`tensor_layout="HND"`), and pad head_dim to 64 or 128 themselves. Causal calls need
as many queries as keys. Only the Triton kernel takes a mask. The adapter passes only bool masks,
because the kernel would add a float mask to scores that it has already multiplied by log2(e).
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from capture.hooks.interceptor import Arguments
from replay.kernels import constraints as limits
from replay.kernels.adapters import sage2_core
from replay.kernels.constraints import AnyCall, Constraint
from replay.kernels.layout import Packed, in_layout, on_bhsd, unit_stride
from replay.kernels.libraries import Capability, Library
from replay.kernels.wrapping import Prepare, at_once, register_adapted

LIBRARY = Library(
    module="sageattention",
    package="sageattention",
    install="pip install --no-build-isolation git+https://github.com/thu-ml/SageAttention",
    series=2,
)

_limits = (
    limits.no_dropout,
    limits.half_precision,
    limits.same_value_dim,
    limits.max_head_dim(128),
)

Options = dict[str, Any]
Variants = dict[str, Options]
"""Options by the string in the brackets of a variant's name."""


@dataclass(frozen=True)
class Function:
    """Function of the package, used as a kernel."""

    kernel: str
    function: str
    about: str
    runs_on: Callable[[Capability], bool]
    needs: str
    variants: Variants = field(default_factory=dict)
    built: str = ""
    """Name of the flag in `sageattention.core` that is true if the compiled part exists."""
    mask: Constraint = limits.no_mask
    core: Callable[..., Callable[[], Tensor]] | None = None
    """Function of (call, **options) that returns the same as `Kernel.prepare`."""

    @property
    def library(self) -> Library:
        return replace(LIBRARY, functions=(self.function,), runs_on=self.runs_on, needs=self.needs)

    def unavailable(self, device: torch.device) -> str | None:
        if reason := self.library.unavailable(device):
            return reason
        if self.built and not getattr(
            importlib.import_module("sageattention.core"), self.built, True
        ):
            return (
                "sageattention was built without this kernel: set TORCH_CUDA_ARCH_LIST to this "
                f"GPU's compute capability and {self.library.install}"
            )
        return None

    def run(self, call: Arguments, options: Options) -> Tensor:
        masks: Options = {}
        if call.attn_mask is not None:
            masks["attn_mask"] = call.attn_mask[(None,) * (4 - call.attn_mask.ndim)]
        return getattr(LIBRARY.load(), self.function)(
            call.query,
            call.key,
            call.value,
            tensor_layout="HND",
            is_causal=call.is_causal,
            sm_scale=call.scale,
            **masks,
            **options,
        )

    def prepare(self, options: Options) -> Prepare | None:
        return None if self.core is None else partial(self.core, **options)


def _smoothing(smooth_k: bool, smooth_v: bool = False) -> list[str]:
    return (
        []
        if smooth_k and not smooth_v
        else [*([] if smooth_k else ["smooth_k=off"]), *(["smooth_v=on"] if smooth_v else [])]
    )


def _cuda_variants(accumulators: dict[str, bool], takes_smooth_v: bool = True) -> Variants:
    """Return a CUDA function's variants; in `accumulators`, True means `smooth_v` has an effect."""
    found: Variants = {}
    for quant, (accum, effective), smooth_k, smooth_v in itertools.product(
        ("per_warp", "per_thread"), accumulators.items(), (True, False), (False, True)
    ):
        if smooth_v and not effective:
            continue
        named = [f"quant={quant}", f"accum={accum}", *_smoothing(smooth_k, smooth_v)]
        found[",".join(named)] = {
            "qk_quant_gran": quant,
            "pv_accum_dtype": accum,
            "smooth_k": smooth_k,
            **({"smooth_v": smooth_v} if takes_smooth_v else {}),
        }
    return found


def _triton_variants() -> Variants:
    return {
        ",".join([f"quantizer={quantizer}", *_smoothing(smooth_k)]): {
            "quantization_backend": quantizer,
            "smooth_k": smooth_k,
        }
        for quantizer in ("triton", "cuda")
        for smooth_k in (True, False)
    }


ON_AUTO = {(8, 0), (8, 6), (8, 9), (9, 0), (12, 0), (12, 1)}

FUNCTIONS = (
    Function(
        "sage2",
        "sageattn",
        "SageAttention 2: the package's own choice for this GPU",
        lambda capability: capability in ON_AUTO,
        "8.0, 8.6, 8.9, 9.0, 12.0 or 12.1",
    ),
    Function(
        "sage2-fp16-triton",
        "sageattn_qk_int8_pv_fp16_triton",
        "SageAttention 2 (Triton): INT8 QKᵀ, float16 PV",
        lambda capability: capability >= (8, 0),
        "8.0 or higher",
        _triton_variants(),
        mask=limits.bool_mask_only,
        core=sage2_core.fp16_triton,
    ),
    Function(
        "sage2-fp16-cuda",
        "sageattn_qk_int8_pv_fp16_cuda",
        "SageAttention 2 (CUDA): INT8 QKᵀ, float16 PV",
        lambda capability: capability >= (8, 0),
        "8.0 or higher",
        _cuda_variants({"fp32": False, "fp16": True, "fp16+fp32": False}),
        built="SM80_ENABLED",
        core=sage2_core.fp16_cuda,
    ),
    Function(
        "sage2-fp8-cuda",
        "sageattn_qk_int8_pv_fp8_cuda",
        "SageAttention 2++ (CUDA): INT8 QKᵀ, FP8 PV",
        lambda capability: capability >= (8, 9),
        "8.9 or higher",
        _cuda_variants({"fp32": True, "fp32+fp32": False, "fp32+fp16": False}),
        built="SM89_ENABLED",
        core=sage2_core.fp8_cuda,
    ),
    Function(
        "sage2-fp8-sm90",
        "sageattn_qk_int8_pv_fp8_cuda_sm90",
        "SageAttention 2 (CUDA, Hopper): INT8 QKᵀ, FP8 PV",
        lambda capability: capability == (9, 0),
        "9.0",
        # The function accepts pv_accum_dtype="fp32" too, but raises NotImplementedError.
        _cuda_variants({"fp32+fp32": False}, takes_smooth_v=False),
        built="SM90_ENABLED",
        core=sage2_core.fp8_sm90,
    ),
)


def _prepare_varlen(call: AnyCall, smooth_k: bool) -> Callable[[], Tensor]:
    """Prepare `sageattn_varlen`; the core includes quantisation and excludes only the packing."""
    packed = Packed.of(in_layout(call, unit_stride))

    def run() -> Tensor:
        output = LIBRARY.load().sageattn_varlen(
            packed.query_THD,
            packed.key_THD,
            packed.value_THD,
            packed.q_offsets,
            packed.k_offsets,
            packed.longest_query,
            packed.longest_key,
            is_causal=False,
            sm_scale=call.scale,
            smooth_k=smooth_k,
        )
        return packed.unpack(output)

    return run


def _register_functions() -> None:
    for function in FUNCTIONS:
        for named, options in {"": {}, **function.variants}.items():
            register_adapted(
                f"{function.kernel}[{named}]" if named else function.kernel,
                function.library,
                on_bhsd(partial(function.run, options=options)),
                (*_limits, limits.mask_or_causal, function.mask, limits.causal_only_square),
                function.about,
                prepare=function.prepare(options),
                accuracy_class="quantised",
                unavailable=function.unavailable,
                variant_of=function.kernel if named else "",
            )


def _register_varlen() -> None:
    for named, smooth_k in {"": True, "smooth_k=on": True, "smooth_k=off": False}.items():
        prepare = partial(_prepare_varlen, smooth_k=smooth_k)
        register_adapted(
            f"sage2-varlen[{named}]" if named else "sage2-varlen",
            replace(LIBRARY, functions=("sageattn_varlen",)),
            at_once(prepare),
            (*_limits, limits.mask_or_causal, limits.needs_mask, limits.padding_mask_only),
            "SageAttention 2 (Triton) on a padded batch, packed by its padding mask",
            prepare=prepare,
            accuracy_class="quantised",
            variant_of="sage2-varlen" if named else "",
        )


_register_functions()
_register_varlen()
