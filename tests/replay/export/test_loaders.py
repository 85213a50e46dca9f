"""Exported plans, loaded by their targets: which kernel runs at which module, step and length."""

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import flash_attn_stand_in, tiny_flux
from tests.attention_kernels.test_integrations import model_of
from tests.capture.hooks.entry_points import comfyui_stand_in
from tests.factories import normal
from tests.replay.export.plans import choice, loaded, plan_of

FIRST, SECOND = (
    "transformer.transformer_blocks.0.attn",
    "transformer.single_transformer_blocks.0.attn",
)


SDPA = F.scaled_dot_product_attention


def ours(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool = False,
    **others: Any,
) -> Tensor:
    """Stand for `attention_kernels.attention`, which is slow on a CPU."""
    return SDPA(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


@contextmanager
def inside(model: nn.Module, running: list[str]) -> Iterator[None]:
    """Keep the path of the module that runs in `running[-1]`."""

    def leave(*_: Any) -> None:
        running.pop()

    with ExitStack() as stack:
        for path, module in model.named_modules():
            entered = module.register_forward_pre_hook(lambda *_, path=path: running.append(path))
            left = module.register_forward_hook(leave)
            stack.callback(entered.remove)
            stack.callback(left.remove)
        yield


class Pipeline:
    """Stand-in for a pipeline of diffusers, whose import takes seconds."""

    def __init__(self) -> None:
        self.transformer = tiny_flux.model()
        self.components = {"scheduler": object(), "transformer": self.transformer}
        self.num_timesteps = 0

    def __call__(
        self, *, num_inference_steps: int, callback_on_step_end: Any = None, **others: Any
    ) -> Any:
        self.num_timesteps = num_inference_steps
        for step in range(num_inference_steps):
            images = tiny_flux.step(self.transformer).detach()
            if callback_on_step_end is not None:
                callback_on_step_end(self, step, torch.tensor(500), {})
        return types.SimpleNamespace(images=images)


def flux_pipeline() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    others = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    scheduler, transformer = FlowMatchEulerDiscreteScheduler(), tiny_flux.model()
    pipe = FluxPipeline(scheduler, transformer=transformer, **dict.fromkeys(others))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pictures(pipe: Any, steps: int, **options: Any) -> Tensor:
    prompt = {"prompt_embeds": normal(1, 8, 32), "pooled_prompt_embeds": normal(1, 32)}
    noise = {"latents": normal(1, 4, 4), "height": 32, "width": 32}
    options |= {"num_inference_steps": steps, "guidance_scale": 0.0, "output_type": "latent"}
    found: Tensor = pipe(**prompt, **noise, **options).images
    return found


@pytest.mark.parametrize(
    "pipeline", [Pipeline, pytest.param(flux_pipeline, marks=pytest.mark.slow)]
)
def test_diffusers_runs_the_backends_of_each_step(
    pipeline: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = pytest.importorskip("diffusers.models.attention_dispatch")._AttentionBackendRegistry
    from attention_kernels.integrations import diffusers_attention

    hits: list[tuple[str, str]] = []
    running = [""]

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def attend(*args: Any, **kwargs: Any) -> Any:
            hits.append((running[-1], name))
            return function(*args, **kwargs)

        return attend

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        return counting(kwargs["precision"], ours)(*args, **kwargs)

    monkeypatch.setattr(diffusers_attention, "attention", counted)
    for name in ("native", "_native_math", "_native_flash"):
        counting_backend = counting(name, registry._backends[name])
        monkeypatch.setitem(registry._backends, name, counting_backend)
    plan = plan_of(
        choice(FIRST, "torch-math", steps=(1, 2)),
        choice(FIRST, "triton-fp8", steps=(3, 5)),
        choice(SECOND, "torch-flash", kv_lens=(20, 30)),
        choice(SECOND, "triton-fa2", 0.5, kv_lens=(77, 80), torch_flash=0.25),
    )
    pipe = pipeline()
    expected = pictures(pipe, 5)
    hits.clear()
    applied = loaded(plan, "diffusers", tmp_path).load(pipe)
    with inside(pipe.transformer, running):
        for _ in range(2):  # the second run begins with the backends of step 0 again
            torch.testing.assert_close(pictures(pipe, 5, callback_on_step_end=applied), expected)
            names = ["native", "_native_math", "_native_math"] + ["fp8"] * 2
            assert [name for path, name in hits if f"transformer.{path}" == FIRST] == names
            others = [name for path, name in hits if f"transformer.{path}" == SECOND]
            assert others == ["_native_flash"] * 5
            hits.clear()
        applied.set_step(9)
        applied.remove()
        pictures(pipe, 1)
    assert [name for _, name in hits] == ["native"] * 2
    alone = loaded(plan, "diffusers", tmp_path).load(torch.compile(pipe.transformer))
    alone.set_step(1)
    assert (
        pipe.transformer.transformer_blocks[0].attn.processor._attention_backend == "_native_math"
    )


def test_diffusers_refuses_a_plan_of_another_model(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    pipe = Pipeline()
    for module, kernel, message in (
        ("transformer.blocks.0.attn", "torch-math", "no module 'transformer.blocks.0.attn'"),
        ("transformer.transformer_blocks.0", "torch-math", "does not use the attention dispatcher"),
        (FIRST, "fa3", "Flash Attention 3 backend '_flash_3' is not usable"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            loaded(plan_of(choice(module, kernel)), "diffusers", tmp_path).load(pipe)
    pipe.transformer.set_attn_processor(pipe.transformer.transformer_blocks[0].attn.processor)
    both = plan_of(choice(FIRST, "torch-math"), choice(SECOND, "torch-flash"))
    with pytest.raises(ValueError, match="share a processor"):
        loaded(both, "diffusers", tmp_path).load(pipe)


@pytest.mark.parametrize("own", ["sdpa", "eager"])
def test_transformers_runs_the_functions_of_each_phase_and_length(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from attention_kernels.integrations import transformers_attention

    hits: list[tuple[str, int, str]] = []
    running = [""]

    def note(kernel: str, key: Tensor) -> None:
        hits.append((running[-1], key.shape[2], kernel))

    def counted_sdpa(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        is_math = not torch.backends.cuda.flash_sdp_enabled()
        note("torch-math" if is_math else "torch-default", key)
        return SDPA(query, key, *args, **kwargs)

    def counted_ours(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        note(kwargs["precision"], key)
        return ours(query, key, *args, **kwargs)

    def counted_flash(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        note("fa2", key.transpose(1, 2))
        return flash_attn_stand_in.flash_attn_func(query, key, *args, **kwargs)

    flash = types.ModuleType("flash_attn")
    flash.flash_attn_func = counted_flash  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    monkeypatch.setattr(transformers_attention, "attention", counted_ours)
    layers = [f"model.layers.{index}.self_attn" for index in range(2)]
    in_prefill = [choice(f"base_model.model.{layers[1]}", "torch-math", phase="prefill")]
    if own == "sdpa":  # with `eager`, layer 0 keeps its own function and mask
        in_prefill = [choice(layers[0], "triton-sage", phase="prefill")]
        in_prefill.append(choice(layers[1], "fa2", phase="prefill"))
    plan = plan_of(
        choice(layers[0], "triton-decode", phase="decode", kv_lens=(11, 12)),
        choice(layers[0], "torch-default", 0.0, phase="decode", kv_lens=(14, 16)),
        *in_prefill,
    )
    model = model_of("llama")
    model.set_attn_implementation(own)
    ids = torch.arange(1, 21).view(2, 10)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    applied = loaded(plan, "transformers", tmp_path).load(model)
    monkeypatch.setattr(F, "scaled_dot_product_attention", counted_sdpa)
    with inside(model, running):
        assert torch.equal(model.generate(ids, **options), expected)
    default = ["torch-default"] if own == "sdpa" else []
    found = {
        (layer, length): [kernel for *at, kernel in hits if at == [layer, length]]
        for layer in layers
        for length in range(10, 16)
    }
    assert found == {
        (layers[0], 10): ["int8"] if own == "sdpa" else [],
        (layers[1], 10): ["fa2" if own == "sdpa" else "torch-math"],
        **{(layers[0], length): ["exact"] for length in (11, 12)},
        **{(layers[0], length): default for length in (13, 14, 15)},
        **{(layers[1], length): default for length in range(11, 16)},
    }
    applied.remove()
    hits.clear()
    assert torch.equal(model.generate(ids, **options), expected)
    assert {kernel for *_, kernel in hits} == {*default}
    assert model.config._attn_implementation == own
    assert not [
        name for module in model.modules() for name in vars(module) if "attention_plan" in name
    ]


def test_transformers_refuses_what_would_change_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn_stand_in)
    layer = "model.layers.0.self_attn"

    def load(module: str, kernel: str, own: str = "sdpa") -> Any:
        model = model_of("llama")
        model.set_attn_implementation(own)
        plan = plan_of(choice(module, kernel, phase="prefill"))
        loaded(plan, "transformers", tmp_path).load(model)
        return model

    with pytest.raises(ValueError, match=r"no module 'model\.layers\.9'"):
        load("model.layers.9", "fa2")
    with pytest.raises(ValueError, match="'flex_attention': give a model of transformers"):
        load(layer, "fa2", "flex_attention")
    with pytest.raises(ValueError, match="=None: give a model of transformers"):
        loaded(plan_of(), "transformers", tmp_path).load(types.SimpleNamespace(config={}))
    with pytest.raises(ImportError, match="flash_attn_interface"):
        load(layer, "fa3")
    model, ids = load(layer, "fa2"), torch.arange(12).view(2, 6)
    padded = torch.ones_like(ids)
    padded[1, :2] = 0
    with pytest.raises(NotImplementedError, match="for a layer without an attention mask"):
        model(ids, attention_mask=padded)


def test_comfyui_runs_the_functions_of_each_block_step_and_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits: list[str] = []
    functions: dict[str, Callable[..., Tensor]] = {}

    def register(name: str, function: Callable[..., Tensor]) -> None:
        def counted(*args: Any, **kwargs: Any) -> Tensor:
            hits.append(name)
            return comfyui_stand_in.attention_basic(*args, **kwargs)

        functions[name] = counted

    module: Any = types.ModuleType("comfy.ldm.modules.attention")
    module.REGISTERED_ATTENTION_FUNCTIONS, module.register_attention_function = functions, register
    for name in ("comfy", "comfy.ldm", "comfy.ldm.modules"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    register("flash", comfyui_stand_in.attention_basic)
    plan = plan_of(
        choice("transformer.transformer_blocks.1.attn", "triton-fp8", steps=(1, 3)),
        choice("transformer.single_transformer_blocks.0.attn", "fa2", kv_lens=(4, 5)),
        choice("transformer.single_transformer_blocks.0.attn", "triton-fa3", kv_lens=(9, 9)),
        choice("transformer.single_transformer_blocks.1.attn", "sage3", phase="encode"),
    )
    node = loaded(plan, "comfyui", tmp_path)
    model = types.SimpleNamespace(model_options={})
    model.clone = lambda: types.SimpleNamespace(model_options={})
    (changed,) = getattr(node.AttentionPlan(), node.AttentionPlan.FUNCTION)(model)
    assert model.model_options == {}
    assert node.NODE_CLASS_MAPPINGS["AttentionPlan"].INPUT_TYPES()["required"] == {
        "model": ("MODEL",)
    }
    options = changed.model_options["transformer_options"]
    levels = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])

    def run(block: str, index: int, level: float, kv_len: int) -> str:
        """Return the function that a block runs; empty for ComfyUI's own."""
        hits.clear()
        query, key = normal(1, 3, 8), normal(1, kv_len, 8)
        at = {"block_type": block, "block_index": index, "sample_sigmas": levels}
        given = {**options, **at, "sigmas": torch.tensor([level, level])}
        output = comfyui_stand_in.attention_basic(query, key, key, 2, transformer_options=given)
        assert torch.equal(output, comfyui_stand_in.attention_basic(query, key, key, 2))
        assert len(hits) <= 1
        return "".join(hits)

    ours = "attention_kernels"
    found = [run("double", 1, level, 3) for level in (1.0, 0.75, 0.6, 0.5, 0.25)]
    assert found == ["", *[f"{ours}_fp8"] * 4]
    assert [run("double", 0, 0.5, 3), run("single", 1, 0.5, 3)] == ["", ""]
    assert [run("single", 0, 1.0, length) for length in (3, 6, 7, 90)] == ["flash"] * 2 + [ours] * 2
    options["optimized_attention_override"] = loaded(
        plan_of(choice("blocks.1.attn", "fa2")), "comfyui", tmp_path
    ).Override()
    assert [run(kind, 1, 1.0, 3) for kind in ("single", "double")] == ["flash"] * 2
    with pytest.raises(ImportError, match="ComfyUI lacks the attention functions sage3"):
        loaded(plan_of(choice("blocks.0.attn", "sage3")), "comfyui", tmp_path).Override()
