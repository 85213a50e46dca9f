"""Each kernel has one fault, and the doctor names its cause and its place."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import pytest
import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import FEATURES
from replay.accuracy.reference import attention
from replay.diagnosis.captured import CAPTURED
from replay.diagnosis.derived import gathered
from replay.diagnosis.examine import Examined, examine
from replay.diagnosis.poison import poisoned
from replay.diagnosis.subject import Evidence, heads_of
from replay.isolation.process_state import ProcessState
from replay.kernels.registry import Kernel, find
from replay.rows.errors_of_output import AccuracyClass
from tests.factories import normal, random_call, settings
from tests.replay.diagnosis import faulty
from tests.replay.diagnosis.faulty import reading
from tests.variant_calls import in_float8, paged_call

BFLOAT16 = torch.bfloat16
SIZES: dict[str, Any] = {"batch": 2, "q_len": 40, "kv_len": 70}
MASK = normal(2, 1, 40, 70, seed=3) > -0.3
ADDED = torch.zeros(2, 1, 40, 70).masked_fill(~MASK, -math.inf)
SLOPED = ADDED - normal(2, 1, 40, 70, seed=5).abs()


def call(**changes: Any) -> AttentionCall:
    return random_call(**{**SIZES, **changes})


def larger(made: AttentionCall, **factors: float) -> AttentionCall:
    return made.with_tensors({name: getattr(made, name) * by for name, by in factors.items()})


def with_sink(made: AttentionCall, at: int) -> AttentionCall:
    """Return a call in which every query scores one key far above the others."""
    direction = torch.nn.functional.normalize(normal(32, seed=6), dim=0)
    key = made.key.clone()
    key[:, :, at] = direction * 30
    query = made.query + direction * 4
    return made.with_tensors({"query": query.to(made.dtype), "key": key.to(made.dtype)})


def with_outlier(made: AttentionCall) -> AttentionCall:
    key = made.key.clone()
    key[..., 5] += 60
    return made.with_tensors({"key": key})


def with_alternating_outlier(made: AttentionCall) -> AttentionCall:
    """Return a call with an outlier channel of mean 0, so that subtracting the mean has no
    effect."""
    key = made.key.clone()
    key[:, :, ::2, 5] += 60
    key[:, :, 1::2, 5] -= 60
    return made.with_tensors({"key": key})


def examined(
    attention: Callable[..., Tensor], made: AttentionCall, kind: AccuracyClass = "exact"
) -> Examined:
    faulty.forget()
    # Unwritten memory may hold the right answer of an earlier kernel.
    filled = poisoned(0.7) if attention is faulty.rows_unwritten else contextlib.nullcontext()
    with torch.no_grad(), filled:
        kernel = Kernel("kernel", attention, kind, features=frozenset(FEATURES))
        kernel = CAPTURED if attention is CAPTURED.attention else kernel
        return examine(kernel, made, settings(), ProcessState())


def evidence_of(*arguments: Any) -> Evidence:
    evidence = examined(*arguments).evidence
    assert evidence is not None
    return evidence


def misreading(name: str) -> Callable[..., Tensor]:
    return faulty.with_mask(faulty.READINGS[name])


def modulo(query: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    return query, *(each.repeat(1, 2, 1, 1) for each in others)


def joined(query: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Let queries see the keys and values of all sequences."""
    return query, *(each.transpose(0, 1).flatten(1, 2).expand(2, -1, -1, -1) for each in others)


