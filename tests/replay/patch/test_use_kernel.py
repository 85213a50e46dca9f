"""Kernels are put into a model, and removed again."""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
from capture.call.attention_call import AttentionCall
from capture.hooks.interceptor import TORCH_SDPA
from replay import register_kernel, use_kernel, use_plan
from replay.kernels.registry import KernelNameError, find, select
from replay.patch.call_dispatcher import KernelOutputError

from .conftest import plan_of


class Attend(nn.Module):
    def forward(self, query: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(query, query, query, attn_mask=mask)


def test_hits_and_fallbacks_are_counted(doubling: str) -> None:
    model, query = Attend(), torch.randn(1, 2, 5, 8)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    plain, masked = model(query), model(query, mask)
    with use_kernel(doubling) as swap:
        assert torch.equal(model(query), 2 * plain)
        assert torch.equal(model(query), 2 * plain)
        assert torch.equal(model(query, mask), masked)
    assert (swap.hits, swap.fallbacks) == (2, {"no mask": 1})
    assert str(swap) == "doubling: 2 calls, 1 fell back (1 × no mask)"
    assert torch.equal(model(query), plain)


def test_support_is_asked_once_for_each_mask_and_its_values() -> None:
    asked: list[bool] = []

    def unsupported(call: AttentionCall) -> str | None:
        asked.append(bool(call.attn_mask.all()))
        return None if asked[-1] else "hidden keys"

    register_kernel("all keys", unsupported=unsupported)(TORCH_SDPA)
    query, mask = torch.randn(1, 2, 5, 8), torch.ones(5, 5, dtype=torch.bool)
    with use_kernel("all keys") as swap:
        for _ in range(3):
            Attend()(query, mask)
        mask[0, 0] = False
        for _ in range(3):
            Attend()(query, mask)
        for _ in range(2):
            Attend()(query, torch.ones(5, 5, dtype=torch.bool))
    assert asked == [True, False, True, True]
    assert (swap.hits, swap.fallbacks) == (5, {"hidden keys": 3})


@pytest.mark.parametrize("compiled", [False, True])
def test_only_calls_of_the_given_module_are_handled(compiled: bool, doubling: str) -> None:
    """The inner module is called as by a method of the outer one other than `forward`."""
    query, one = torch.randn(1, 2, 5, 8), nn.Sequential(nn.Sequential(Attend()))
    models = [one[0], Attend()]
    inside, outside = (
        torch.compile(each, backend="eager") if compiled else each for each in models
    )
    plain = inside(query)
    for watched in (one, {"a": one}, torch.compile(one, backend="eager")):
        outputs: list[Tensor] = []
        with use_kernel(doubling, watched) as swap:
            outputs += [inside(query), outside(query)]
            in_thread(lambda outputs=outputs: outputs.append(inside(query)))
        assert torch.equal(torch.stack(outputs), torch.stack([2 * plain, plain, 2 * plain]))
        assert (swap.hits, swap.fallbacks) == (2, {"not in the module": 1})
        assert torch.equal(inside(query), plain)
        assert not any("forward" in vars(module) for module in one.modules())


def in_thread(run: Callable[[], object]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("every_thread", [False, True])
def test_other_threads_are_left_alone(every_thread: bool, compiled: bool, doubling: str) -> None:
    query, outputs = torch.randn(1, 2, 5, 8), list[Tensor]()
    model = torch.compile(Attend(), backend="eager") if compiled else Attend()
    plain = model(query)
    with use_kernel(doubling, every_thread=every_thread) as swap:
        outputs.append(model(query))
        in_thread(lambda: outputs.append(model(query)))
    assert torch.equal(torch.stack(outputs), torch.stack([2 * plain, (1 + every_thread) * plain]))
    assert swap.hits == 1 + every_thread
    assert swap.fallbacks == ({} if every_thread else {"in another thread": 1})


def test_block_without_a_handled_call_warns(doubling: str) -> None:
    query, mask = torch.randn(1, 2, 5, 8), torch.ones(5, 5, dtype=torch.bool)
    refused = pytest.warns(UserWarning, match="doubling handled no call: 1 × no mask$")
    with refused as told, use_kernel(doubling):
        Attend()(query, mask)
    assert told[0].filename == __file__
    with (
        warnings.catch_warnings(action="error"),
        pytest.raises(ZeroDivisionError),
        use_kernel(doubling),
    ):
        raise ZeroDivisionError


def test_program_has_a_kernel_if_it_was_exported_with_one(doubling: str) -> None:
    query = torch.randn(1, 2, 5, 8)
    plain, before = Attend()(query), torch.export.export(Attend(), (query,)).module()
    unseen = pytest.warns(UserWarning, match="doubling handled no call: no attention .* exported")
    with unseen, use_kernel(doubling):
        before(query)
        exported = torch.export.export(Attend(), (query,)).module()
    assert torch.equal(exported(query), plain)
    with use_kernel(doubling) as swap:
        assert torch.equal(exported(query), 2 * plain)
    assert swap.hits == 1


def test_a_kernel_is_given_by_its_name() -> None:
    for gives in (lambda function: use_kernel(function).__enter__(), select, find):
        with pytest.raises(TypeError, match=r"named by a string, not function: .*register_kernel"):
            gives(lambda query, key, value: query)  # type: ignore[arg-type, operator]


def test_a_kernel_that_cannot_run_here_is_refused() -> None:
    with pytest.raises(KernelNameError, match="did you mean torch-flash"):
        use_kernel("torch-flas").__enter__()
    if not torch.cuda.is_available():
        with pytest.raises(KernelNameError, match="torch-cudnn cannot run on cpu"):
            use_kernel("torch-cudnn").__enter__()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda output: output.transpose(1, 2),
            r"shape \(1, 5, 2, 8\), expected \(1, 2, 5, 8\)",
        ),
        (lambda output: output.half(), "float16, expected float32"),
        (lambda output: None, "NoneType, not a tensor"),
    ],
)
def test_output_of_another_form_is_refused(
    change: Callable[[Tensor], object], said: str, compiled: bool
) -> None:
    @register_kernel("misshaping")
    def misshaping(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> object:
        return change(F.scaled_dot_product_attention(query, key, value, **options))

    model = torch.compile(Attend(), backend="eager") if compiled else Attend()
    with (
        use_kernel("misshaping") as swap,
        pytest.raises(KernelOutputError, match=f"misshaping returned {said}"),
    ):
        model(torch.randn(1, 2, 5, 8))
    assert swap.hits == 0


def test_every_output_is_checked() -> None:
    """Facts about calls of one form are cached, but every output is still checked."""
    outputs: list[Tensor] = []

    @register_kernel("changing")
    def changing(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return outputs.pop()

    query = torch.randn(2, 5, 3, 8).transpose(1, 2)  # reshaping after attention needs no copy
    right, moved = torch.empty_like(query), query.contiguous()
    outputs += [right.double(), right, moved, right, right]
    model = Attend()
    with use_kernel("changing") as swap:
        for copies in (0, 0, 1, 1):
            model(query)
            assert swap.layout_copies == copies
        with pytest.raises(KernelOutputError, match="changing returned"):
            model(query)
    assert swap.hits == 4


def test_number_of_call_forms_is_unlimited(doubling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.patch.call_dispatcher.MOST_FORMS", 2)
    model = Attend()
    with use_kernel(doubling) as swap:
        for length in (1, 2, 3, 1, 2):
            query = torch.randn(1, 2, length, 8)
            torch.testing.assert_close(model(query), 2 * TORCH_SDPA(query, query, query))
    assert swap.hits == 5


@pytest.mark.parametrize("compiled", [False, True])
def test_kernel_gets_cast_inputs_under_autocast(compiled: bool) -> None:
    """Recordings cast inputs too; a 16-bit kernel that a replay chose would refuse other inputs."""
    seen = set()

    @register_kernel("telling")
    def telling(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        seen.update({query.dtype, key.dtype, value.dtype})
        return F.scaled_dot_product_attention(query, key, value, **options)

    model = torch.compile(Attend(), backend="eager", fullgraph=True) if compiled else Attend()
    with use_kernel("telling") as swap, torch.autocast("cpu", torch.bfloat16):
        output = model(torch.randn(1, 2, 5, 8))
    assert (swap.hits, seen, output.dtype) == (1, {torch.bfloat16}, torch.bfloat16)


def test_sizes_may_broadcast(eightfold: str) -> None:
    one, three = torch.randn(1, 2, 5, 8), torch.randn(3, 2, 5, 8)
    with use_kernel(eightfold) as swap:
        output = F.scaled_dot_product_attention(one, three, three)
    assert torch.equal(output, 8 * F.scaled_dot_product_attention(one, three, three))
    assert swap.hits == 1


def test_a_model_is_the_same_afterwards_to_the_last_bit(doubling: str) -> None:
    """The outputs and all attributes of modules are compared: forward methods, hooks, buffers."""
    runnable = models.load("llama", size="tiny", weights="random", device="cpu", steps=2)

    def outputs() -> dict[str, Tensor]:
        return runnable.outputs(runnable.run()).tensors

    def insides() -> list[dict[str, object]]:
        return [
            {name: dict(each) if isinstance(each, dict) else each for name, each in parts.items()}
            for module in runnable.roots[""].modules()
            for parts in [vars(module)]
        ]

    sdpa, inside, before = F.scaled_dot_product_attention, insides(), outputs()
    layer = next(path for path, _ in runnable.roots[""].named_modules() if "self_attn" in path)
    plan = plan_of((layer, "prefill", doubling))
    for swapped in (use_kernel(doubling), use_plan(plan, runnable.roots[""])):
        with swapped as swap:
            during = outputs()
        assert swap.hits
        assert not torch.equal(during["logits"], before["logits"])
        assert F.scaled_dot_product_attention is sdpa
        after = outputs()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert [each.keys() for each in insides()] == [each.keys() for each in inside]
        assert all(
            held is was or held == was
            for now, then in zip(insides(), inside, strict=True)
            for name, was in then.items()
            for held in [now[name]]
        )
