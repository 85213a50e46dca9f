"""Kernels support or refuse calls with features beyond SDPA."""

import pytest
import torch

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import FEATURES
from replay.accuracy.reference import attention
from replay.kernels.registry import Kernel, catalogue, find
from tests.factories import random_call
from tests.variant_calls import CALLS


def test_flex_takes_no_call_without_keys() -> None:
    """On a CPU, such a call crashed its worker by a division by zero."""
    reason = find("flex").refuses(random_call(kv_len=0))
    assert "without keys" in reason


@pytest.mark.parametrize(
    "name", ["eager", "torch-default", "torch-masked", pytest.param("flex", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_a_kernel_gives_what_the_reference_gives(name: str, call: AttentionCall) -> None:
    kernel = find(name)
    if reason := kernel.refuses(call):
        assert (
            set(call.features) - kernel.features
            or "on a CPU" in reason
            or "torch-default" in reason
        )
        return
    expected = attention(call)
    found = [kernel.attention(**call.arguments())]
    if kernel.prepare is not None:
        found.append(kernel.prepare(call)())
    for output in found:
        assert torch.allclose(output.double(), expected, atol=1e-5)


def test_every_feature_has_a_call_here() -> None:
    assert {name for call in CALLS.values() for name in call.features} == FEATURES.keys()


@pytest.mark.parametrize(
    "kernel",
    [
        kernel
        for kernel in catalogue().values()
        if not kernel.name.endswith(("-compiled", "-autotuned"))  # tracing takes long
    ],
    ids=lambda kernel: kernel.name,
)
def test_unknown_features_are_refused_by_name(kernel: Kernel) -> None:
    """`Kernel.refuses` names the feature, and the drop-in raises an error."""
    for call in CALLS.values():
        unknown = [FEATURES[name] for name in call.features if name not in kernel.features]
        if not unknown:
            continue
        assert kernel.refuses(call) == f"has no {' and no '.join(unknown)}"
        with pytest.raises((NotImplementedError, TypeError, ImportError)):
            kernel.attention(**call.arguments())
