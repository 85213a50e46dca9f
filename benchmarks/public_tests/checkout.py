"""Loads a library's unchanged tests from a checkout, with shims in place of the library."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.public_tests.answers import Answers
from benchmarks.public_tests.flash_attn_shim import FlashAttn, no_rotary, nothing
from benchmarks.public_tests.flashinfer_shim import Decode, Finder, FlashInfer
from benchmarks.public_tests.listed import Listed

SWITCHES = {
    "FLASH_ATTENTION_DISABLE_FP8": "TRUE",
    "FLASH_ATTENTION_DISABLE_LOCAL": "TRUE",
}
"""Environment variables that leave features out of flash-attn 3's tests. One of these tests
combines windows with chunks; `tests/test_flash_attn.py` has windows without chunks."""


def load(test: Listed, checkout: Path, answers: Answers | FlashAttn) -> Callable[..., None]:
    """Return a test function that calls `answers`.

    Raises:
        FileNotFoundError: the checkout has no such file.
        AttributeError: the file has no such test.
    """
    path = checkout / test.file
    if not path.is_file():
        raise FileNotFoundError(f"{checkout} has no {test.file}")
    os.environ.update(SWITCHES)
    own = [checkout] if test.library == "flashinfer" else [checkout / "hopper"]
    with _importing(own):
        if isinstance(answers, FlashAttn):
            _flash_attention(checkout, answers)
        else:
            _flashinfer(answers)
        module = _from_file(f"public_tests_{'_'.join(path.parts[-2:])}", path)
    function: Callable[..., None] = getattr(module, test.name)
    return function


@contextlib.contextmanager
def _importing(folders: list[Path]) -> Iterator[None]:
    """Reimport modules of an earlier test, which use another kernel."""
    names = ("flash_attn", "flash_attn_interface", "flashinfer", "padding", "test_util", "tests")
    for name in [each for each in sys.modules if each.partition(".")[0] in names]:
        del sys.modules[name]
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, Finder)]
    sys.path[:0] = map(str, folders)
    try:
        yield
    finally:
        del sys.path[: len(folders)]


def _from_file(name: str, path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _module(name: str, **contents: object) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module
    return module


def _flash_attention(checkout: Path, shim: FlashAttn) -> None:
    functions = {name: getattr(shim, name) for name in dir(shim) if name.startswith("flash_attn")}
    _module("flash_attn", __path__=[], **functions)
    _module(
        "flash_attn.flash_attn_interface",
        _get_block_size_n=nothing,
        USE_TRITON_ROCM=False,
        **functions,
    )
    _module("flash_attn.layers", __path__=[])
    _module("flash_attn.layers.rotary", apply_rotary_emb=no_rotary)
    padding = _from_file("flash_attn.bert_padding", checkout / "flash_attn/bert_padding.py")
    sys.modules["flash_attn.bert_padding"] = padding
    _module(
        "flash_attn_interface",
        get_scheduler_metadata=nothing,
        flash_attn_combine=nothing,
        **functions,
    )


def _flashinfer(answers: Answers) -> None:
    sys.meta_path.insert(0, Finder())
    import flashinfer.decode
    import flashinfer.prefill
    import flashinfer.utils

    shim = FlashInfer(answers)
    wrappers = shim.wrappers()
    for module in (flashinfer, flashinfer.decode, flashinfer.prefill):
        vars(module).update(
            single_decode_with_kv_cache=shim.single_decode_with_kv_cache,
            single_prefill_with_kv_cache=shim.single_prefill_with_kv_cache,
            **wrappers,
        )
    vars(flashinfer)["fast_decode_plan"] = Decode.plan
    vars(flashinfer.utils).update(
        has_flashinfer_jit_cache=lambda: True,
        get_compute_capability=lambda device: torch.cuda.get_device_capability(device),
        is_sm90a_supported=lambda device: torch.cuda.get_device_capability(device)[0] == 9,
        GPUArchitectureError=type("GPUArchitectureError", (Exception,), {}),
    )
