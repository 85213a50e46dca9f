"""The adapters of FlashAttention 2, 3 and 4 call stand-ins correctly (see conftest).

The stand-ins have the parameters of flash-attn 2.8, of `hopper/`'s
`flash_attn_interface.py`, and of flash-attn-4 4.0.0b36 (`flash_attn/cute/interface.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.attention
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from replay.accuracy.verdict import Expected
from replay.kernels.adapters import fa3, torch_activated
from replay.kernels.registry import catalogue
from tests.factories import random_call
from tests.replay.kernels.kinds import (
    CAPPED,
    DENSE,
    KINDS,
    LENGTHS,
    MASKED,
    PACKED,
    REFUSED,
    SINKS,
    VARIANTS,
    call_of,
    cases,
    judge_call,
    verify,
    verify_variants,
)
from tests.replay.kernels.stand_ins import flash_attention, parameters
from tests.variant_calls import LIBRARY_CALLS, MLA, mla_call

Install = Callable[..., ModuleType]
Unavailable = Callable[..., "str | None"]


@pytest.fixture
def flash_attn(install: Install) -> None:
    how = "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0"

    @parameters(
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, "
        f"{how}, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None"
    )
    def flash_attn_varlen_func(given: SimpleNamespace) -> Tensor:
        assert given.block_table is None or given.k.shape[1] % 256 == 0
        return flash_attention(given)

    @parameters(
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        f"cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, {how}"
    )
    def flash_attn_with_kvcache(given: SimpleNamespace) -> Tensor:
        assert given.k is given.v is None
        assert given.block_table is None or given.k_cache.shape[1] % 256 == 0
        given.k, given.v = given.k_cache, given.v_cache
        return flash_attention(given)

    install(
        "flash_attn",
        version=("flash-attn", "2.8.3"),
        flash_attn_func=parameters(f"q, k, v, dropout_p=0.0, {how}")(flash_attention),
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=flash_attn_with_kvcache,
    )


@pytest.fixture
def flash_attn_interface(install: Install, variant: str) -> None:
    how = "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0"

    def run(given: SimpleNamespace) -> Any:
        if vars(given).get("qv") is not None:
            given.q = torch.cat([given.qv, given.q], dim=-1)
            given.k_cache = torch.cat([given.v_cache, given.k_cache], dim=-1)
        if given.q.dtype == torch.float8_e4m3fn:
            names = [name for name in ("q", "k", "v", "k_cache", "v_cache") if name in vars(given)]
            vars(given).update({name: dequantised(given, name) for name in names})
        output = flash_attention(given)
        return output if variant == "a tensor" else (output, torch.empty(0))

    scales = "q_descale=None, k_descale=None, v_descale=None"

    install(
        "flash_attn_interface",
        version=("flash_attn_3", "3.0.0b1"),
        flash_attn_func=parameters(f"q, k, v, {how}, {scales}")(run),
        flash_attn_varlen_func=parameters(
            "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, seqused_k=None, "
            + how
        )(run),
        flash_attn_with_kvcache=parameters(
            "q, k_cache, v_cache, *, qv=None, cache_seqlens=None, page_table=None, "
            f"cu_seqlens_q=None, max_seqlen_q=None, {how}, {scales}"
        )(run),
    )


def dequantised(given: SimpleNamespace, name: str) -> Tensor:
    """Return a tensor in bfloat16; its scales have a row for each sequence."""
    named = vars(given)
    tensor, descale = named[name], named[f"{name[0]}_descale"]
    offsets, key = named.get("cu_seqlens_q"), named["k" if "k" in named else "k_cache"]
    sequences = len(given.q) if offsets is None else len(offsets) - 1
    assert tensor.dtype == torch.float8_e4m3fn
    assert (descale.dtype, *descale.shape) == (torch.float32, sequences, key.shape[-2])
    of_head = descale.repeat_interleave(tensor.shape[-2] // key.shape[-2], 1)[:, None, :, None]
    of_tensor = of_head if len(tensor) == sequences else of_head[0, 0]
    return (tensor.to(torch.bfloat16) * of_tensor).to(torch.bfloat16)


@pytest.fixture
def flash_attn_4(install: Install) -> None:
    how = (
        "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, "
        "softcap=0.0"
    )

    def run(given: SimpleNamespace) -> tuple[Tensor, None]:
        assert given.qv is None
        assert -1 not in given.window_size, "None stands for no limit"
        assert given.learnable_sink is None or given.learnable_sink.dtype == torch.bfloat16
        return flash_attention(given), None

    @parameters(
        "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
        f"max_seqlen_k=None, *, seqused_k=None, page_table=None, {how}"
    )
    def flash_attn_varlen_func(given: SimpleNamespace) -> tuple[Tensor, None]:
        assert given.cu_seqlens_q is not None
        assert (given.cu_seqlens_k is None) == (given.page_table is not None)
        assert given.page_table is None or given.seqused_k is not None
        return run(given)

    install(
        "flash_attn.cute",
        version=("flash-attn-4", "4.0.0b36"),
        flash_attn_func=parameters(f"q, k, v, qv=None, *, {how}")(run),
        flash_attn_varlen_func=flash_attn_varlen_func,
    )


NO_PADDING = (
    "takes a padding mask only: the same for all heads and queries, and "
    "masking keys before or after the others"
)
NO_LENGTHS = "for sequences of different lengths: this call has no attn_mask, and is not packed"
NOT_PADDED = {
    **{kind: NO_LENGTHS for kind in KINDS if kind not in MASKED},
    **{kind: NO_PADDING for kind in MASKED if "padded" not in kind},
    "float mask": "takes a bool padding mask only, not float16",
    **{kind: REFUSED[kind] for kind in ("float32", "narrow values")},
}
NO_DECODE = {
    **{
        kind: "decode only: one query per sequence, not 130"
        for kind in KINDS
        if "decode" not in kind
    },
    **{kind: REFUSED[kind] for kind in ("float32", "narrow values")},
}
NARROW_VALUES = {kind: reason for kind, reason in REFUSED.items() if kind != "narrow values"}

DECODE = {"bottom right, decode", "window, decode", "soft cap, decode"}
LARGE_PAGES = {"pages of 256", "pages, decode, window", "pages, packed decode"}
PAGES = LARGE_PAGES | {"pages"}
LARGE_PAGES_PACKED = {"pages, packed, bottom right"}
PAGES_PACKED = LARGE_PAGES_PACKED | {"pages, packed, window"}
VARLEN = PACKED | {"packed, soft cap", "soft cap, padded"}
PACKED_LENGTHS = LENGTHS | {"packed, key lengths"}

SUPPORT: list[tuple[str, str, dict[str, str], set[str]]] = [
    ("flash_attn", "fa2", REFUSED, DENSE | CAPPED),
    ("flash_attn", "fa2-varlen", NOT_PADDED, VARLEN | LARGE_PAGES | LARGE_PAGES_PACKED),
    ("flash_attn", "fa2-kvcache", NO_DECODE, DECODE | LENGTHS | LARGE_PAGES),
    ("flash_attn_interface", "fa3", REFUSED, DENSE | CAPPED),
    ("flash_attn_interface", "fa3-fp8", REFUSED, DENSE | CAPPED),
    ("flash_attn_interface", "fa3-varlen", NOT_PADDED, VARLEN | PACKED_LENGTHS),
    (
        "flash_attn_interface",
        "fa3-kvcache",
        {**NO_DECODE, **dict.fromkeys(MASKED, "takes no attn_mask")},
        DECODE | LENGTHS | PAGES | PAGES_PACKED,
    ),
    ("flash_attn_4", "fa4", NARROW_VALUES, DENSE | CAPPED | SINKS),
    (
        "flash_attn_4",
        "fa4-varlen",
        {**NOT_PADDED, "narrow values": NO_LENGTHS},
        VARLEN | PACKED_LENGTHS | PAGES | PAGES_PACKED,
    ),
]
"""Library, kernel, reasons by unsupported kind of call, and supported calls beyond SDPA."""


@pytest.mark.parametrize(
    ("library", "name", "refused", "beyond", "variant"),
    [(*row, variant) for row in SUPPORT for variant in VARIANTS.get(row[1], ("",))],
)
def test_a_kernel_is_exact_on_supported_calls_and_refuses_others(
    request: pytest.FixtureRequest,
    library: str,
    name: str,
    refused: dict[str, str],
    beyond: set[str],
    variant: str,
) -> None:
    request.getfixturevalue(library)
    assert verify(name, variant) == refused
    assert verify_variants(name) == beyond


def _wide(head_dim: int) -> AttentionCall:
    return random_call(head_dim=head_dim, v_head_dim=head_dim, dtype=torch.bfloat16)


@pytest.fixture
def vllm(install: Install, request: pytest.FixtureRequest) -> None:
    """Install the functions that vLLM 0.22.1's backends call; FlashAttention has some version."""
    version = getattr(request, "param", 3)

    @parameters(
        "q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, "
        "softmax_scale=None, causal=False, window_size=None, softcap=0.0, block_table=None, "
        "out=None, scheduler_metadata=None, q_descale=None, k_descale=None, v_descale=None, "
        "num_splits=0, fa_version=2, s_aux=None"
    )
    def flash_attn_varlen_func(given: SimpleNamespace) -> Tensor:
        assert (given.cu_seqlens_k is None) == (given.seqused_k is not None)
        assert given.fa_version == version
        if version == 3 and given.block_table is not None:
            assert given.scheduler_metadata == len(given.q), "the schedule of another call"
        else:
            assert given.scheduler_metadata is None
        if given.q_descale is not None:
            vars(given).update({name: dequantised(given, name) for name in ("q", "k", "v")})
        given.window_size, given.learnable_sink = given.window_size or (-1, -1), given.s_aux
        return flash_attention(given)

    @parameters(
        "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
        "cache_seqlens, qkv_dtype, headdim_v=None, cu_seqlens_q=None, page_size=None, "
        "causal=False, window_size=(-1, -1), num_splits=0"
    )
    def get_scheduler_metadata(given: SimpleNamespace) -> int:
        assert given.batch_size == len(given.cache_seqlens)
        return int(given.cu_seqlens_q[-1])

    @parameters(
        "q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, "
        "window_size, block_table, softcap, q_descale, k_descale, v_descale, "
        "seq_threshold_3D=None, num_par_softmax_segments=None, softmax_segm_output=None, "
        "softmax_segm_max=None, softmax_segm_expsum=None, sinks=None"
    )
    def unified_attention(given: SimpleNamespace) -> None:
        assert given.causal
        parts, heads = given.num_par_softmax_segments, given.q.shape[1]
        assert given.softmax_segm_output.shape[:3] == (given.seq_threshold_3D, heads, parts)
        given.learnable_sink = given.sinks
        given.out.copy_(flash_attention(given))

    install(
        "vllm.vllm_flash_attn",
        version=("vllm", "0.22.1"),
        flash_attn_varlen_func=flash_attn_varlen_func,
        get_scheduler_metadata=get_scheduler_metadata,
    )
    install(
        "vllm.v1.attention.backends.fa_utils",
        get_flash_attn_version=parameters("requires_alibi=False, head_size=None")(
            lambda given: version
        ),
    )
    install("vllm.v1.attention.ops.triton_unified_attention", unified_attention=unified_attention)


