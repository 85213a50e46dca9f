"""Recordings, kernels and plans work on models as users of diffusers prepare them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from diffusers import UNet2DConditionModel
from diffusers.hooks import apply_group_offloading
from torch import Tensor, nn

import attention_replay as ar
from capture import load, record
from replay import use_kernel, use_plan
from replay.timing.statistics import summarize
from tests.tiny_flux import model, step

from .conftest import plan_of

MODULES = ["transformer_blocks.0.attn", "single_transformer_blocks.0.attn"]


class LowRank(nn.Module):
    """LoRA as PEFT adds it: a layer that wraps the original layer."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        added: Tensor = self.lora_B(self.lora_A(hidden_states))
        base: Tensor = self.base_layer(hidden_states)
        return base + added


def offload_groups(denoiser: Any, offload_type: str) -> None:
    apply_group_offloading(
        denoiser, onload_device="cpu", offload_type=offload_type, num_blocks_per_group=1
    )


def offload_modules(denoiser: Any) -> None:
    """Offload modules as `enable_sequential_cpu_offload` does."""
    cpu_offload(denoiser, execution_device=torch.device("cpu"))


def add_lora(denoiser: Any) -> None:
    for name, module in list(denoiser.named_modules()):
        if name.endswith((".to_q", ".to_k", ".to_v")):
            denoiser.set_submodule(name, LowRank(module))


def store_in_eight_bits(denoiser: Any) -> None:
    denoiser.enable_layerwise_casting(
        storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32
    )


def compile_blocks(denoiser: Any) -> None:
    denoiser.compile_repeated_blocks(backend="eager", fullgraph=True)


CHANGES: dict[str, Callable[[Any], None]] = {
    "group offload, blocks": lambda denoiser: offload_groups(denoiser, "block_level"),
    "group offload, leaves": lambda denoiser: offload_groups(denoiser, "leaf_level"),
    "sequential offload": offload_modules,
    "LoRA": add_lora,
    "eight-bit storage": store_in_eight_bits,
    "compiled blocks": compile_blocks,
}


def with_ip_adapter() -> Any:
    """Return a tiny UNet whose cross attention reads 77 keys of a text and 4 of an image."""
    torch.manual_seed(0)
    unet: Any = UNet2DConditionModel(
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(32,),
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("UpBlock2D",),
        mid_block_type=None,
        cross_attention_dim=32,
        attention_head_dim=2,
    )
    names = ("1.to_k_ip.weight", "1.to_v_ip.weight")
    image = {"proj.weight": torch.randn(4 * 32, 16), "proj.bias": torch.zeros(4 * 32)}
    image |= {"norm.weight": torch.ones(32), "norm.bias": torch.zeros(32)}
    adapter = {name: torch.randn(32, 32) for name in names}
    unet._load_ip_adapter_weights([{"image_proj": image, "ip_adapter": adapter}])
    return unet.eval()


def test_ip_adapter_has_a_kernel_for_each_key_length(tmp_path: Path) -> None:
    unet = with_ip_adapter()
    text, image = torch.randn(1, 77, 32), {"image_embeds": [torch.randn(1, 1, 16)]}

    @torch.no_grad()
    def denoise(text: Tensor) -> Tensor:
        output: Tensor = unet(
            torch.ones(1, 4, 8, 8), torch.tensor(5), text, added_cond_kwargs=image
        ).sample
        return output

    with record(unet, tmp_path / "calls"):
        expected = denoise(text)
    kernels = ["torch-default", "torch-math", "torch-flash"]
    quick: Any = {"device": "cpu", "rounds": 3, "workers": False, "progress": False}
    measured = ar.replay(tmp_path / "calls", kernels=kernels, for_model=True, **quick)
    # Set the times, which depend on the machine.
    ms = {("torch-math", 4): 1.0, ("torch-flash", 77): 1.0}
    rows = [
        replace(each, time_ms=summarize([ms.get((each.kernel, each.call.shape.kv_len), 9.0)] * 10))
        for each in measured
    ]
    ar.plan(tmp_path / "calls", rows).save(tmp_path / "plan.json")
    with use_plan(tmp_path / "plan.json", unet) as swap:
        torch.testing.assert_close(denoise(text), expected)
    assert {name: tally.hits for name, tally in swap.kernels.items()} == {
        "torch-default": 1,
        "torch-math": 1,
        "torch-flash": 1,
    }
    said = "a call has 231 keys, for which the plan was not made"
    with pytest.warns(UserWarning, match=said), use_plan(tmp_path / "plan.json", unet):
        denoise(text.repeat(1, 3, 1))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(change, id=name, marks=[pytest.mark.slow] * (change is compile_blocks))
        for name, change in CHANGES.items()
    ],
)
def test_calls_are_recorded_and_exchanged(
    change: Callable[[Any], None], eightfold: str, tmp_path: Path
) -> None:
    denoiser = model()
    torch.manual_seed(1)
    change(denoiser)
    plan = plan_of((MODULES[0], "denoise", eightfold), (MODULES[1], "denoise", "torch-math"))
    with torch.no_grad():
        expected = step(denoiser)
        with record(denoiser, tmp_path / "calls") as recording:
            assert torch.equal(step(denoiser), expected)
        with use_kernel("torch-math") as swap:
            assert torch.allclose(step(denoiser), expected, atol=1e-5)
        with use_plan(plan, denoiser) as planned:
            assert not torch.allclose(step(denoiser), expected, atol=1e-3)
        assert torch.equal(step(denoiser), expected)
    calls = list(load(tmp_path / "calls"))
    assert (recording.seen, recording.problems, recording.missed_attention) == (2, [], [])
    assert {(call.origin.module, call.origin.phase) for call in calls} == {
        (module, "denoise") for module in MODULES
    }
    assert (swap.hits, swap.fallbacks) == (2, {})
    assert {name: tally.hits for name, tally in planned.kernels.items()} == {
        eightfold: 1,
        "torch-math": 1,
    }
    assert planned.missing == []
