"""xFormers, Transformer Engine, FlashInfer and Hub kernels as called by their adapters.

Against stand-ins (see conftest) with the parameters of xformers 0.0.35, flashinfer-python 0.6.6,
kernels 0.17.2 and NVIDIA/TransformerEngine's `main` branch.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from replay.kernels.adapters import flashinfer, hub, transformer_engine
from replay.kernels.registry import catalogue
from tests.factories import random_call
from tests.replay.kernels.kinds import (
    CAPPED,
    DENSE,
    KINDS,
    MASKED,
    PACKED,
    REFUSED,
    check,
    verify,
    verify_variants,
)
from tests.variant_calls import LIBRARY_CALLS

Install = Callable[..., ModuleType]
Formula = Callable[..., Tensor]
Unavailable = Callable[..., "str | None"]

OTHER_HEAD_DIMS = {
    "head_dim 96": "head_dim 96: needs 64, 128 or 256",
    "head_dim 80": "head_dim 80: needs 64, 128 or 256",
}


@pytest.fixture
def xformers(install: Install, formula: Formula) -> None:
    class LowerTriangularMask:
        """Aligned top left."""

    class LowerTriangularFromBottomRightMask:
        pass

    @dataclass
    class LocalAttentionFromBottomRightMask:
        window_left: int
        window_right: int

    @dataclass
    class BlockDiagonalMask:
        q_seqlen: list[int]
        kv_seqlen: list[int]
        causal: bool = False
        window_size: int | None = None

        @classmethod
        def from_seqlens(
            cls,
            q_seqlen: list[int],
            kv_seqlen: list[int] | None = None,
            *,
            device: torch.device | None = None,
        ) -> BlockDiagonalMask:
            assert kv_seqlen is not None
            assert device == torch.device("cpu"), "None is the first GPU"
            return cls(q_seqlen, kv_seqlen)

        def make_causal_from_bottomright(self) -> BlockDiagonalMask:
            for queries, keys in zip(self.q_seqlen, self.kv_seqlen, strict=True):
                if keys < queries:
                    raise ValueError("Expected `num_keys >= num_queries`")
            return replace(self, causal=True)

        def make_local_attention_from_bottomright(self, window_size: int) -> BlockDiagonalMask:
            """Make the mask causal: the query aligned with key j sees the window_size keys up to
            j."""
            assert window_size > 0
            return replace(self.make_causal_from_bottomright(), window_size=window_size)

    def memory_efficient_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Any = None,
        *,
        scale: float | None = None,
    ) -> Tensor:
        assert query.ndim == key.ndim == value.ndim
        assert query.shape[2:-1] == key.shape[2:-1] == value.shape[2:-1], "it does not broadcast"
        assert all(each.stride(-1) == 1 for each in (query, key, value))
        causal, mask = isinstance(attn_bias, LowerTriangularMask), None
        from_bottom_right = isinstance(attn_bias, LowerTriangularFromBottomRightMask)
        window: tuple[int, int] = (-1, -1)
        if isinstance(attn_bias, LocalAttentionFromBottomRightMask):
            assert query.dtype != torch.float32, "FlashAttention's alone"
            assert query.shape[-1] == value.shape[-1] <= 256
            window = (attn_bias.window_left, attn_bias.window_right)
        if isinstance(attn_bias, Tensor):
            assert attn_bias.dtype == query.dtype
            heads = query.shape[2:-1]
            assert attn_bias.shape == (query.shape[0], *heads, query.shape[1], key.shape[1])
            assert attn_bias.stride(-1) == 1
            assert all(stride % 8 == 0 for stride in attn_bias.stride()[:-1])
            assert attn_bias.data_ptr() % 16 == 0
            mask = attn_bias.flatten(1, -3).float()
        elif not isinstance(attn_bias, BlockDiagonalMask):
            assert causal or from_bottom_right or window != (-1, -1) or attn_bias is None
        flat = [each.flatten(2, -2).transpose(1, 2) for each in (query, key, value)]
        if isinstance(attn_bias, BlockDiagonalMask):
            lengths = [attn_bias.q_seqlen, attn_bias.kv_seqlen, attn_bias.kv_seqlen]
            size = attn_bias.window_size
            window = (-1 if size is None else size - 1, -1)
            outputs = [
                formula(
                    *parts, scale, attn_bias.causal, window=(-1 if size is None else size - 1, -1)
                )
                for parts in zip(
                    *(each.split(sizes, 2) for each, sizes in zip(flat, lengths, strict=True)),
                    strict=True,
                )
            ]
            output = torch.cat(outputs, dim=2)
        else:
            is_causal = causal or from_bottom_right
            output = formula(*flat, scale, is_causal, mask, top_left=causal, window=window)
        return output.transpose(1, 2).unflatten(2, query.shape[2:-1])

    install("xformers._cpp_lib", _cpp_library_load_exception=None)
    install(
        "xformers.ops",
        version=("xformers", "0.0.35"),
        memory_efficient_attention=memory_efficient_attention,
        LowerTriangularMask=LowerTriangularMask,
        fmha=SimpleNamespace(
            attn_bias=SimpleNamespace(
                LowerTriangularFromBottomRightMask=LowerTriangularFromBottomRightMask,
                LocalAttentionFromBottomRightMask=LocalAttentionFromBottomRightMask,
                BlockDiagonalMask=BlockDiagonalMask,
            )
        ),
    )


@pytest.mark.usefixtures("xformers")
def test_xformers() -> None:
    assert verify("xformers") == dict.fromkeys(
        ("padded right", "padded left", "padded decode", "padded, scale", "bool mask"),
        "attn_mask over 130 keys: needs a multiple of 8",
    )


@pytest.mark.usefixtures("xformers")
def test_xformers_beyond_sdpa() -> None:
    assert verify_variants("xformers") == DENSE | PACKED
    sideways = replace(
        LIBRARY_CALLS["packed"], variant=AttentionVariant(window=(3, 2), bottom_right=True)
    )
    reason = "a window over packed sequences that is not causal"
    assert catalogue()["xformers"].refuses(sideways) == reason
    with pytest.raises(NotImplementedError, match=reason):
        catalogue()["xformers"].attention(**sideways.arguments())


@pytest.mark.usefixtures("xformers")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "dtype float32: needs float16 or bfloat16"),
        ({"v_head_dim": 64}, "value head_dim 64 differs from query head_dim 32"),
        ({"head_dim": 264}, "head_dim 264: at most 256"),
    ],
)
def test_windows_of_xformers_are_flash_attentions(changes: dict[str, Any], reason: str) -> None:
    call = random_call(**{"dtype": torch.float16, **changes}, is_causal=True)
    window = replace(call, variant=AttentionVariant(window=(3, None), bottom_right=True))
    kernel = catalogue()["xformers"]
    assert kernel.refuses(call) is None
    assert kernel.refuses(window) == f"a window with {reason}"
    with pytest.raises(AssertionError):
        kernel.attention(**window.arguments())


@pytest.mark.usefixtures("xformers")
def test_xformers_has_no_causal_sequences_of_fewer_keys_than_queries() -> None:
    call = LIBRARY_CALLS["packed, bottom right"]
    kernel = catalogue()["xformers"]
    assert kernel.refuses(call) is None
    longer = replace(call, cu_seqlens_q=torch.tensor([0, 12, 16]).int())
    assert kernel.refuses(longer) == "causal packed sequences with fewer keys than queries"
    assert kernel.refuses(replace(longer, is_causal=False)) is None


@pytest.mark.usefixtures("xformers")
@pytest.mark.parametrize(("keys", "first"), [(19, 2), (24, 2)], ids=["rows", "address"])
def test_parts_of_masks_are_copied_where_xformers_needs_them_aligned(keys: int, first: int) -> None:
    query, key, value = (torch.randn(1, 2, length, 16) for length in (9, 16, 16))
    mask = torch.randn(1, 2, 9, keys)[..., first : first + 16]
    output = catalogue()["xformers"].attention(query, key, value, mask)
    torch.testing.assert_close(output, catalogue()["eager"].attention(query, key, value, mask))


@pytest.mark.usefixtures("xformers")
def test_xformers_without_its_compiled_part(
    gpu: Callable[[int, int], torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library can be imported without its compiled part, so this check must give the reason."""
    kernel = catalogue()["xformers"]
    device = gpu(9, 0)
    assert kernel.unavailable(device) is None
    error = Exception("xFormers can't load C++/CUDA extensions.\n  Please reinstall")
    cause = "libcudart.so.12: cannot open shared object file: No such file or directory"
    error.__cause__ = OSError(cause)
    part = sys.modules["xformers._cpp_lib"]
    monkeypatch.setattr(part, "_cpp_library_load_exception", error)
    assert kernel.unavailable(device) == f"its compiled part cannot be loaded: {cause}"