@pytest.mark.parametrize("vllm", [2, 3], indirect=True)
@pytest.mark.usefixtures("vllm")
def test_flash_attention_of_vllm() -> None:
    packed = {kind for kind in PACKED if kind != "packed, key lengths"} | {"packed, soft cap"}
    assert verify_variants("vllm-flash-attn") == packed | PAGES | PAGES_PACKED


@pytest.mark.usefixtures("vllm")
def test_scaled_caches_and_triton_kernel_of_vllm() -> None:
    float8 = {kind for kind in LIBRARY_CALLS if kind.startswith("float8")}
    assert verify_variants("vllm-flash-attn-fp8") == float8
    causal = {kind for kind in PAGES | PAGES_PACKED if LIBRARY_CALLS[kind].is_causal}
    assert verify_variants("vllm-triton") == causal
    reason = "for causal calls: this call is not causal"
    assert catalogue()["vllm-triton"].refuses(LIBRARY_CALLS["pages"]) == reason


@pytest.mark.usefixtures("flash_attn_interface")
@pytest.mark.parametrize("variant", ["a tensor"])
def test_scaled_caches_of_flash_attention_3(variant: str) -> None:
    float8 = {kind for kind in LIBRARY_CALLS if kind.startswith("float8")}
    assert verify_variants("fa3-kvcache-fp8") == float8


