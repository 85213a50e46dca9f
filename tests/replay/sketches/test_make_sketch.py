"""Sketches of small models, whose scores and errors are known exactly."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from replay.kernels.registry import Kernel
from replay.sketches.final_output import DecodedLatents, FinalOutput, error_between, final_output
from replay.sketches.gradients_on import GradientError, gradients_on
from replay.sketches.make_sketch import make_sketch
from replay.sketches.sketch import Place
from replay.sketches.traced_run import TracedRun, traced
from tests.factories import normal


class Attend(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return scaled_dot_product_attention(values, values, values)


class Sum(nn.Module):
    """Model whose output is linear in the outputs of its two attention layers: a + 2 b."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Attend(), Attend()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, values: Tensor) -> Tensor:
        return (self.a(values) + 2 * self.b(values.flip(2))) * self.weight


def shifted(by: float, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return scaled_dot_product_attention(query, key, value) + by


KERNELS = [
    Kernel("small", partial(shifted, 0.01)),
    Kernel("large", partial(shifted, 0.1)),
    Kernel("refuses", partial(shifted, 9.0), unsupported=lambda call: "no such calls"),
]


def run_of(model: nn.Module, *, mode: Callable[[], Any] = torch.no_grad) -> Callable[[], Tensor]:
    values = normal(1, 2, 8, 4)

    def run() -> Tensor:
        with mode():
            return model(values)  # type: ignore[no-any-return]

    return run


def test_scores_of_a_linear_model_are_exact() -> None:
    model = Sum()
    run = run_of(model)
    sketch = make_sketch({"": model}, [run], KERNELS, model="sum", directions=3)
    generator = torch.Generator().manual_seed(0)
    output = run()
    assert [place.module for place in sketch.places] == ["a", "b"]
    for scores in sketch.scores:
        u = torch.randn(output.shape, generator=generator)
        total = u.sum() / output.norm()
        expected = [[0.01 * total, 0.1 * total, 0.0], [0.02 * total, 0.2 * total, 0.0]]
        assert torch.allclose(scores, torch.tensor(expected), rtol=1e-4, atol=1e-6)
    assert sketch.runs == 4
    assert model.weight.requires_grad


def test_the_foretold_error_is_the_true_one() -> None:
    model = Sum()
    run = run_of(model)
    sketch = make_sketch({"": model}, [run], KERNELS, model="sum", directions=400)
    output = run()
    # Both layers shift the output alike, by 0.1 and by 0.2, so half of the cross terms is lost.
    size = output.numel() ** 0.5 / output.norm()
    energy = (0.1**2 + 0.2**2) / 2 + 0.3**2 / 2
    error = float(energy**0.5 * size)
    assert sketch.foretell(lambda *place: "large").error == pytest.approx(error, rel=0.1)
    one = sketch.foretell(lambda module, *place: "large" if module == "a" else "own")
    assert one.error == pytest.approx(float(0.1 * size), rel=0.1)


def test_inference_mode_is_refused() -> None:
    model = Sum()
    with pytest.raises(GradientError, match="inference_mode"):
        make_sketch({"": model}, [run_of(model, mode=torch.inference_mode)], KERNELS, model="sum")


def test_detached_outputs_are_refused() -> None:
    model = Sum()
    run = run_of(model)
    with pytest.raises(GradientError, match="detached"):
        make_sketch({"": model}, [lambda: run().detach()], KERNELS, model="sum")


def test_a_run_that_fails_with_gradients_is_refused() -> None:
    model = Sum()
    run = run_of(model)
    with pytest.raises(GradientError, match="instead of numpy arrays"):
        make_sketch({"": model}, [lambda: run().numpy()], KERNELS, model="sum")


def test_no_grad_works_again_after_a_sketch() -> None:
    weight = nn.Linear(2, 2)
    with gradients_on({"": weight}), torch.no_grad():
        assert torch.is_grad_enabled()
        assert not weight.weight.requires_grad
    with torch.no_grad():
        assert not torch.is_grad_enabled()
    assert weight.weight.requires_grad


def test_directions_of_logits_measure_kl() -> None:
    torch.manual_seed(0)
    logits, change = torch.randn(3, 5), 0.05 * torch.randn(3, 5)
    output = FinalOutput(logits, "kl")
    generator = torch.Generator().manual_seed(0)
    products = torch.stack([(output.direction(generator) * change).sum() for _ in range(4000)])
    energy = float((products / output.scale).square().mean())
    kl = error_between(output, FinalOutput(logits + change, "kl")) ** 2
    assert energy == pytest.approx(kl, rel=0.1)


def test_decoded_latents_stand_for_pictures() -> None:
    class Vae(nn.Module):
        def decode(self, latents: Tensor) -> Any:
            return latents.numpy()  # fails for tensors with gradients

    vae, decoded = Vae(), DecodedLatents()
    latents = torch.ones(2, requires_grad=True) * 2
    with decoded.kept({"vae": vae}):
        pictures = vae.decode(latents)
    assert final_output(pictures, decoded.latest).tensor is latents
    assert "decode" not in vars(vae)


class Denoiser(nn.Module):
    """Model that runs twice in a run, as denoisers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Sum()
        self.passes = 0

    def forward(self, hidden_states: Tensor, timestep: int) -> Tensor:
        self.passes += 1
        return torch.tanh(self.layers(hidden_states))  # type: ignore[no-any-return]


def denoised(model: nn.Module) -> Callable[[], Tensor]:
    values = normal(1, 2, 8, 4)

    def run() -> Tensor:
        with torch.no_grad():
            return model(model(values, timestep=0), timestep=1)  # type: ignore[no-any-return]

    return run


def test_recomputed_denoiser_has_the_same_scores() -> None:
    model = Denoiser()
    run = denoised(model)
    found = []
    for recompute in (False, True):
        with traced({"": model}, run, KERNELS, recompute=recompute) as one:
            found.append([one.scores(torch.ones(1, 2, 8, 4), keep=True) for _ in range(2)])
    kept, again = found
    assert list(kept[0]) == list(again[0])
    for place in kept[0]:
        assert torch.equal(kept[0][place], kept[1][place])
        assert torch.equal(kept[0][place], again[0][place])
        assert torch.equal(kept[0][place], again[1][place])
    assert model.passes == 2 + 2 + 2 * 2  # both passes, and again for each direction
    assert "forward" not in vars(model)


def test_passes_that_do_not_fit_are_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Denoiser()
    run = denoised(model)
    expected = make_sketch({"": model}, [run] * 2, KERNELS, model="toy", directions=2)
    scores = TracedRun.scores

    def fails_once(self: TracedRun, u: Tensor, *, keep: bool) -> dict[Place, Tensor]:
        monkeypatch.setattr(TracedRun, "scores", scores)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(TracedRun, "scores", fails_once)
    model.passes = 0
    found = make_sketch({"": model}, [run] * 2, KERNELS, model="toy", directions=2)
    assert found.places == expected.places
    assert model.passes == 2 + 2 * (2 + 2 * 2)


def test_scores_by_head_add_up_to_those_of_the_kernel() -> None:
    model = Denoiser()
    run = denoised(model)

    def by_head(kernel: str, heads: int) -> list[str]:
        return [f"{kernel} at {head}" for head in range(heads)]

    whole = make_sketch({"": model}, [run], KERNELS[:2], model="toy", directions=2)
    heads = make_sketch({"": model}, [run], KERNELS[:2], model="toy", directions=2, by_head=by_head)
    assert heads.kernels == ["small at 0", "small at 1", "large at 0", "large at 1"]
    for wholes, parts in ((whole.scores, heads.scores), (whole.local, heads.local)):
        sums = torch.stack([parts[..., :2].sum(-1), parts[..., 2:].sum(-1)], -1)
        assert torch.allclose(wholes, sums, rtol=1e-5)