def _as_if_contiguous(tensor: Tensor) -> Tensor:
    """Return a tensor's memory as contiguous, since TE 2.20.2's fused backend ignores strides."""
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())


class DotProductAttention:
    """DotProductAttention of Transformer Engine, with the arguments that the adapter may use."""

    formula: Formula

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        *,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        attention_type: str = "self",
        softmax_scale: float | None = None,
    ) -> None:
        assert attention_dropout == 0.0
        self.heads, self.groups = num_attention_heads, num_gqa_groups
        self.channels = kv_channels
        self.scale, self.type = softmax_scale, attention_type

    def __call__(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        *,
        qkv_format: str | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
    ) -> Tensor:
        assert qkv_format == "bshd"
        assert attn_mask_type in ("no_mask", "causal", "causal_bottom_right")
        assert (query_layer.shape[2], key_layer.shape[2]) == (self.heads, self.groups)
        dims = (key_layer.shape[3], value_layer.shape[3])
        assert self.channels == (dims if dims[0] != dims[1] else dims[0])
        assert self.type == ("self" if query_layer.shape[1] == key_layer.shape[1] else "cross")
        left, right = window_size or (-1, 0 if attn_mask_type != "no_mask" else -1)
        if attn_mask_type == "no_mask":  # TE 2.20.2, dot_product_attention/utils.py
            assert (left, right) == (-1, -1) or min(left, right) >= 0
        else:
            assert left >= -1
            assert right == 0
        layers = [query_layer, key_layer, value_layer]
        if os.environ[transformer_engine.SWITCHES["fused"]] == "1":
            layers = [_as_if_contiguous(each) for each in layers]
        heads_first = (each.transpose(1, 2) for each in layers)
        output = type(self).formula(
            *heads_first,
            self.scale,
            attn_mask_type != "no_mask",
            top_left=attn_mask_type == "causal",
            window=window_size or (-1, -1),
        )
        return output.transpose(1, 2).flatten(2)