MLA_CALL = mla_call()
APART = replace(MLA_CALL, value=MLA_CALL.value.clone())
NARROW_MLA = replace(MLA_CALL, value=MLA_CALL.key[..., :256])
FLOAT32_SINKS = replace(LIBRARY_CALLS["sinks"], sinks=torch.zeros(4))
UNSCALED_QUERY = replace(LIBRARY_CALLS["float8, pages"], query_scale=None)
NOT_IN_KEY = "for absorbed MLA: the value is not part of this call's key"


@pytest.mark.parametrize(
    ("name", "call", "reason"),
    [
        ("fa2-kvcache", LIBRARY_CALLS["pages"], "pages of 16 keys: needs a multiple of 256"),
        ("fa3-kvcache", LIBRARY_CALLS["packed"], "packed sequences without pages of keys"),
        ("fa3", random_call(head_dim=192, v_head_dim=128, dtype=torch.bfloat16), None),
        ("fa3-kvcache-fp8", LIBRARY_CALLS["pages"], "dtype float16: needs float8_e4m3fn"),
        ("fa3-kvcache-fp8", UNSCALED_QUERY, "needs a scale of query, key and value"),
        ("fa3-mla", APART, NOT_IN_KEY),
        ("fa4", FLOAT32_SINKS, "takes bfloat16 sinks only, not float32"),
        ("fa4", _wide(256), None),
        ("fa4", _wide(264), "head_dim 264: at most 256"),
        ("fa4", _wide(100), "head_dim 100: needs a multiple of 8"),
        ("flash-mla", APART, NOT_IN_KEY),
        ("flash-mla", mla_call(16), "pages of 16 keys: needs 64"),
        ("flash-mla", NARROW_MLA, "value head_dim 256: needs 512"),
        ("flash-mla", mla_call(head_dim=520), "head_dim 520: needs 576 or 512"),
        ("flash-mla", random_call(**MLA), "for keys in pages: this call has no page table"),
    ],
)
def test_calls_are_refused_with_reason(name: str, call: AttentionCall, reason: str | None) -> None:
    assert catalogue()[name].refuses(call) == reason


