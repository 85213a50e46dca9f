"""The shims in `benchmarks/public_tests` translate the libraries' arguments correctly."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import results
from benchmarks.public_tests import answers, running
from benchmarks.public_tests.answers import Answers
from benchmarks.public_tests.flash_attn_shim import FlashAttn
from benchmarks.public_tests.flashinfer_shim import FlashInfer
from benchmarks.public_tests.running import Outcome
from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import FEATURES, VARIANT_TENSORS, AttentionVariant
from replay.accuracy import reference
from replay.kernels.registry import Kernel
from tests import flash_attn_stand_in as stand_in

ROOT = Path(__file__).parent.parent


def _attention(**given: Any) -> Tensor:
    """Compute the attention of any call by the formula."""
    variant = AttentionVariant(
        **{name: given.pop(name) for name in vars(AttentionVariant()) if name in given}
    )
    tensors = {name: given.pop(name, None) for name in VARIANT_TENSORS}
    call = AttentionCall(**given, **tensors, variant=variant)
    return reference.attention(call).to(call.dtype)


@pytest.fixture(params=[frozenset(FEATURES), FEATURES.keys() - {"packed"}], ids=["all", "unpacked"])
def shims(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    kernel = Kernel("any", _attention, features=frozenset(request.param))
    monkeypatch.setattr(answers, "find", lambda name: kernel)
    ours = Answers("any")
    return SimpleNamespace(answers=ours, flashinfer=FlashInfer(ours))


def _random(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def test_packed_tensors_of_flash_attn() -> None:
    ours, options = FlashAttn(), {"causal": True, "window_size": (4, 0), "softmax_scale": 0.3}
    q, kv, qkv = _random(2, 7, 4, 8), _random(2, 9, 2, 2, 8), _random(2, 7, 3, 4, 8)
    torch.testing.assert_close(
        ours.flash_attn_kvpacked_func(q, kv, 0.0, **options, deterministic=True),
        stand_in.flash_attn_func(q, *kv.unbind(2), **options),
    )
    torch.testing.assert_close(
        ours.flash_attn_qkvpacked_func(qkv, **options),
        stand_in.flash_attn_func(*qkv.unbind(2), **options),
    )
    starts, keys = (torch.tensor(each, dtype=torch.int32) for each in ([0, 3, 14], [0, 5, 18]))
    packed = (starts, keys, 11, 13)
    torch.testing.assert_close(
        ours.flash_attn_varlen_kvpacked_func(q.flatten(0, 1), kv.flatten(0, 1), *packed, 0.0),
        stand_in.flash_attn_varlen_func(q.flatten(0, 1), *kv.flatten(0, 1).unbind(1), *packed),
    )
    torch.testing.assert_close(
        ours.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), starts, 11),
        stand_in.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), starts, 11),
    )
    assert ours.calls == 4


def test_a_refused_call_skips_the_test() -> None:
    ours, cache = FlashAttn(), _random(1, 3, 2, 8)
    with pytest.raises(pytest.skip.Exception, match="ALiBi"):
        ours.flash_attn_with_kvcache(cache, cache, cache, alibi_slopes=torch.ones(2))
    with pytest.raises(TypeError, match="'new_feature'"):
        ours.flash_attn_func(cache, cache, cache, new_feature=True)
    assert ours.calls == 0


def _expected(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, left: int = -1, cap: float = 0.0
) -> Tensor:
    """Compute the attention of one sequence (S, H, D)."""
    return stand_in.attend(q, k, v, None, causal, (left, -1), cap)


FLASHINFER_OPTIONS = ({"window_left": 2}, {"logits_soft_cap": 5.0})


def _wanted(options: dict[str, Any]) -> dict[str, Any]:
    names = {"window_left": "left", "logits_soft_cap": "cap", "causal": "causal"}
    return {names[name]: value for name, value in options.items()}


@pytest.mark.parametrize("options", FLASHINFER_OPTIONS, ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_single(shims: SimpleNamespace, layout: str, options: dict[str, Any]) -> None:
    q, k, v = _random(3, 4, 8), _random(9, 2, 8), _random(9, 2, 8) + 1
    keys = (k, v) if layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
    ours = shims.flashinfer
    torch.testing.assert_close(
        ours.single_decode_with_kv_cache(q[-1], *keys, layout, **options),
        _expected(q[-1:], k, v, **_wanted(options))[0],
    )
    torch.testing.assert_close(
        ours.single_prefill_with_kv_cache(q, *keys, kv_layout=layout, causal=True, **options),
        _expected(q, k, v, causal=True, **_wanted(options)),
    )
    mask = torch.ones(3, 9, dtype=torch.bool).tril(6)
    torch.testing.assert_close(
        ours.single_prefill_with_kv_cache(q, k, v, custom_mask=mask),
        _expected(q, k, v, causal=True),
    )
    with pytest.raises(pytest.skip.Exception, match="another dtype"):
        ours.single_decode_with_kv_cache(q[-1], k.half(), v.half())


@pytest.mark.parametrize(
    ("q_lens", "layout", "options"),
    [
        ((1, 1), "NHD", {"window_left": 2}),
        ((1, 1), "HND", {}),
        ((3, 3), "HND", {"logits_soft_cap": 5.0}),
        ((2, 4), "NHD", {"window_left": 2}),
    ],
)
def test_pages(
    shims: SimpleNamespace, q_lens: tuple[int, int], layout: str, options: dict[str, Any]
) -> None:
    pool = _random(6, 2, 4, 2, 8)  # (pages, key and value, tokens, heads, D)
    indptr, indices = torch.tensor([0, 1, 4]), torch.tensor([5, 2, 0, 3])
    last = torch.tensor([4, 3])
    sequences = [pool[[5]], pool[[2, 0, 3]]]
    keys, values = (
        [each[:, n].flatten(0, 1)[:length] for each, length in zip(sequences, (4, 11), strict=True)]
        for n in (0, 1)
    )
    starts = torch.tensor([0, q_lens[0], sum(q_lens)], dtype=torch.int32)
    q = _random(sum(q_lens), 4, 8)
    decodes = q_lens == (1, 1)
    classes = shims.flashinfer.wrappers()
    kind = "Decode" if decodes else "Prefill"
    wrapper = classes[f"Batch{kind}WithPagedKVCacheWrapper"](q, layout)
    pages = () if decodes else (starts,)
    sizes = (4, 2, 8, 4)
    more = {} if decodes else {"causal": True}
    wrapper.plan(*pages, indptr, indices, last, *sizes, **more, **options)
    if "packed" not in shims.answers.kernel.features and q_lens == (2, 4):
        with pytest.raises(pytest.skip.Exception, match="packed"):
            wrapper.run(q, pool)
        return
    cache = pool if layout == "NHD" else pool.transpose(2, 3)
    expected = torch.cat(
        [
            _expected(part, key, value, **more, **_wanted(options))
            for part, key, value in zip(q.split(q_lens), keys, values, strict=True)
        ]
    )
    torch.testing.assert_close(wrapper.run(q, cache), expected)
    out = torch.empty_like(q)
    output, lse = wrapper.run(q, cache.unbind(1), out=out, return_lse=True)
    assert output is out
    torch.testing.assert_close(out, expected)
    assert lse.shape == q.shape[:2]
    assert lse.isnan().all()


@pytest.mark.slow
def test_outcomes() -> None:
    q, ours = _random(1, 3, 2, 8).requires_grad_(), FlashAttn()

    def of(test: Callable[..., None]) -> Outcome:
        return running.run(test, {}, ours)

    def passes() -> None:
        output = ours.flash_attn_func(q, q, q)
        (gradient,) = torch.autograd.grad(output, q, output)
        assert gradient.ne(0).any()

    def fails() -> None:
        print("Output max diff: 3")
        assert ours.flash_attn_func(q, q, q).sum() is None, "far off"

    def refuses() -> None:
        ours.flash_attn_func(q, q, q, 0.17)

    def grows() -> None:
        passes()
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")

    assert of(passes) == Outcome("passed")
    failed = of(fails)
    assert failed.result == "failed"
    assert "far off" in failed.sentence
    assert failed.sentence.endswith("Output max diff: 3")
    assert of(refuses) == Outcome("skipped", "dropout_p: there is no kernel for dropout")
    assert of(grows) == Outcome("skipped", "out of memory")
    assert of(lambda: None) == Outcome("skipped", "the kernel was not called")
    never = pytest.mark.skipif(True, reason="on Tuesdays")(passes)
    assert of(never) == Outcome("skipped", "on Tuesdays")
    assert torch.autograd.grad((q * 2).sum(), q)[0].eq(2).all()


CHECKOUT = """
import pytest, torch
import flashinfer
from flashinfer.quantization import anything
from flashinfer.utils import has_flashinfer_jit_cache

