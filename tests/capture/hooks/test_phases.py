"""The phase of a forward pass follows from its module and arguments."""

from collections import Counter
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from capture.hooks.modules import CallSite, denoisers
from capture.hooks.phases import stepping, takes_time_step
from tests.capture.hooks.test_modules import sites_of
from tests.factories import tiny_llama


def tokens(count: int) -> Tensor:
    return torch.arange(count)[None] + 2


def generate(model: Any, *inputs: Tensor, **options: Any) -> Any:
    """Generate exactly three tokens."""
    length = {"max_new_tokens": 3, "min_new_tokens": 3}
    return model.generate(*inputs, do_sample=False, **length, **options)


@pytest.mark.parametrize(
    "name",
    [
        "FluxTransformer2DModel",
        "HiDreamImageTransformer2DModel",
        "ZImageTransformer2DModel",
        "StableCascadeUNet",
        "PriorTransformer",
        "UniDiffuserModel",
        "SD3ControlNetModel",
        "SD3MultiControlNetModel",
        "UNet2DConditionModel",
    ],
)
def test_denoisers_of_diffusers_take_a_time_step_under_any_name(name: str) -> None:
    kind = getattr(diffusers, name)
    assert takes_time_step(kind.__new__(kind))


def test_every_component_that_takes_a_time_step_is_a_denoiser() -> None:
    def part(kind: Any) -> Any:
        return kind.__new__(kind)

    parts = {
        "text_encoder": nn.Linear(1, 1),
        "transformer": part(diffusers.WanTransformer3DModel),
        "transformer_2": part(diffusers.WanTransformer3DModel),
        "controlnet": part(diffusers.SD3ControlNetModel),
        "prior_prior": part(diffusers.PriorTransformer),
        "vae": part(diffusers.AutoencoderKLWan),
        "vae_2": part(diffusers.AutoencoderKL),
    }
    for each in parts.values():
        each.__dict__.setdefault("_modules", {})
    assert denoisers(parts) == ["transformer", "transformer_2", "controlnet", "prior_prior"]
    assert denoisers({"unet": nn.Linear(1, 1), "vae": nn.Linear(1, 1)}) == ["unet"]


@pytest.mark.parametrize("name", ["t", "timestep_ratio", "timesteps", "sigma", "time_step"])
def test_any_name_of_a_time_step_means_denoising(
    layers: nn.Module, states: Tensor, name: str
) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def forward(self, states, {name}): return self.inner(states)", namespace)
    model = type("Model", (nn.Module,), {"forward": namespace["forward"]})()
    model.inner = layers
    for given in ((0.5,), (torch.tensor(3),)):
        assert {s.phase for s in sites_of({"": model}, lambda: model(states, *given))} == {  # noqa: B023
            "denoise"
        }


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.inner(*args, **options)


class Answerer(Wrapper):
    """Model that generates a whole text in one forward pass."""

    def forward(self, prompt: Tensor) -> Any:
        return generate(self.inner, prompt, pad_token_id=0)


def test_wrapped_language_model_keeps_its_phases_and_steps() -> None:
    model = Answerer(tiny_llama())
    sites = sites_of({"": model}, lambda: model(tokens(5)))
    assert [(site.step, site.phase) for site in sites] == [
        (step, phase) for step, phase in enumerate(["prefill", "decode", "decode"]) for _ in "ab"
    ]
    [inner] = stepping(model)
    assert inner is model.inner


def test_blip_2_reads_a_picture_and_generates() -> None:
    from transformers import Blip2Config, Blip2ForConditionalGeneration

    text = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 32}
    text |= {"num_attention_heads": 2, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    former = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32}
    former |= {"num_attention_heads": 2, "encoder_hidden_size": 32}
    config = Blip2Config(
        vision_config=vision,
        qformer_config=former,
        text_config={"model_type": "opt", **text},
        num_query_tokens=4,
        image_token_index=63,
    )
    model = Blip2ForConditionalGeneration(config).eval()
    ids = torch.cat([torch.full((1, 4), 63), tokens(3)], dim=1)

    picture = torch.randn(1, 3, 16, 16)
    sites = sites_of({"": model}, lambda: generate(model, input_ids=ids, pixel_values=picture))
    found = Counter((s.module.partition(".")[0], s.step, s.phase) for s in sites)
    text_sites = [key for key in found if key[0] == "language_model"]
    assert text_sites == [
        ("language_model", step, phase)
        for step, phase in enumerate(["prefill", "decode", "decode"])
    ]
    assert {key[1:] for key in found if key[0] != "language_model"} == {(0, "encode")}