def test_flash_mla_refuses_a_value_outside_the_key_when_called() -> None:
    with pytest.raises(NotImplementedError, match=NOT_IN_KEY):
        catalogue()["flash-mla"].attention(**APART.arguments())


@pytest.fixture
def flash_mla(install: Install) -> None:
    """Install a stand-in for dense FlashMLA 1.0.0 of 2026 (`flash_mla/flash_mla_interface.py`)."""

    def get_mla_metadata(*args: Any) -> tuple[str, None]:
        lengths, queries_per_head, kv_heads = args
        assert lengths.tolist() == [17, 140]
        assert (queries_per_head % 4, kv_heads) == (0, 1)
        return "schedule", None

    @parameters(
        "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, "
        "num_splits=None, softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None"
    )
    def flash_mla_with_kvcache(given: SimpleNamespace) -> tuple[Tensor, None]:
        assert (given.k_cache.shape[1], given.q.shape[3], given.head_dim_v) == (64, 576, 512)
        assert given.tile_scheduler_metadata == "schedule"
        assert given.q.is_contiguous()
        assert (given.is_fp8_kvcache, given.indices) == (False, None)
        beyond = {"v_cache": given.k_cache[..., :512], "window_size": (-1, -1), "softcap": 0.0}
        return flash_attention(SimpleNamespace(**vars(given), **beyond)), None

    install(
        "flash_mla",
        version=("flash_mla", "1.0.0"),
        get_mla_metadata=get_mla_metadata,
        flash_mla_with_kvcache=flash_mla_with_kvcache,
    )