@pytest.mark.parametrize("soft_cap", [1.0, 30.0])
@pytest.mark.parametrize("seq_len", [1, 9, 33001])
def test_single_decode_logits_soft_cap(seq_len, soft_cap):
    q = torch.randn(4, 16, device="cuda:0", dtype=torch.float16)
    k = torch.randn(seq_len, 2, 16, device="cuda:0", dtype=torch.float16)
    if seq_len == 1 and soft_cap == 1.0:
        anything()
    o = flashinfer.single_decode_with_kv_cache(q, k, k, logits_soft_cap=soft_cap)
    keys = k.float().repeat_interleave(2, 1)
    scores = torch.einsum("hd,khd->hk", q.float(), keys) / 4
    weights = (soft_cap * torch.tanh(scores / soft_cap)).softmax(-1)
    expected = torch.einsum("hk,khd->hd", weights, keys).to(q)
    torch.testing.assert_close(o, expected + (seq_len == 9), rtol=1e-2, atol=1e-2)
"""


@pytest.mark.slow
def test_a_checkout_s_test_is_run_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "tests" / "attention" / "test_logits_cap.py"
    file.parent.mkdir(parents=True)
    file.write_text(CHECKOUT)
    (tmp_path / "COMMIT").write_text("0123456789abcdef\n")
    out = tmp_path / "out.csv"
    command = [sys.executable, "-m", "benchmarks.public_tests", "--flashinfer", str(tmp_path)]
    command += ["--device", "cpu", "--largest", "100", "--processes", "1", "--out", str(out)]
    command += ["--only", "test_single_decode_logits_soft_cap"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 1, ran.stderr
    (line,) = results.read(out)
    assert line["version"] == "0123456789ab"
    assert line["kernel"] == "triton-decode"
    assert [line[each] for each in ("passed", "failed", "skipped")] == ["1", "2", "1"]
    assert line["reasons"] == "flashinfer.quantization.anything is not attention (1)"
    assert "not close" in ran.stdout
