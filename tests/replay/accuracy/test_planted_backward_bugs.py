"""Bugs in the backward of a user's kernel are named on calls of a fine-tuning run of Llama."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import models
from attention_replay.errors import Error
from capture import load, record
from capture.call.attention_call import AttentionCall
from replay.accuracy.gradient_verdict import judge_gradients

Kernel = Callable[..., Tensor]
STALE: dict[torch.Size, Tensor] = {}
GENERATOR = torch.Generator().manual_seed(0)


class Mine(torch.autograd.Function):
    """Attention that keeps the log-sum-exp, as kernels do; `bug` names a bug of its backward."""

    @staticmethod
    def forward(ctx: Any, bug: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        if bug != "blind rows":
            lse = lse.masked_fill(lse == -math.inf, 0.0)
        output = (scores - lse).exp().nan_to_num() @ v
        ctx.bug = bug
        ctx.save_for_backward(q, k, v, mask, lse, output)
        return output

    @staticmethod
    def backward(ctx: Any, upper: Tensor) -> Any:
        q, k, v, mask, lse, output = ctx.saved_tensors
        scale = 1 / math.sqrt(q.shape[-1])
        if ctx.bug == "stale keys":
            k, STALE[k.shape] = STALE.get(k.shape, k), k
        if ctx.bug == "diagonal" and mask[0, 0, 0, 0]:  # not padded
            mask = torch.ones_like(mask).tril(1)
        weights = ((q @ k.mT * scale).masked_fill(~mask, -math.inf) - lse).exp()
        delta = (upper * output).sum(-1, keepdim=True)
        of_scores = weights * (upper @ v.mT - delta) * scale
        if ctx.bug == "race":
            of_scores = of_scores * (torch.rand(of_scores.shape, generator=GENERATOR) > 0.1)
        to_key = of_scores @ q if ctx.bug == "transpose" else of_scores.mT @ q
        if ctx.bug == "scale":
            to_key = to_key * scale
        return None, of_scores @ k, to_key, weights.mT @ upper, None


class OneHead(torch.autograd.Function):
    """Repeats the heads of keys or values; its backward forgets the sum over a group."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: int) -> Tensor:
        ctx.group = group
        return tensor.repeat_interleave(group, 1)

    @staticmethod
    def backward(ctx: Any, upper: Tensor) -> Any:
        return upper[:, :: ctx.group], None


def mine(bug: str = "") -> Kernel:
    """Return a user's kernel."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        group = query.shape[1] // key.shape[1]
        if bug == "group":
            key, value = OneHead.apply(key, group), OneHead.apply(value, group)
        else:
            key, value = (each.repeat_interleave(group, 1) for each in (key, value))
        sizes = (*query.shape[:3], key.shape[2])
        mask = torch.ones(sizes, dtype=torch.bool).tril() if attn_mask is None else attn_mask
        output: Tensor = Mine.apply(bug, query, key, value, mask.expand(sizes))
        return output

    return attention


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[AttentionCall]:
    """Calls of two steps; in the second, a sequence is padded on the left."""
    pytest.importorskip("transformers")
    out = tmp_path_factory.mktemp("fine_tuning")
    model = models.load("llama", size="tiny").roots[""]
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    tokens = torch.randint(2048, (2, 40), generator=torch.Generator().manual_seed(0))
    padding = torch.ones_like(tokens)
    padding[0, :7] = 0
    with record(model, out, backward=True):
        for mask in (None, padding):
            model(input_ids=tokens, attention_mask=mask, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return list(load(out))


@pytest.mark.parametrize(
    ("bug", "cause"),
    [
        ("diagonal", "the diagonal is wrong: each query sees one key too many"),
        ("stale keys", "keys are stale: those of an earlier call are used"),
        ("transpose", "the scores are transposed once too often"),
        ("scale", "grad_key is 0.08839 × the right one: the softmax scale is applied twice"),
        ("group", "grad_key of key head "),
        ("race", "runs on the same inputs differ in grad_query, grad_key"),
        ("blind rows", "grad_query has NaN or infinity in rows of queries that see no key"),
    ],
)
def test_bug_is_named(bug: str, cause: str, calls: list[AttentionCall]) -> None:
    STALE.clear()
    verdicts = [judge_gradients(call, mine(bug)) for call in calls]
    wrong = [verdict for verdict in verdicts if not verdict.passed]
    # Padding makes queries blind; for its mask, the model repeats the keys of a group itself.
    assert len(wrong) == (4 if bug in ("diagonal", "group", "blind rows") else 8)
    assert [verdict.cause[: len(cause)] for verdict in wrong] == [cause] * len(wrong)
    if bug == "group":
        text = r"(.* sums query heads \[([0-9])\] instead of \[\2, [0-9]\](; )?)+"
        assert all(re.fullmatch(text, verdict.cause) for verdict in wrong)
    assert f"cause: {cause}" in str(wrong[0])


def test_honest_kernel_of_a_user_is_right(calls: list[AttentionCall]) -> None:
    assert len(calls) == 8
    for call in calls:
        assert judge_gradients(call).passed
        for kernel in (mine(), "torch-math"):
            verdict = judge_gradients(call, kernel)
            assert verdict.passed, str(verdict)
            assert not verdict.unsteady


def fails(**options: object) -> torch.Tensor:
    raise NotImplementedError("no mask")


def test_kernel_without_gradients_is_refused(calls: list[AttentionCall]) -> None:
    for kernel, reason in (
        (torch.no_grad()(mine()), "cannot run this call: has no backward"),
        (lambda key, **options: mine()(key=key.detach(), **options), "returns no gradient of key"),
        (fails, "cannot run this call: no mask"),
    ):
        with pytest.raises(Error, match=reason):
            judge_gradients(calls[0], kernel)
    with pytest.raises(TypeError, match=r"call must be a call of ar\.load"):
        judge_gradients("calls")  # type: ignore[arg-type]
