"""Every output of a block differs from every other, and a judge knows all of them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.accuracy.quantised import to_fp8
from replay.accuracy.reference import attention, same_dtype
from replay.accuracy.thresholds import ExactThresholds
from replay.accuracy.verdict import Expected
from replay.isolation.block_inputs import BlockInputs
from replay.isolation.judge import LocalJudge
from replay.rows.errors_of_output import AccuracyClass
from tests.factories import normal, random_call
from tests.variant_calls import CALLS as BEYOND_SDPA
from tests.variant_calls import LIBRARY_CALLS, mla_call

HALF = torch.bfloat16


def _expanded() -> AttentionCall:
    call = random_call(q_heads=4, kv_len=40)
    shared = {name: getattr(call, name)[:, :1].expand(-1, 4, -1, -1) for name in ("key", "value")}
    return call.with_tensors(shared)


def _of_one_tensor() -> AttentionCall:
    call = random_call(kv_len=40, q_heads=4)
    return replace(call, value=call.key)


CALLS: dict[str, AttentionCall] = {
    **BEYOND_SDPA,
    **{f"half {name}": call for name, call in LIBRARY_CALLS.items()},
    "plain": random_call(),
    "one key": random_call(batch=2, q_heads=64, q_len=1, kv_len=1),
    "causal": random_call(q_len=100, kv_len=100, is_causal=True, dtype=HALF),
    "decode": random_call(q_len=1, kv_len=900, q_heads=8, kv_heads=2, dtype=torch.float16),
    "float mask": random_call(kv_len=40, attn_mask=normal(9, 40, seed=5)),
    "bool mask": random_call(kv_len=40, attn_mask=normal(1, 1, 9, 40, seed=5) < 1),
    "float64": random_call(dtype=torch.float64),
    "value width 7": random_call(head_dim=64, v_head_dim=7),
    "MLA": mla_call(),
    "one tensor": _of_one_tensor(),
    "shared heads": _expanded(),
}


def _copies(call: AttentionCall) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in call.tensors().items()}


def _same(call: AttentionCall, tensors: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, tensors[name]) for name, tensor in call.tensors().items())


def _block(call: AttentionCall, calls: int, kernel: Callable[[], Tensor]) -> list[Tensor]:
    """Return the outputs of a block of calls."""
    inputs, outputs = BlockInputs(call), []
    inputs.draw(5, calls)
    for number in range(calls):
        inputs.apply(number, outputs[-1] if outputs else None)
        outputs.append(kernel())
    inputs.restore()
    return outputs


def _judged(call: AttentionCall, accuracy_class: AccuracyClass, outputs: list[Tensor]) -> str:
    return LocalJudge(call).judge_block("kernel", accuracy_class, 5, outputs, 8, None)


@pytest.mark.parametrize("name", CALLS)
def test_every_output_row_changes_from_call_to_call(name: str) -> None:
    call, other = CALLS[name], CALLS[name].to("cpu")
    inputs, others, recorded = BlockInputs(call), BlockInputs(other), _copies(call)
    last, changed, output = Expected.of(call), [], None
    inputs.draw(3, 6)
    others.draw(3, 6)
    for number in range(6):
        inputs.apply(number, output)
        others.apply(number, output)
        assert _same(other, call.tensors())
        now, output = Expected.of(call), same_dtype(call)[0]
        inputs.restore()
        assert _same(call, recorded)
        limits = []
        for each in (now, last):
            limits.append(each.tolerance.rows.limits(ExactThresholds()))
        distance = torch.linalg.vector_norm(now.reference - last.reference, dim=-1)
        changed.append((distance > torch.maximum(*limits))[now.spread > 0])
        last = now
    assert torch.cat(changed).float().mean() >= 0.99


@pytest.mark.parametrize("name", CALLS)
def test_judge_of_a_block_accepts_right_outputs_and_rejects_late_ones(name: str) -> None:
    call, recorded = CALLS[name], _copies(CALLS[name])
    outputs = _block(call, 4, lambda: same_dtype(call)[0])
    assert _judged(call, "exact", outputs) == ""
    assert _judged(call, "exact", [*outputs[1:], outputs[0]])
    assert _same(call, recorded)


def _scaled(old: Tensor, right: Tensor) -> Tensor:
    return old * (right * old).sum() / (old * old).sum()


def _rank_one(old: Tensor, right: Tensor) -> Tensor:
    left, sizes, columns = torch.linalg.svd((right - old).double(), full_matrices=False)
    return old + (left[..., :1] * sizes[..., None, :1] @ columns[..., :1, :]).to(old)


def _columns_permuted(old: Tensor, right: Tensor) -> Tensor:
    """Give each column of the right output the old column that is nearest to it."""
    nearest = torch.cdist(right.mT.double(), old.mT.double()).argmin(-1)
    return old.gather(-1, nearest[:, :, None].expand_as(old))


REPAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda old, right: old,
    "sign": lambda old, right: -old,
    "best scale": _scaled,
    "best column scales": lambda old, right: (
        old * (right * old).sum(2, True) / (old**2).sum(2, True)
    ),
    "nearest columns": _columns_permuted,
    "best rank-one term": _rank_one,
}


@pytest.mark.parametrize("accuracy_class", ["exact", "quantised"])
@pytest.mark.parametrize("repair", [*REPAIRS, "cached softmax"])
def test_repaired_old_output_is_wrong(repair: str, accuracy_class: AccuracyClass) -> None:
    call = random_call(q_heads=4, kv_heads=2, q_len=64, kv_len=128, head_dim=64, dtype=HALF)
    old, query = attention(call, torch.float32), call.query.clone()

    def repaired() -> Tensor:
        if repair == "cached softmax":
            return attention(replace(call, query=query), torch.float32).to(HALF)
        return REPAIRS[repair](old, attention(call, torch.float32)).to(HALF)

    assert _judged(call, accuracy_class, _block(call, 4, repaired))


def _eight_bit(tensor: Tensor) -> Tensor:
    scale = tensor.abs().amax((2, 3), keepdim=True) / 127
    return (tensor / scale).round() * scale


@pytest.mark.parametrize("accuracy_class", ["exact", "quantised"])
@pytest.mark.parametrize("kept", ["key", "value", ""])
@pytest.mark.parametrize("q_len", [1, 100])
def test_kept_conversion_is_stale(q_len: int, kept: str, accuracy_class: AccuracyClass) -> None:
    call = random_call(q_heads=4, kv_heads=2, q_len=q_len, kv_len=500, head_dim=64, dtype=HALF)

    def converted(name: str) -> Tensor:
        tensor: Tensor = getattr(call, name)
        is_eight_bit = accuracy_class == "quantised" or name == kept
        return _eight_bit(tensor.float()).to(HALF) if is_eight_bit else tensor

    old = {kept: converted(kept)} if kept else {}

    def stale() -> Tensor:
        now = call.with_tensors({name: converted(name) for name in ("key", "value")} | old)
        return attention(now, torch.float32).to(HALF)

    assert bool(_judged(call, accuracy_class, _block(call, 16, stale))) == bool(kept)


def test_calls_of_a_block_cannot_be_computed_together() -> None:
    """Inputs follow from the output before, and a kernel's choice of last bits changes nothing."""
    call, outputs = random_call(q_heads=4, q_len=64, kv_len=64, dtype=HALF), []
    inputs = BlockInputs(call)
    inputs.draw(5, 4)
    for number in range(4):
        inputs.apply(number, None)
        bits = same_dtype(call)[0].view(torch.int16) & ~1
        outputs.append(bits.view(HALF))
    inputs.restore()
    assert "call 0" not in _judged(call, "exact", outputs) != ""