@pytest.mark.usefixtures("flash_mla", "flash_attn_interface")
@pytest.mark.parametrize("variant", ["a tensor"])
@pytest.mark.parametrize(
    "changes",
    [
        {"q_len": 1, "scale": 0.05},
        {"q_len": 2, "is_causal": True, "variant": AttentionVariant(bottom_right=True)},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["flash-mla", "fa3-mla", "eager", "torch-masked"])
def test_absorbed_mla_is_exact(name: str, changes: dict[str, Any]) -> None:
    kernel, call = catalogue()[name], mla_call(**changes)
    assert kernel.refuses(call) is None
    judge_call(kernel, lambda: call.to("cpu"), Expected.of(call), "exact", "MLA")


@pytest.mark.usefixtures("flash_mla")
def test_flash_mla_is_for_hopper(unavailable: Unavailable) -> None:
    assert unavailable("flash-mla") is None
    assert unavailable("flash-mla", 10, 0) == ("needs compute capability 9.0 (this GPU has 10.0)")


@pytest.fixture
def varlen_attn(install: Install) -> None:
    """Install a stand-in for `varlen_attn` of PyTorch 2.13."""

    @parameters(
        "query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), "
        "enable_gqa=False, seqused_k=None, block_table=None"
    )
    def varlen_attn(given: SimpleNamespace) -> Tensor:
        assert given.enable_gqa == (given.query.shape[1] != given.key.shape[-2])
        named = {"q": given.query, "k": given.key, "v": given.value, "softmax_scale": given.scale}
        offsets = {"cu_seqlens_q": given.cu_seq_q, "cu_seqlens_k": given.cu_seq_k}
        beyond = {"causal": False, "softcap": 0.0}
        return flash_attention(SimpleNamespace(**vars(given), **named, **offsets, **beyond))

    install("torch.nn.attention.varlen", varlen_attn=varlen_attn)


@pytest.mark.usefixtures("varlen_attn")
def test_torchs_varlen_attn_is_exact(unavailable: Unavailable) -> None:
    taken = PACKED | LENGTHS | {"packed, key lengths"} | PAGES | PAGES_PACKED
    assert verify_variants("torch-varlen") == taken
    assert unavailable("torch-varlen") is None


def test_quantise_keeps_what_float8_can() -> None:
    tensor = torch.randn(2, 5, 6, 64) * torch.tensor([1.0, 1e-3, 100.0])[:, None].repeat(2, 1)
    tensor[1, :, 4:] = 0
    quantised, descale = fa3.quantise(tensor, 3)
    assert quantised.dtype == torch.float8_e4m3fn
    assert quantised.shape == tensor.shape
    assert descale.shape == (2, 3)
    back = quantised.float().unflatten(2, (3, 2)) * descale[:, None, :, None, None]
    largest = tensor.unflatten(2, (3, 2)).abs().amax(dim=(1, 3, 4))[:, None, :, None, None]
    # The limit is half a step of a 3-bit mantissa at the largest element of the group.
    assert bool(((back - tensor.unflatten(2, (3, 2))).abs() <= largest / 16).all())
    assert bool(back.isfinite().all())


@pytest.fixture
def implementations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Add recording stand-ins for FA3 and FA4 to PyTorch's registry. Return the log of changes."""
    log: list[str] = []
    active: list[str] = []

    def activate(implementation: str) -> None:
        log.append(implementation)
        active[:] = [implementation]

    def restore() -> None:
        log.append("restore")
        active.clear()

    functions = torch.nn.attention
    monkeypatch.setattr(functions, "activate_flash_attention_impl", activate)
    monkeypatch.setattr(functions, "restore_flash_attention_impl", restore)
    monkeypatch.setattr(
        functions, "current_flash_attention_impl", lambda: active[0] if active else None
    )
    return log


@pytest.mark.parametrize(("name", "implementation"), [("torch-fa3", "FA3"), ("torch-fa4", "FA4")])
def test_activation_ends_after_every_call(
    implementations: list[str], name: str, implementation: str
) -> None:
    """On the CPU, PyTorch's own flash kernel runs; the chosen backend matters only on a GPU."""
    assert verify(name) == REFUSED
    runs = sum(case[0] == name for case in cases())
    assert implementations == [implementation, "restore"] * runs
    assert catalogue()[name].unsupported(call_of("plain", "elements apart")) == (
        "the elements of a head lie 130 apart in the query: must be adjacent"
    )


def test_activation_gives_back_what_was_active(implementations: list[str]) -> None:
    torch.nn.attention.activate_flash_attention_impl("FA4")
    with pytest.raises(ZeroDivisionError), torch_activated.activated("FA3"):
        _ = 1 / 0
    assert implementations == ["FA4", "FA3", "restore", "FA4"]
    assert torch.nn.attention.current_flash_attention_impl() == "FA4"


@pytest.mark.usefixtures("flash_attn_4")
def test_activation_is_tried(
    unavailable: Unavailable, monkeypatch: pytest.MonkeyPatch, install: Install
) -> None:
    """Without a trial, an adapter that does not fit the installed library would only fail later."""
    assert unavailable("torch-fa4", 8, 6) == (
        "needs compute capability 9.0 or 10.0 (this GPU has 8.6)"
    )
    monkeypatch.setattr(torch_activated, "_trial", lambda *_: "too many values to unpack")
    assert unavailable("torch-fa4") == (
        f"PyTorch {torch.__version__} with flash-attn-4 4.0.0b36: too many values to unpack"
    )
    monkeypatch.setattr(torch_activated, "_trial", lambda attention, device: None)
    assert unavailable("torch-fa4") is None
    monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")
    assert unavailable("torch-fa4") == f"needs PyTorch 2.11 (this is {torch.__version__})"


def test_flash_attn_4_beside_no_flash_attn_2(install: Install, unavailable: Unavailable) -> None:
    """The directory of flash-attn-4 makes `import flash_attn` return an empty package."""
    module = install("flash_attn", version=("flash-attn", None))
    module.__file__ = None
    assert unavailable("fa2") == "not installed: pip install flash-attn --no-build-isolation"
