"""SageAttention 3 (`sageattn3`, built from source): FP4 attention on consumer Blackwell.

`sageattn3.sageattn3_blackwell` takes BHSD. The function ignores a mask and a scale, subtracts the
key's mean in place (the row reports this in `changed_inputs`) and does not support grouped heads.
The adapter refuses head_dim 256, for which the function would call PyTorch's SDPA.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from capture.hooks.interceptor import Arguments
from replay.kernels import constraints as limits
from replay.kernels.layout import on_bhsd
from replay.kernels.libraries import Library
from replay.kernels.wrapping import register_adapted

LIBRARY = Library(
    module="sageattn3",
    package="sageattn3",
    install="git clone https://github.com/thu-ml/SageAttention && "
    "pip install --no-build-isolation ./SageAttention/sageattention3_blackwell",
    functions=("sageattn3_blackwell",),
    runs_on=lambda capability: capability in {(12, 0), (12, 1)},
    needs="12.0 or 12.1",
)


_limits = (
    limits.no_dropout,
    limits.half_precision,
    limits.no_mask,
    limits.default_scale,
    limits.causal_only_square,
    limits.no_gqa,
    limits.same_value_dim,
    limits.head_dims(64, 128),
)


def _run(call: Arguments, per_block_mean: bool) -> Tensor:
    # `limits.default_scale` has checked that the scale is the default.
    return LIBRARY.load().sageattn3_blackwell(
        call.query, call.key, call.value, is_causal=call.is_causal, per_block_mean=per_block_mean
    )


for _variant, _per_block in {"": True, "[mean=block]": True, "[mean=sequence]": False}.items():
    register_adapted(
        f"sage3{_variant}",
        LIBRARY,
        on_bhsd(partial(_run, per_block_mean=_per_block)),
        _limits,
        "SageAttention 3: FP4 (consumer Blackwell); changes the key in place",
        accuracy_class="quantised",
        variant_of="sage3" if _variant else "",
    )
