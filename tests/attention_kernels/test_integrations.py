"""Models of transformers and diffusers, and ComfyUI's function, run our attention as their own."""

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from attention_kernels import operators
from attention_kernels.integrations import NAME, comfyui_attention, register
from tests import tiny_flux
from tests.attention_kernels.calls import DEVICE
from tests.capture.hooks.entry_points import comfyui_stand_in

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen": ("Qwen3ForCausalLM", {}),
    "gemma": ("Gemma2ForCausalLM", {"sliding_window": 5, "attn_logit_softcapping": 3.0}),
    "gpt-oss": ("GptOssForCausalLM", {"sliding_window": 5, "num_local_experts": 4}),
    "bert": ("BertForMaskedLM", {"num_key_value_heads": None, "head_dim": None}),
}
"""Class of each model, and what differs from `SIZES`."""
DTYPES = [torch.float32, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32]
"""On a GPU, 16 bits run other kernels."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count calls of our attention."""
    found: list[str] = []
    attend = operators.attend

    def counted(*args: Any) -> Any:
        found.append("attend")
        return attend(*args)

    monkeypatch.setattr(operators, "attend", counted)
    return found


def model_of(name: str) -> Any:
    import transformers

    class_name, changes = MODELS[name]
    model_class = getattr(transformers, class_name)
    sizes = {field: size for field, size in (SIZES | changes).items() if size is not None}
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**sizes)).eval().to(DEVICE)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def logits(model: Any, implementation: str, **inputs: Any) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        found: torch.Tensor = model(**inputs).logits
    return found


def assert_as_exact(output: torch.Tensor, own: torch.Tensor, exact: torch.Tensor) -> None:
    """Assert that our attention is about as near to float32 as the model's own attention is."""
    limit = 2 * (own.float() - exact).abs().max() + 2e-4 * exact.abs().max()
    assert (output.float() - exact).abs().max() <= limit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_padded", [False, True])
def test_models_of_transformers_equal_eager(
    name: str, is_padded: bool, dtype: torch.dtype, calls: list[str]
) -> None:
    pytest.importorskip("transformers")
    register("transformers")
    model = model_of(name)
    ids = torch.arange(24, device=DEVICE).view(2, 12)
    mask = torch.ones_like(ids)
    if is_padded:
        mask[1, :4] = 0  # padding at the left, as for generation
    inputs = {"input_ids": ids, "attention_mask": mask}
    exact = logits(model, "eager", **inputs)
    model.to(dtype)
    output, eager = (logits(model, each, **inputs) for each in (NAME, "eager"))
    is_token = mask.bool()
    assert_as_exact(output[is_token], eager[is_token], exact[is_token])
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt-oss"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_equals_eager(name: str, cache: str, calls: list[str]) -> None:
    pytest.importorskip("transformers")
    register("transformers")
    model = model_of(name)
    ids = torch.arange(20, device=DEVICE).view(2, 10)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    found = []
    for each in (NAME, "eager"):
        model.set_attn_implementation(each)
        found.append(model.generate(ids, attention_mask=mask, pad_token_id=0, **options))
    assert torch.equal(*found)
    assert calls


def test_packed_sequences_equal_eager(calls: list[str]) -> None:
    pytest.importorskip("transformers")
    register("transformers")
    model = model_of("llama")
    inputs = {
        "input_ids": torch.arange(12, device=DEVICE)[None],
        "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]], device=DEVICE),
        "use_cache": False,
    }
    output, expected = (logits(model, each, **inputs) for each in (NAME, "eager"))
    torch.testing.assert_close(output, expected, atol=2e-4, rtol=1e-3)
    assert calls


def test_paged_caches_of_transformers_are_refused() -> None:
    from attention_kernels.integrations.transformers_attention import attention_forward

    tensor = torch.zeros(1, 1, 2, 16, device=DEVICE)
    with pytest.raises(NotImplementedError, match="takes no cache"):
        attention_forward(torch.nn.Linear(1, 1), tensor, tensor, tensor, None, cache=object())


@pytest.fixture
def diffusers_backend() -> Iterator[None]:
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
    before = dispatch._AttentionBackendRegistry._active_backend
    register("diffusers")
    register("diffusers")  # twice is as good as once
    yield
    dispatch._AttentionBackendRegistry._active_backend = before


def test_flux_equals_its_own_attention(diffusers_backend: None, calls: list[str]) -> None:
    denoiser = tiny_flux.model().to(DEVICE)
    with torch.no_grad():
        expected = tiny_flux.step(denoiser, DEVICE)
        denoiser.set_attention_backend(NAME)
        output = tiny_flux.step(denoiser, DEVICE)
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-3)
    assert len(calls) == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["HunyuanVideo 1.5", "LTX-2", "Qwen-Image", "Wan 2.2", "Z-Image"])
def test_denoisers_of_diffusers_equal_their_own_attention(
    name: str, dtype: torch.dtype, diffusers_backend: None, calls: list[str]
) -> None:
    from tests.capture.foreign.denoisers import MODELS

    (build,) = (each.build for each in MODELS if each.name == name)

    def output(backend: str, dtype: torch.dtype) -> torch.Tensor:
        calls.clear()
        model, run = build()
        for each in getattr(model, "components", {"": model}).values():
            if hasattr(each, "set_attention_backend"):
                each.set_attention_backend(backend)
                each.to(DEVICE, dtype)
                each.register_forward_pre_hook(
                    lambda _, args, given: tree_map_only(
                        torch.Tensor, lambda tensor: moved(tensor, dtype), (args, given)
                    ),
                    with_kwargs=True,
                )
        torch.manual_seed(1)
        with torch.no_grad():
            return torch.cat([each.flatten() for each in tree_leaves(run())])

    exact, own = (output("native", each) for each in (torch.float32, dtype))
    assert_as_exact(output(NAME, dtype), own, exact)
    assert len(calls) >= 4


def moved(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(DEVICE, dtype if tensor.is_floating_point() else None)


@pytest.mark.parametrize("shape", [(2, 20), (2, 1, 1, 20), (2, 2, 20, 20)], ids=str)
def test_masks_reach_the_backend(shape: tuple[int, ...], diffusers_backend: None) -> None:
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    query, key, value = (torch.randn(2, 20, 2, 16, device=DEVICE) for _ in range(3))
    mask = torch.rand(shape, device=DEVICE) > 0.4
    with torch.no_grad():
        output, expected = (
            dispatch_attention_fn(query, key, value, attn_mask=mask, backend=backend)
            for backend in (NAME, "native")
        )
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("shape", [None, (20, 20), (2, 20, 20)], ids=str)
def test_function_of_comfyui_equals_its_own(
    skip_reshape: bool, shape: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: dict[str, Any] = {}
    module: Any = types.ModuleType("comfy.ldm.modules.attention")
    module.register_attention_function = registered.__setitem__
    for name in ("comfy", "comfy.ldm", "comfy.ldm.modules"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    register("comfyui")
    sizes = (2, 2, 20, 16) if skip_reshape else (2, 20, 32)
    given = [torch.randn(sizes, device=DEVICE) for _ in range(3)]
    options = {"mask": None if shape is None else torch.rand(shape, device=DEVICE) > 0.4}
    options |= {"skip_reshape": skip_reshape}
    output = registered[NAME](*given, 2, **options)
    expected = comfyui_stand_in.attention_pytorch(*given, 2, **options)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)
    own = comfyui_stand_in.attention_pytorch
    assert torch.equal(comfyui_attention.override(own, *given, 2, **options), output)


def test_unknown_library_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of comfyui, diffusers, torch, transformers"):
        register("vllm")
