"""What the tests of third-party kernels share.

None of the libraries can run here (no GPU). The tests put **stand-ins** in their place: modules
with the real functions' names, parameters, layouts and habits, whose arithmetic is torch's. They
show that an adapter passes what it should; they show nothing about the libraries.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from capture.call import AttentionCall
from replay.accuracy.judge import Expected, judge
from replay.kernels import library
from replay.kernels.adapters import hub, torch_activated, transformer_engine
from replay.kernels.registry import catalogue, find


def textbook(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
    top_left: bool = False,
) -> Tensor:
    """BHSD attention in float32, returned in the query's dtype; causal is aligned bottom right."""
    query_, key, value = query.float(), key.float(), value.float()
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query_ @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores + mask if mask.is_floating_point() else scores.where(mask, -torch.inf)
    if causal:
        rows, columns = scores.shape[-2:]
        diagonal = 0 if top_left else columns - rows
        seen = torch.ones(rows, columns, dtype=torch.bool).tril(diagonal)
        scores = scores.where(seen, -torch.inf)
    return (scores.softmax(-1).nan_to_num() @ value).to(query.dtype)


@pytest.fixture
def formula() -> Callable[..., Tensor]:
    """`textbook`, for stand-ins."""
    return textbook


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """What adapters keep between calls (imports, trials, a chosen backend) is a test's own."""

    def clear() -> None:
        library._import.cache_clear()
        hub._fetch.cache_clear()
        torch_activated._trial.cache_clear()
        transformer_engine._module.cache_clear()
        transformer_engine._chosen = None

    clear()
    yield
    clear()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """`install("flash_attn", flash_attn_func=…)` until the test ends; `version=("flash-attn", …)`.

    Parents of a dotted name are installed too. None as the version of a package removes it.
    """
    versions: dict[str, str | None] = {}
    real = importlib.metadata.version

    def version(package: str) -> str:
        found = versions[package] if package in versions else real(package)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)

    def put(name: str, version: tuple[str, str | None] | None = None, **members: Any) -> ModuleType:
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            if path not in sys.modules or length == len(parts):
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
        module = sys.modules[name]
        module.__file__ = "stand-in"
        for member, value in members.items():
            setattr(module, member, value)
        if version is not None:
            versions[version[0]] = version[1]
        library._import.cache_clear()
        return module

    return put


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], torch.device]:
    """`gpu(9, 0)`: a device of that compute capability, to ask about and not to run on."""

    def make(major: int, minor: int) -> torch.device:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        return torch.device("cuda")

    return make


@pytest.fixture
def unavailable(gpu: Callable[[int, int], torch.device]) -> Callable[..., str | None]:
    """`unavailable("fa3", 8, 6)`: what the kernel says about a GPU of that capability."""

    def ask(name: str, major: int = 9, minor: int = 0) -> str | None:
        return catalogue()[name].unavailable(gpu(major, minor))

    return ask


def in_model_strides(call: AttentionCall) -> AttentionCall:
    """Views of (B, S, H, D) memory, as a model's projections give."""
    return call.with_tensors(
        {
            name: tensor.transpose(1, 2).contiguous().transpose(1, 2)
            for name, tensor in call.tensors().items()
            if name in ("query", "key", "value")
        }
    )


def with_far_elements(call: AttentionCall) -> AttentionCall:
    """Heads whose elements are not adjacent: (B, H, D, S) memory."""
    return call.with_tensors(
        {
            name: tensor.mT.contiguous().mT
            for name, tensor in call.tensors().items()
            if name in ("query", "key", "value")
        }
    )


def padding(lengths: list[int], kv_len: int, side: str = "right") -> Tensor:
    """(B, 1, 1, Sk) bool, True where a key counts."""
    position = torch.arange(kv_len).flip(0) if side == "left" else torch.arange(kv_len)
    return (position < torch.tensor(lengths)[:, None])[:, None, None]


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch": {"batch": 2},
    "scale": {"scale": 0.3},
    "scale, batch": {"scale": 0.3, "batch": 2},
    "cross": {"batch": 2, "q_len": 130, "kv_len": 150},
    "causal": {"is_causal": True},
    "causal, batch": {"is_causal": True, "batch": 2},
    "causal, longer keys": {"is_causal": True, "kv_len": 150},
    "grouped": {"q_heads": 4, "kv_heads": 2},
    "grouped, causal, batch": {"q_heads": 6, "kv_heads": 2, "batch": 2, "is_causal": True},
    "decode": {"batch": 2, "q_heads": 8, "kv_heads": 2, "q_len": 1, "kv_len": 133},
    "decode of one": {"q_len": 1, "kv_len": 48},
    "decode, scale": {"batch": 2, "q_len": 1, "kv_len": 48, "scale": 0.3},
    "padded right": {"batch": 2, "attn_mask": padding([130, 77], 130)},
    "padded left": {"batch": 2, "attn_mask": padding([60, 130], 130, "left")},
    "padded decode": {
        "batch": 2,
        "q_heads": 4,
        "kv_heads": 2,
        "q_len": 1,
        "attn_mask": padding([60, 130], 130, "left"),
    },
    "bool mask": {"attn_mask": torch.rand(130, 130) < 0.7, "kv_len": 130},
    "bool mask, batch": {"attn_mask": torch.rand(2, 1, 130, 136) < 0.7, "batch": 2, "kv_len": 136},
    "mask by head": {"attn_mask": torch.rand(1, 2, 130, 136) < 0.7, "kv_len": 136},
    "float mask": {"attn_mask": torch.randn(1, 1, 130, 136), "kv_len": 136},
    "narrow values": {"v_head_dim": 32},
    "head_dim 96": {"head_dim": 96},
    "head_dim 80": {"head_dim": 80},
    "bfloat16": {"dtype": torch.bfloat16},
    "float32": {"dtype": torch.float32},
}
"""Kinds of call, as arguments of `make_call`."""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def verify(make_call: Callable[..., AttentionCall]) -> Callable[..., str | None]:
    """`verify(name, kind)`: the kernel's reason, or None after checking drop-in and core."""

    def check(name: str, kind: str) -> str | None:
        options = {"q_len": 130, "head_dim": 64, "dtype": torch.float16, **KINDS[kind]}
        call = make_call(
            **{"kv_len": options["q_len"] if "attn_mask" not in options else 130} | options
        )
        mask = call.attn_mask
        if mask is not None and mask.is_floating_point():
            call = call.with_tensors({"attn_mask": mask.to(call.dtype)})
        kernel = find(name)
        if reason := kernel.unsupported(call):
            return reason
        rule = kernel.accuracy_class if name == "fa3-fp8" else "exact"
        for arranged in (call, in_model_strides(call), with_far_elements(call)):
            if kernel.unsupported(arranged):
                assert arranged.key.stride(-1) != 1
                continue
            with torch.no_grad():
                # Its own tensors: some kernels change them.
                own = arranged.to("cpu")
                outputs = {"drop-in": kernel.attention(**own.arguments())}
                if kernel.prepare is not None:
                    outputs["core"] = kernel.prepare(arranged.to("cpu"))()
            expected = Expected.of(call)
            for which, output in outputs.items():
                if which == "core" and output.dtype != call.dtype:
                    assert name == "fa3-fp8"
                else:
                    assert output.dtype == call.dtype
                assert output.shape == expected.reference.shape
                verdict = judge(output, expected, rule)
                assert verdict.passed, f"{name} {which}, {kind}: {verdict.sentence}"
        return None

    return check