def test_encoder_inside_a_language_model_encodes() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    model = T5ForConditionalGeneration(config).eval()
    sites = sites_of({"": model}, lambda: model(tokens(4), decoder_input_ids=tokens(2)))
    assert [(s.module.partition(".")[0], s.phase) for s in sites] == [
        ("encoder", "encode"),
        ("decoder", "prefill"),
        ("decoder", "prefill"),
    ]


@pytest.mark.parametrize(
    ("chunks", "phases"),
    [
        ([10, 10, 1], ["prefill", "prefill", "decode"]),
        ([10, 5, 1], ["prefill", "decode", "decode"]),
        ([1, 1, 9], ["prefill", "decode", "prefill"]),
    ],
)
def test_later_chunk_of_a_prompt_is_prefill(chunks: list[int], phases: list[str]) -> None:
    from transformers import DynamicCache

    model, cache = tiny_llama(), DynamicCache()

    def run() -> None:
        for count in chunks:
            model(tokens(count), past_key_values=cache)

    assert [site.phase for site in sites_of({"": model}, run)][::2] == phases


class HybridCache:
    """Cache whose first layer has linear attention and stores no tokens."""

    tokens = 0

    def get_seq_length(self, layer: int = 0) -> int:
        return self.tokens if layer == 1 else 0


def test_cache_is_filled_where_any_layer_holds_tokens(layers: Any, states: Tensor) -> None:
    class Hybrid(Wrapper):
        can_generate = staticmethod(lambda: True)

        def forward(self, input_ids: Tensor, past_key_values: HybridCache) -> Tensor:
            past_key_values.tokens += input_ids.shape[1]
            return self.inner(states)  # type: ignore[no-any-return]

    for index, layer in enumerate(layers.layers):
        layer.layer_idx = index
    model, cache = Hybrid(layers), HybridCache()

    def run() -> None:
        for count in (10, 1, 1):
            model(tokens(count), past_key_values=cache)

    assert [site.phase for site in sites_of({"": model}, run)][::2] == [
        "prefill",
        "decode",
        "decode",
    ]


def test_layer_watched_alone_knows_its_own_cache() -> None:
    model = tiny_llama()

    for layer in model.model.layers:
        for module in (layer, layer.self_attn):
            sites = sites_of({"": module}, lambda: generate(model, tokens(5), pad_token_id=0))
            assert [(site.step, site.phase) for site in sites if site.module] == [
                (0, "prefill"),
                (1, "decode"),
                (2, "decode"),
            ]


def test_cross_attention_watched_alone_decodes_once_it_has_keys() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    model = T5ForConditionalGeneration(config).eval()
    cross = model.decoder.block[1].layer[1].EncDecAttention

    sites = sites_of({"": cross}, lambda: generate(model, tokens(4), decoder_start_token_id=0))
    phases = [site.phase for site in sites if site.module]
    assert phases == ["prefill", "decode", "decode"]


def test_function_that_is_recomputed_belongs_to_no_module_and_is_recomputation() -> None:
    from torch.nn import functional

    query = torch.randn(1, 1, 2, 8, requires_grad=True)

    def run() -> None:
        attend = functional.scaled_dot_product_attention
        with torch.enable_grad():
            output = checkpoint(lambda q: attend(q, q, q), query, use_reentrant=False)
            output.sum().backward()  # type: ignore[union-attr]

    sites = sites_of({"": nn.Linear(1, 1)}, run)
    assert sites == [CallSite("", 0, "encode"), CallSite("", 0, "recompute")]