def half_of_others(query: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Take half of the keys and values from another sequence."""
    return query, *(torch.cat((each[:, :, :35], each.flip(0)[:, :, 35:]), 2) for each in others)


def in_turn(query: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Take heads of key and value in turn from memory that holds all key heads first."""
    return query, *torch.cat(others, 1).unflatten(1, (-1, 2)).unbind(2)


def first_1000_again(query: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Take keys and values from the first again after the 1,000th."""
    return query, *(each[:, :, torch.arange(each.shape[2]) % 1000] for each in others)


def with_one_more_key(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Show one key of the second packed sequence to the first."""
    return faulty.right(query, key, value, ONE_MORE)


def has_other_lengths(query: Tensor, key: Tensor) -> bool:
    return query.shape[2] != key.shape[2]


HEALTHY = {
    "plain": call(),
    "masked": call(dtype=BFLOAT16, attn_mask=MASK),
    "added": call(attn_mask=SLOPED),
    "late sink": with_sink(call(), 60),
    "outlier channel": with_outlier(call(dtype=BFLOAT16)),
    "causal, grouped": call(q_heads=4, kv_heads=2, is_causal=True),
    "one query": call(q_len=1),
    "large": larger(call(dtype=BFLOAT16), query=4.0, key=4.0),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_correct_kernel_has_no_findings(name: str) -> None:
    assert examined(find("eager").attention, HEALTHY[name]) == Examined()


BRAIN = call(dtype=BFLOAT16)
LARGE = larger(BRAIN, query=80.0, key=80.0)
OUTLIER = with_outlier(BRAIN)
SQUARE = call(q_len=48, kv_len=48, attn_mask=normal(2, 1, 48, 48, seed=4) > -0.3)
ONE_CAUSAL = call(q_len=1, is_causal=True)
SINK = with_sink(call(), 60)
ENDS = torch.tensor([0, 16, 40], dtype=torch.int32)
PACKED = call(batch=1, kv_len=40, cu_seqlens_q=ENDS, cu_seqlens_k=ENDS)
ONE_MORE = torch.block_diag(torch.ones(16, 16), torch.ones(24, 24)).bool()
ONE_MORE[:16, 16] = True
SAME = torch.arange(1500).where(torch.arange(1500) != 1000, 0)
ONE_EQUAL = gathered(call(kv_len=1500), keys=SAME)
WIDE = call(head_dim=80)
GROUPED = call(q_heads=4, kv_heads=2)
ONE_OF_TWO = call(q_len=1, kv_len=2, attn_mask=torch.tensor([[False, True]]))
ZEROS = call().with_tensors({"output": torch.zeros(2, 2, 40, 32)})
CASES: dict[str, tuple[Callable[..., Tensor], AttentionCall, str]] = {
    "q·k past float16": (faulty.float16_scores, LARGE, "overflow"),
    "exp without a maximum": (faulty.no_maximum, larger(BRAIN, query=6.0, key=6.0), "overflow"),
    "NaN made 0": (faulty.black, LARGE, "overflow"),
    "scores clamped": (faulty.clamped_scores, larger(BRAIN, query=4.0, key=4.0), "overflow"),
    "values past float16": (faulty.float16_values, larger(BRAIN, value=1e5), "overflow"),
    "additive mask ignored": (misreading("ignored"), call(attn_mask=SLOPED), "mask-ignored"),
    "causal ignored": (faulty.without_options, call(is_causal=True), "mask-ignored"),
    "causal ignored by one query": (faulty.without_options, ONE_CAUSAL, "mask-ignored"),
    "inverted": (misreading("inverted"), call(attn_mask=MASK), "mask-misread"),
    "length": (misreading("length"), call(attn_mask=MASK), "mask-misread"),
    "length, one query": (misreading("length"), ONE_OF_TWO, "mask-misread"),
    "added": (misreading("added"), call(attn_mask=MASK), "mask-misread"),
    "multiplied": (faulty.multiplied, call(attn_mask=MASK), "mask-misread"),
    "shifted": (misreading("shifted"), call(attn_mask=MASK), "mask-misread"),
    "first batch": (misreading("first batch"), call(attn_mask=MASK), "mask-misread"),
    "transposed": (misreading("transposed"), SQUARE, "mask-misread"),
    "boolean": (misreading("not 0"), call(attn_mask=ADDED), "mask-misread"),
    "powers of 2": (misreading("log2"), call(attn_mask=SLOPED), "mask-misread"),
    "negated": (misreading("negated"), call(attn_mask=SLOPED), "mask-misread"),
    "changed": (faulty.scales_query, call(), "input-changed"),
    "unwritten": (faulty.rows_unwritten, call(), "output-unwritten"),
    "one buffer": (faulty.in_one_buffer, call(), "output-unwritten"),
    "recorded zeros": (CAPTURED.attention, ZEROS, "output-unwritten"),
    "bottom right": (faulty.bottom_right, call(is_causal=True), "causal-alignment"),
    "bottom right, one query": (faulty.bottom_right, ONE_CAUSAL, "causal-alignment"),
    "shifted diagonal": (faulty.without_itself, call(q_len=70, is_causal=True), "causal-alignment"),
    "by shape": (faulty.kept_by_shape, call(), "stale-graph"),
    "by address": (faulty.keys_kept_by_address, call(), "stale-graph"),
    "by the first element": (faulty.value_told_apart_by_its_first_element, call(), "stale-graph"),
    "captured memory": (faulty.first_memory, call(), "stale-graph"),
    "scale": (faulty.without_options, call(scale=0.3), "wrong-scale"),
    "other heads": (reading(modulo), GROUPED, "head-mapping"),
    "positions for heads": (faulty.swapped, call(q_len=70), "layout"),
    "read as BSHD": (reading(faulty.read_as_bshd), call(), "layout"),
    "written as BSHD": (faulty.written_as_bshd, call(), "layout"),
    "channels": (reading(lambda q, k, v: (q[..., :32], k[..., :32], v)), WIDE, "head-dim"),
    "columns": (faulty.wrong_from(64, 3), WIDE, "head-dim"),
    "sequences": (faulty.wrong_from(2, 0), call(batch=5), "too-large"),
    "heads": (faulty.wrong_from(5, 1), call(q_heads=7), "too-large"),
    "queries": (faulty.wrong_from(29, 2), call(), "too-large"),
    "keys": (reading(lambda q, k, v: (q, k[:, :, :45], v[:, :, :45])), call(), "too-large"),
    "next": (reading(lambda *each: [t.roll(1, 0) for t in each]), call(), "other-sequence"),
    "next keys": (reading(lambda q, k, v: (q, k.roll(2, 0), v)), call(batch=3), "other-sequence"),
    "all sequences": (reading(joined), call(), "other-sequence"),
    "packed sequences": (faulty.without_options, PACKED, "other-sequence"),
    "key after the end": (with_one_more_key, PACKED, "other-sequence"),
    "half of the keys": (reading(half_of_others), call(), "other-sequence"),
    "keys and values in turn": (reading(in_turn), call(), "layout"),
    "scale of 96 channels": (faulty.scaled_by((80 / 96) ** 0.5), WIDE, "head-dim"),
    "other than self-attention": (faulty.wrong_if(has_other_lengths), call(), "unknown"),
    "keys in turn": (reading(first_1000_again), ONE_EQUAL, "too-large"),
    "keys reversed": (reading(lambda q, k, v: (q, k.flip(2), v)), call(), "unknown"),
    "as of any small scale": (reading(lambda q, *kv: (q * 0, *kv)), call(), "unknown"),
    "one row": (faulty.one_row_off, call(), "unknown"),
    "flickering": (faulty.wrong_once, call(), "unknown"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_named(name: str) -> None:
    attention, made, cause = CASES[name]
    evidence = evidence_of(attention, made)
    assert evidence.cause == cause
    assert "untested" not in evidence.numbers


STRIDED = call(attn_mask=(normal(1, 1, 70, 40, seed=3) > -0.3).mT).with_tensors(
    {
        name: normal(2, length, 2, 32, seed=length + at).transpose(1, 2)
        for at, (name, length) in enumerate({"query": 40, "key": 70, "value": 70}.items())
    }
)
KV = ("key", "value")
EXPANDED = call(q_heads=4).with_tensors(
    {name: normal(2, 1, 70, 32, seed=at).expand(2, 4, 70, 32) for at, name in enumerate(KV)}
)


CONDITIONS: dict[str, tuple[Callable[..., Any], AttentionCall]] = {
    "head-dim": (lambda q, k: q.shape[3] % 32, WIDE),
    "kv-heads": (lambda q, k: q.shape[1] != k.shape[1], GROUPED),
    "too-large": (lambda q, k: k.shape[2] > 45, call()),
    "odd-length": (lambda q, k: k.shape[2] % 16, STRIDED),
}


@pytest.mark.parametrize("cause", CONDITIONS)
@pytest.mark.parametrize("fault", ["is wrong", "raises"])
def test_condition_of_a_wrong_output_or_an_exception_is_named(fault: str, cause: str) -> None:
    condition, made = CONDITIONS[cause]
    evidence = evidence_of(faulty.wrong_if(condition, raises=fault == "raises"), made)
    assert (evidence.cause, evidence.sentence.startswith(f"it {fault} ")) == (cause, True)
    assert (": ValueError: cannot read (2, " in evidence.sentence) == (fault == "raises")
    assert (evidence.place is None) == (fault == "raises")


TURNS = chain([True, True, True, False, True], repeat(False))
EXCEPTIONS: dict[str, Callable[..., Tensor]] = {
    "always": lambda **_: 1 / 0,
    "wrong too": lambda **a: 1 / 0 if a["key"].shape[2] == 70 else faulty.one_row_off(**a),
    "another": lambda **a: (
        1 / 0 if (n := a["key"].shape[2]) == 70 else [][1] if n % 16 else faulty.right(**a)
    ),
    "at random": lambda **a: 1 / 0 if next(TURNS) else faulty.right(**a),
}


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_exception_without_a_single_condition_is_unknown(name: str) -> None:
    runs = []

    def kernel(**arguments: Any) -> Tensor:
        runs.append(arguments)
        return EXCEPTIONS[name](**arguments)

    evidence = evidence_of(kernel, GROUPED)
    assert evidence.cause == "unknown"
    assert ("it raises in some calls and" in evidence.sentence) == (name == "at random")
    assert ": ZeroDivisionError: division by zero" in evidence.sentence
    assert name != "always" or len(runs) <= 12


def raises_for_strides_of_mask(attn_mask: Tensor, **others: Any) -> Tensor:
    return 1 / 0 if attn_mask.stride(-1) != 1 else faulty.right(**others, attn_mask=attn_mask)


@pytest.mark.parametrize(
    "name", ["query", "key", "value", "attn_mask", "raises", "expanded", "BSHD"]
)
def test_tensor_whose_strides_are_ignored_is_named(name: str) -> None:
    if name == "BSHD":
        made = AttentionCall(*normal(2, 40, 3, 2, 32).transpose(1, 3).unbind(2))
        evidence = evidence_of(faulty.wrong_if(lambda q, k: k.stride(2) != 64), made)
        assert (evidence.cause, evidence.numbers["order"]) == ("strides", "(B, S, H, D)")
        return
    made, tensor = (EXPANDED, "value") if name == "expanded" else (STRIDED, name)
    kernel = faulty.reads_as_dense(tensor)
    if name == "raises":
        kernel, tensor = raises_for_strides_of_mask, "attn_mask"
    evidence = evidence_of(kernel, made)
    assert (evidence.cause, evidence.numbers["tensors"]) == ("strides", [tensor])
    assert ("memory in the order (B, H, S, D)" in evidence.sentence) == (tensor != "attn_mask")


@pytest.mark.parametrize("share", [0.5, 0.9])
@pytest.mark.parametrize("made", [call(), LARGE, OUTLIER, SINK, GROUPED, STRIDED, EXPANDED])
def test_no_experiment_explains_an_error_that_comes_and_goes(
    made: AttentionCall, share: float
) -> None:
    for seed in range(4):
        evidence = examined(faulty.racing(seed, share), made).evidence
        assert evidence is None or evidence.cause == "unknown"


def test_limit_on_keys_in_pages_is_named() -> None:
    def first_keys(query, key, value, *others, seqused_k, **options):
        paged = {name: options[name] for name in ("page_table", "scale")}
        made = AttentionCall(query, key, value, seqused_k=seqused_k.clamp(max=50), **paged)
        return attention(made, torch.float32)

    evidence = evidence_of(first_keys, paged_call([17, 140], 16))
    assert evidence.cause == "too-large"
    assert evidence.numbers["limit"] == 50


def test_heads_are_told_from_sequences() -> None:
    for batch, wrong, text in (
        (1, [0, 3], "2 of 4 heads"),
        (2, [4, 5, 7], "3 of 4 heads of sequence 1 alone, of 2 sequences"),
        (2, [0, 7], "2 of 8 heads (2 sequences of 4 heads)"),
    ):
        rows = torch.zeros(4 * batch, 9, dtype=torch.bool)
        rows[wrong, 3:5] = True
        assert heads_of(rows.unflatten(0, (batch, 4))) == text


def test_the_head_is_named() -> None:
    for kernel, made in ((faulty.one_row_off, call()), (faulty.in_head_1, LARGE)):
        place = evidence_of(kernel, made).place
        assert place is not None
        assert place.head == 1


def test_evidence_has_the_numbers() -> None:
    for kernel, made, expected in (
        (faulty.int8_keys, OUTLIER, {"channel": 5, "way": "centred"}),
        (
            faulty.int8_keys,
            with_alternating_outlier(call(dtype=BFLOAT16)),
            {"channel": 5, "way": "removed"},
        ),
        (faulty.not_rescaled, SINK, {"key": 60}),
        (faulty.tail_of_keys_dropped, call(), {"multiple": 16, "lengths": "keys"}),
    ):
        evidence = evidence_of(kernel, made)
        assert evidence.numbers | expected == evidence.numbers


LOG2_E = 1 / math.log(2)


@pytest.mark.parametrize(
    ("factor", "name", "dtype"),
    [
        (1.46, "1.46", torch.float32),
        (1.4, "1.4", BFLOAT16),
        (0.667, "0.667", torch.float32),
        (0.5, "0.5", torch.float32),  # near 1/√D
        (LOG2_E, "log2 e", BFLOAT16),
    ],
)
def test_factor_is_named_only_if_it_fits(factor: float, name: str, dtype: torch.dtype) -> None:
    """Factors 1 % to 4 % from log2 e = 1.4427 change outputs as little as 8-bit rounding does."""
    evidence = evidence_of(faulty.scaled_by(factor), call(scale=0.35, dtype=dtype))
    assert evidence.cause == "wrong-scale"
    times = f"times {name}:" if name == "log2 e" else f"which is {name} times as large"
    assert times in evidence.sentence
    kernel = faulty.with_mask(lambda mask: torch.where(mask == 0, mask, mask * factor))
    evidence = evidence_of(kernel, call(attn_mask=SLOPED, dtype=dtype))
    assert evidence.cause == "mask-misread"
    assert evidence.sentence == f"the additive mask is multiplied by {name}"


def test_unregistered_8_bit_kernel_is_recognised() -> None:
    made = call(dtype=BFLOAT16)
    evidence = evidence_of(faulty.float8_values, made)
    assert evidence.numbers["passes_as_quantised"]
    assert examined(faulty.float8_values, made, "quantised") == Examined()


@pytest.mark.parametrize("names", [("key", "value"), ("query", "key", "value")], ids=len)
def test_scaled_values_are_diagnosed(names: tuple[str, ...]) -> None:
    made = in_float8(random_call(q_heads=4, kv_heads=2, q_len=40, kv_len=70), *names)
    right = find("eager").attention

    def unscaled(*tensors: Tensor, value_scale: Tensor, **others: Any) -> Tensor:
        return right(*tensors, value_scale=torch.ones_like(value_scale), **others)

    evidence = evidence_of(unscaled, made)
    assert evidence.sentence == "the output equals attention without the value's scale"
    every = evidence_of(lambda *given, **named: right(*given, **named).roll(1, 1) + 0.1, made)
    assert (every.cause, every.numbers.get("untested")) == ("unknown", None)


def test_gathered_rows_take_their_mask_along() -> None:
    made = call(attn_mask=MASK)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(attention(gathered(made, keys=order)), attention(made))
    queries = torch.tensor([5, 5, 1])
    torch.testing.assert_close(
        attention(gathered(made, queries=queries)), attention(made)[:, :, queries]
    )


HIDING = torch.arange(70) < 60


@pytest.mark.parametrize("name", ["eager", "torch-math", "captured"])
@pytest.mark.parametrize(
    ("tensor", "key", "cause", "sentence"),
    [
        ("value", 5, "nonfinite-input", "finite output: value 32 NaN (visible)"),
        ("query", 5, "nonfinite-input", "finite output: query 32 NaN (visible)"),
        ("key", 65, "nonfinite-hidden", "40 of 160 rows are NaN or infinite because of inputs"),
    ],
)
def test_nonfinite_inputs_are_named(
    tensor: str, key: int, cause: str, sentence: str, name: str
) -> None:
    made = call(attn_mask=HIDING.expand(40, 70))
    getattr(made, tensor)[0, 0, key] = math.nan
    # The math backend multiplies hidden values by zero; `eager` does not read them.
    made = replace(made, output=find("torch-math").attention(**made.arguments()))
    kernel = CAPTURED if name == "captured" else find(name)
    evidence = examined(kernel.attention, made).evidence
    if name == "eager" and cause == "nonfinite-hidden":
        assert evidence is None
    else:
        assert evidence is not None
        assert (evidence.cause, sentence in evidence.sentence) == (cause, True), evidence.sentence


NO_KEY_SEEN = {
    "no keys": call(kv_len=0),
    "no keys, mask": call(kv_len=0, attn_mask=torch.ones(40, 0, dtype=torch.bool)),
    "no keys, causal": call(kv_len=0, is_causal=True),
    "all masked": call(attn_mask=torch.zeros(40, 70, dtype=torch.bool)),
}


@pytest.mark.parametrize(
    ("number", "what", "kind"), [(math.nan, "NaN", "exact"), (1.0, "something else", "quantised")]
)
@pytest.mark.parametrize("name", NO_KEY_SEEN)
def test_outputs_of_queries_without_keys_are_checked(
    name: str, number: float, what: str, kind: AccuracyClass
) -> None:
    def fills(query: Tensor, **arguments: Any) -> Tensor:
        return torch.full_like(query, number)

    assert examined(find("eager").attention, NO_KEY_SEEN[name]) == Examined()
    found = evidence_of(fills, NO_KEY_SEEN[name], kind)
    where = "queries whose keys are all masked" if name == "all masked" else "the call has no keys"
    assert where in found.sentence
    assert f"get {what}, where SDPA returns zeros" in found.sentence
