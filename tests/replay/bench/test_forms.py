"""A kernel that runs a call without its mask is judged by the call with the mask."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.kernels.constraints import no_mask
from replay.kernels.registry import Kernel
from tests.factories import normal, random_call
from tests.replay.bench.small_kernels import Replayed, sdpa

WINDOW = torch.ones(12, 12, dtype=torch.bool).tril().triu(-3)
PADDING = (torch.arange(12) < torch.tensor([9, 12])[:, None])[:, None, None]


def masked(mask: Tensor, **fields: Any) -> AttentionCall:
    return random_call(q_len=12, kv_len=12, batch=mask[None].shape[-4], attn_mask=mask, **fields)


def windowed(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Compute attention with a window or key lengths instead of a mask."""
    assert options.pop("attn_mask") is None
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    if options.pop("is_causal"):
        mask = mask.tril()
    left, right = options.pop("window", (None, None))
    mask = mask if left is None else mask.triu(-left)
    mask = mask if right is None else mask.tril(right)
    if (lengths := options.pop("seqused_k", None)) is not None:
        mask = mask & (torch.arange(key.shape[2]) < lengths[:, None, None, None])
    return sdpa(query, key, value, attn_mask=mask, **options)


def kernel(name: str, attention: Callable[..., Tensor] = windowed, **fields: Any) -> Kernel:
    known = frozenset({"window", "key-lengths"})
    return Kernel(name, attention, **{"unsupported": no_mask, "features": known, **fields})


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (WINDOW[None, None], "window 3/0"),
        (torch.zeros(12, 12).masked_fill(~WINDOW, -torch.inf)[None, None], "window 3/0"),
        (PADDING, "padding"),
        (torch.ones(1, 1, 12, 12, dtype=torch.bool), "no mask"),
    ],
    ids=["window", "float window", "padding", "no mask"],
)
def test_refused_mask_becomes_equal_options(mask: Tensor, words: str, replayed: Replayed) -> None:
    found = replayed(
        masked(mask), kernel("mine"), kernel("masked", sdpa, unsupported=lambda _: None)
    )
    assert found["mine"].call.mask_structure == words
    assert (found["mine"].status, found["mine"].restated_as) == ("ok", words)
    assert (found["masked"].status, found["masked"].restated_as) == ("ok", "")
    assert found["torch-default"].restated_as == ""
    assert found["mine"].tflops is not None
    assert found["mine"].flop_per_byte == pytest.approx(found["masked"].flop_per_byte, rel=0.5)


def test_rewritten_call_is_judged_by_the_mask(replayed: Replayed) -> None:
    def wider(*args: Tensor, **options: Any) -> Tensor:
        return windowed(*args, **{**options, "window": (4, 0)})

    found = replayed(masked(WINDOW[None, None]), kernel("wider", wider))["wider"]
    assert (found.status, found.restated_as) == ("inaccurate", "window 3/0")


def test_kernel_that_refuses_both_forms_gives_its_reason_for_the_mask(replayed: Replayed) -> None:
    call = masked(WINDOW[None, None])
    found = replayed(call, kernel("plain", features=frozenset()))["plain"]
    assert (found.status, found.reason) == ("unsupported", "takes no attn_mask")
    assert found.restated_as == ""
    odd = masked(normal(12, 12)[None, None] > 0)
    found = replayed(odd, kernel("mine"))["mine"]
    assert (found.status, found.call.mask_structure) == ("unsupported", "")


def test_kernel_that_takes_the_mask_gets_it_when_rows_are_for_a_model(replayed: Replayed) -> None:
    either = kernel(
        "either", sdpa, unsupported=lambda _: None, prefers_rewritten_mask=lambda _: True
    )
    call = masked(WINDOW[None, None])
    found = replayed(call, either, kernel("mine"), for_model=True)
    assert [found[name].restated_as for name in ("either", "mine")] == ["", "window 3/0"]
    assert [found[name].status for name in ("either", "mine")] == ["ok", "ok"]


def test_reused_result_is_found_in_the_rewritten_form(replayed: Replayed) -> None:
    kept: list[Tensor] = []

    def lazy(*args: Tensor, **options: Any) -> Tensor:
        kept.append(windowed(*args, **options))
        return kept[min(len(kept) - 1, 3)].clone()

    found = replayed(masked(WINDOW[None, None]), kernel("lazy", lazy))["lazy"]
    assert found.status == "inaccurate"
    assert "on other inputs" in found.reason or "when called again" in found.reason


def test_lengths_that_a_kernel_changes_are_restored(replayed: Replayed) -> None:
    def counting(*args: Tensor, **options: Any) -> Tensor:
        output = windowed(*args, **options)
        options["seqused_k"].sub_(1)
        return output

    found = replayed(masked(PADDING), kernel("counting", counting), kernel("mine"))
    assert found["counting"].changed_inputs == ("seqused_k",)
    assert (found["counting"].status, found["mine"].status) == ("ok", "ok")