@pytest.fixture
def te(install: Install, formula: Formula, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that makes it importable; environment variables are restored."""
    monkeypatch.setattr(DotProductAttention, "formula", staticmethod(formula), raising=False)
    for switch in transformer_engine.SWITCHES.values():
        monkeypatch.setenv(switch, "1")

    def put() -> None:
        install(
            "transformer_engine.pytorch",
            version=("transformer-engine", "2.9.0"),
            DotProductAttention=DotProductAttention,
        )

    return put


@pytest.mark.parametrize("backend", ["flash", "fused", "unfused"])
def test_transformer_engine(te: Callable[[], None], backend: str) -> None:
    transformer_engine.choose(backend)
    te()
    assert verify(f"te-{backend}") == {
        kind: reason for kind, reason in REFUSED.items() if kind != "narrow values"
    }
    assert verify_variants(f"te-{backend}") == DENSE
    switches = {name: os.environ[switch] for name, switch in transformer_engine.SWITCHES.items()}
    assert switches == {name: str(int(name == backend)) for name in switches}


def test_transformer_engine_has_one_backend_a_process(
    te: Callable[[], None], unavailable: Unavailable
) -> None:
    assert unavailable("te-flash") == (
        "not installed: pip install --no-build-isolation transformer-engine[pytorch]"
    )
    transformer_engine.choose("fused")
    te()
    taken = (
        "this process runs te-fused, and Transformer Engine has one backend per process: "
        "name te-flash alone"
    )
    assert unavailable("te-flash") == taken
    assert unavailable("te-fused") is None
    check("te-fused", "plain")
    with pytest.raises(RuntimeError, match="one backend per process"):
        check("te-flash", "plain")


def test_checks_choose_no_backend(te: Callable[[], None], unavailable: Unavailable) -> None:
    for name in ("te-flash", "te-fused", "te-unfused"):
        unavailable(name)
    assert transformer_engine._chosen is None
    te()  # the library now counts as imported
    assert unavailable("te-flash") == (
        "Transformer Engine was imported before its backend could be chosen"
    )


@pytest.fixture
def planned(install: Install, formula: Formula, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-in for FlashInfer; returns the log of plans, runs and packings."""
    log: list[str] = []
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 16)
    flashinfer._workspace.cache_clear()
    flashinfer._wrapper.cache_clear()

    def single_prefill_with_kv_cache(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        kv_layout: str = "NHD",
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        backend: str = "auto",
    ) -> Tensor:
        assert kv_layout == "NHD"
        assert q.ndim == k.ndim == v.ndim == 3
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        mask = custom_mask
        if packed_custom_mask is not None:
            bits = packed_custom_mask[:, None] >> torch.arange(8) & 1
            mask = bits.flatten()[: q.shape[0] * k.shape[0]].bool().view(q.shape[0], k.shape[0])
        if mask is not None:
            assert backend == "fa2"
            assert not causal
            assert mask.shape == (q.shape[0], k.shape[0])
        log.append(f"single {backend}")
        assert not causal or q.shape[0] <= k.shape[0]
        assert mask is None or window_left == -1
        parts = (each.transpose(0, 1)[None] for each in (q, k, v))
        beyond = {"window": (window_left, -1), "softcap": logits_soft_cap}
        return formula(*parts, sm_scale, causal, mask, **beyond)[0].transpose(0, 1)

    class BatchPrefillWithRaggedKVCacheWrapper:
        def __init__(
            self,
            float_workspace_buffer: Tensor,
            kv_layout: str = "NHD",
            use_cuda_graph: bool = False,
            backend: str = "auto",
        ) -> None:
            assert kv_layout == "NHD"
            self.backend = backend
            self.mask: Tensor | None = None

        def plan(
            self,
            qo_indptr: Tensor,
            kv_indptr: Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim_qk: int,
            *,
            custom_mask: Tensor | None = None,
            causal: bool = False,
            window_left: int = -1,
            logits_soft_cap: float | None = None,
            sm_scale: float | None = None,
            q_data_type: torch.dtype | str = "float16",
        ) -> None:
            assert qo_indptr.dtype == kv_indptr.dtype == torch.int32
            log.append("plan")
            self.q, self.k = qo_indptr.tolist(), kv_indptr.tolist()
            self.heads, self.causal, self.scale = (num_qo_heads, num_kv_heads), causal, sm_scale
            self.dtype = q_data_type
            self.beyond = {"window": (window_left, -1), "softcap": logits_soft_cap}
            if custom_mask is not None:  # otherwise the last backend stays, as in the real library
                assert self.backend == "fa2"
                assert custom_mask.ndim == 1
                self.mask = custom_mask

        def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            assert (q.shape[1], k.shape[1], q.dtype) == (*self.heads, self.dtype)
            assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
            log.append("run")
            outputs, used = [], 0
            for i in range(len(self.q) - 1):
                rows, keys = slice(*self.q[i : i + 2]), slice(*self.k[i : i + 2])
                parts = [each.transpose(0, 1)[None] for each in (q[rows], k[keys], v[keys])]
                mask, size = None, parts[0].shape[2] * parts[1].shape[2]
                if self.mask is not None:
                    mask = self.mask[used : used + size].view(parts[0].shape[2], -1)
                    used += size
                is_causal = self.causal and mask is None
                output = formula(*parts, self.scale, is_causal, mask, **self.beyond)
                outputs.append(output[0].transpose(0, 1))
            return torch.cat(outputs)

    class BatchDecodeWithPagedKVCacheWrapper:
        def __init__(
            self,
            float_workspace_buffer: Tensor,
            kv_layout: str = "NHD",
            use_cuda_graph: bool = False,
            use_tensor_cores: bool = False,
        ) -> None:
            assert kv_layout == "NHD"
            assert not float_workspace_buffer.any()
            self.tensor_cores = use_tensor_cores

        def plan(
            self,
            indptr: Tensor,
            indices: Tensor,
            last_page_len: Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim: int,
            page_size: int,
            *,
            window_left: int = -1,
            logits_soft_cap: float | None = None,
            q_data_type: torch.dtype | str | None = "float16",
            kv_data_type: torch.dtype | str | None = None,
            sm_scale: float | None = None,
        ) -> None:
            assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
            assert self.tensor_cores == (num_qo_heads >= 4 * num_kv_heads)
            log.append("plan")
            self.pages = [
                indices[int(indptr[i]) : int(indptr[i + 1])] for i in range(len(indptr) - 1)
            ]
            self.last, self.scale = last_page_len.tolist(), sm_scale
            self.beyond = {"window": (window_left, -1), "softcap": logits_soft_cap}
            self.page_size = page_size

        def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
            log.append("run")
            outputs = []
            for i, pages in enumerate(self.pages):
                length = (len(pages) - 1) * self.page_size + self.last[i]
                key, value = (
                    cache[pages].flatten(0, 1)[:length].transpose(0, 1)[None]
                    for cache in paged_kv_cache
                )
                query = q[i][None, :, None]
                outputs.append(formula(query, key, value, self.scale, **self.beyond)[:, :, 0])
            return torch.cat(outputs)

    def packbits(x: Tensor, bitorder: str = "big") -> Tensor:
        assert bitorder == "little"
        log.append("pack")
        padded = torch.nn.functional.pad(x.to(torch.uint8), (0, -len(x) % 8)).view(-1, 8)
        return (padded << torch.arange(8)).sum(1)

    install(
        "flashinfer",
        version=("flashinfer-python", "0.6.6"),
        single_prefill_with_kv_cache=single_prefill_with_kv_cache,
        BatchPrefillWithRaggedKVCacheWrapper=BatchPrefillWithRaggedKVCacheWrapper,
        BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
        packbits=packbits,
    )
    return log


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_flashinfer_prefill(planned: list[str], backend: str) -> None:
    refused = {**REFUSED, **OTHER_HEAD_DIMS}
    if backend == "fa2":
        refused = {kind: reason for kind, reason in refused.items() if kind not in MASKED}
        refused |= {
            "mask by head": "takes one attn_mask for all heads",
            "float mask": "takes a bool attn_mask only, not float16",
        }
    assert verify(f"flashinfer-{backend}") == refused