def test_8_bit_keys_beside_a_massive_activation_stay_right() -> None:
    """A sink that loses its weight would leave the keys that share its scale."""
    call = random_call(q_heads=4, q_len=64, kv_len=64, head_dim=64, dtype=HALF)
    call.key[..., 3] += 200
    call.key[:, :, 0] *= 0.05
    call.key[:, :, 0, 7] += 40
    call.query[..., 3] /= 20
    call.query[..., 7] += 3

    def eight_bit() -> Tensor:
        key = call.key.float() - call.key.float().mean(2, keepdim=True)
        value = to_fp8(call.value.float(), call.value.float().abs().amax(2, keepdim=True))
        return attention(replace(call, key=_eight_bit(key), value=value), torch.float32).to(HALF)

    assert _judged(call, "quantised", _block(call, 20, eight_bit)) == ""


def test_float8_cache_is_changed_and_restored() -> None:
    call = random_call(q_len=100, kv_len=64)
    kept = {name: getattr(call, name).to(torch.float8_e4m3fn) for name in ("key", "value")}
    call = call.with_tensors(kept)
    recorded, inputs = {name: tensor.float() for name, tensor in kept.items()}, BlockInputs(call)
    inputs.draw(3, 2)
    inputs.apply(1, None)
    assert not torch.equal(call.value.float(), recorded["value"])
    inputs.restore()
    assert all(torch.equal(getattr(call, name).float(), recorded[name]) for name in recorded)
