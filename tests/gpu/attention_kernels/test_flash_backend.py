"""SDPA's flash backend may be ours: same results and gradients, in CogVideoX too."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attention_kernels as ak
from attention_kernels.integrations import torch_attention

functions = torch.nn.attention


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Activate our backend, and count its calls."""
    found: list[str] = []
    attend = torch_attention.attend

    def counted(*args: object, **options: object) -> object:
        found.append("attend")
        return attend(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch_attention, "attend", counted)
    ak.register("torch")
    functions.activate_flash_attention_impl("attention_kernels")
    yield found
    functions.restore_flash_attention_impl()


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("q_len", "kv_len", "head_dim", "is_causal"),
    [(300, 300, 64, True), (1, 500, 128, False), (128, 128, 40, False)],
)
def test_flash_backend_is_ours(
    q_len: int, kv_len: int, head_dim: int, is_causal: bool, calls: list[str]
) -> None:
    query = normal(2, q_len, 4, head_dim).transpose(1, 2).requires_grad_()
    key, value = (normal(2, kv_len, 4, head_dim).transpose(1, 2).requires_grad_() for _ in range(2))
    found = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(backend):
            output = scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        found[backend] = (output, *torch.autograd.grad(output.square().sum(), (query, key, value)))
    assert len(calls) == 1
    for ours, expected in zip(*found.values(), strict=True):
        torch.testing.assert_close(ours, expected, atol=0.06, rtol=0.06)


def test_cogvideox_runs_our_kernels(calls: list[str]) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_embed_dim=16,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=5,
        time_embed_dim=16,
    ).to("cuda", torch.bfloat16)
    inputs = normal(1, 2, 4, 8, 8), normal(1, 226, 16), torch.tensor([5], device="cuda")
    outputs = []
    with torch.no_grad():
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
            with sdpa_kernel(backend):
                outputs.append(model(*inputs, return_dict=False)[0])
    assert len(calls) == 2
    torch.testing.assert_close(*outputs, atol=0.05, rtol=0.05)