@pytest.mark.usefixtures("planned")
def test_flashinfer_beyond_sdpa() -> None:
    prefill = DENSE - {"window, both ways"} | CAPPED | PACKED | {"packed, soft cap"}
    assert verify_variants("flashinfer-fa2") == prefill | {"soft cap, padded"}
    assert verify_variants("flashinfer-fa3") == prefill
    decode = {"bottom right, decode", "window, decode", "soft cap, decode", "key lengths, decode"}
    assert verify_variants("flashinfer-decode") == decode


def test_flashinfer_refuses_queries_before_all_keys() -> None:
    call = random_call(
        q_len=21,
        head_dim=64,
        dtype=torch.float16,
        is_causal=True,
        variant=AttentionVariant(bottom_right=True),
    )
    assert catalogue()["flashinfer-fa2"].refuses(call) == (
        "causal with more queries (21) than keys (13)"
    )


def test_core_plans_once(make_call: Callable[..., AttentionCall], planned: list[str]) -> None:
    kernel = catalogue()["flashinfer-fa2"]
    call = make_call(batch=2, head_dim=64, dtype=torch.float16)
    core = kernel.prepare(call)  # type: ignore[misc]
    core()
    core()
    assert planned == ["plan", "run", "run"]
    planned.clear()
    kernel.attention(**call.arguments())
    kernel.attention(**call.arguments())
    assert planned == ["plan", "run", "plan", "run"]


def test_a_mask_does_not_outlive_its_call(
    make_call: Callable[..., AttentionCall], planned: list[str]
) -> None:
    kernel = catalogue()["flashinfer-fa2"]
    call = make_call(batch=2, head_dim=64, dtype=torch.float16)
    before = kernel.attention(**call.arguments())
    kernel.attention(**{**call.arguments(), "attn_mask": torch.rand(2, 1, 9, 13) < 0.5})
    assert torch.equal(kernel.attention(**call.arguments()), before)


def test_flashinfer_decode(planned: list[str]) -> None:
    refused = verify("flashinfer-decode")
    assert refused["padded decode"] == "takes no attn_mask"
    assert set(KINDS) - set(refused) == {"decode", "decode of one", "decode, scale"}


def test_flashinfer_decodes_pages_of_the_wanted_size(
    planned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    real = flashinfer._paged

    def paged(tensor: Tensor, page_size: int) -> Tensor:
        pages = real(tensor, page_size)
        sizes.append(pages.shape[1])
        return pages

    monkeypatch.setattr(flashinfer, "_paged", paged)
    check("flashinfer-decode[page_size=7]", "decode")
    assert set(sizes) == {7}


@pytest.fixture
def kernels_package(
    install: Install, formula: Formula, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Stand-in for the package `kernels` with three cached kernels; returns the log of requests."""
    asked: dict[str, Any] = {}
    import huggingface_hub.constants

    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> tuple[Tensor, None]:
        heads_first = (each.transpose(1, 2) for each in (q, k, v))
        beyond = {"window": window_size, "softcap": softcap}
        return formula(*heads_first, softmax_scale, causal, **beyond).transpose(1, 2), None

    def sageattn(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensor_layout: str = "HND",
        is_causal: bool = False,
        sm_scale: float | None = None,
    ) -> Tensor:
        assert tensor_layout == "HND"
        return formula(q, k, v, sm_scale, is_causal)

    def get_kernel(
        repo_id: str, *, revision: str | None = None, version: int | None = None
    ) -> ModuleType:
        assert (revision is None) != (version is None)
        asked[repo_id] = huggingface_hub.constants.HF_HUB_OFFLINE
        if asked.get("error"):
            raise asked["error"]
        module = ModuleType(repo_id)
        if "sage" in repo_id:
            module.sageattn = sageattn  # type: ignore[attr-defined]
        else:
            module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
        return module

    def no_network(address: tuple[str, int], timeout: float) -> socket.socket:
        assert timeout <= 2
        asked["address"] = address
        raise TimeoutError("timed out")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "create_connection", no_network)
    install("kernels", version=("kernels", "0.17.2"), get_kernel=get_kernel)
    return asked


@pytest.mark.parametrize("repository", [each.repository for each in hub.KNOWN])
def test_hub_kernels(kernels_package: dict[str, Any], repository: str) -> None:
    assert verify(f"hub:{repository}") == REFUSED
    known = set() if "sage" in repository else DENSE | CAPPED
    assert verify_variants(f"hub:{repository}") == known


def test_only_the_cache_is_used_without_a_network(
    kernels_package: dict[str, Any], unavailable: Unavailable
) -> None:
    import huggingface_hub.constants

    name = "kernels-community/flash-attn2"
    assert unavailable(f"hub:{name}") is None
    assert kernels_package[name] is True
    assert huggingface_hub.constants.HF_HUB_OFFLINE is False


def test_failure_is_reported(
    kernels_package: dict[str, Any], unavailable: Unavailable, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example:8443")
    kernels_package["error"] = FileNotFoundError("no snapshot\nlong story")
    assert unavailable("hub:kernels-community/sage-attention") == (
        "hub.example cannot be reached (timed out), and not in the cache: no snapshot"
    )
    assert kernels_package["address"] == ("hub.example", 8443)
    # A proxy is asked first if there is one.
    hub._fetch.cache_clear()
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    unavailable("hub:kernels-community/sage-attention")
    assert kernels_package["address"] == ("proxy.example", 3128)


def test_a_hub_kernel_without_the_function(
    kernels_package: dict[str, Any], unavailable: Unavailable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_fetch", lambda repository: ModuleType("empty"))
    assert unavailable("hub:kernels-community/flash-attn2") == (
        "kernels-community/flash-attn2 has no flash_attn_func"
    )
    assert unavailable("hub:kernels-community/flash-attn3", 8, 0) == (
        "needs compute capability 9.0 (this GPU has 8.0)"
    )
