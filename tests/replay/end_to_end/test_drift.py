"""Drift metrics of hand-made outputs, and of real models with wrong kernels."""

import math

import pytest
import torch
from torch import Tensor

from replay.end_to_end.drift import cells, compare, ssim


def log(*probabilities: list[float]) -> Tensor:
    """Return the logits of these distributions."""
    return torch.tensor(probabilities).log()


def test_a_text_by_hand() -> None:
    """The text has three positions with tokens 0, 1, 1."""
    ids = torch.tensor([[0, 1, 1]])
    baseline = log([0.6, 0.4], [0.25, 0.75], [0.9, 0.1])
    kernel = log([0.25, 0.75], [0.75, 0.25], [0.9, 0.1]) + 3.0  # a constant changes nothing
    drift = compare(
        {"text_ids": ids, "text_logits": baseline}, {"text_ids": ids, "text_logits": kernel}
    )
    first = 0.6 * math.log(0.6 / 0.25) + 0.4 * math.log(0.4 / 0.75)
    second = 0.25 * math.log(0.25 / 0.75) + 0.75 * math.log(0.75 / 0.25)
    assert drift["kl"] == pytest.approx((first + second) / 3, rel=1e-6)
    assert drift["baseline_perplexity"] == pytest.approx(1 / math.sqrt(0.4 * 0.75), rel=1e-6)
    assert drift["perplexity"] == pytest.approx(1 / math.sqrt(0.75 * 0.25), rel=1e-6)
    assert drift["text_tokens"] == 3
    assert drift["top1_agreement"] == pytest.approx(1 / 3)
    assert cells(drift)[:2] == ["KL 0.27, top-1 33.3 %", "perplexity 1.83 → 2.31"]


def test_a_text_longer_than_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(50, (1, 40), generator=generator)
    baseline, kernel = (torch.randn(40, 50, generator=generator) for _ in range(2))
    runs = [{"text_ids": ids, "text_logits": logits} for logits in (baseline, kernel)]
    whole = compare(*runs)
    monkeypatch.setattr("replay.end_to_end.drift.CHUNK_ELEMENTS", 50 * 7)
    assert compare(*runs) == pytest.approx(whole)
    p, q = (logits.double().softmax(-1) for logits in (baseline, kernel))
    kl = torch.nn.functional.kl_div(q.log(), p, reduction="batchmean")
    nll = torch.nn.functional.cross_entropy(kernel[:-1].double(), ids[0, 1:])
    assert whole["kl"] == pytest.approx(float(kl))
    assert whole["perplexity"] == pytest.approx(float(nll.exp()))


def test_tokens_of_probability_zero_add_nothing() -> None:
    ids = torch.tensor([[0, 1]])
    baseline = {"text_ids": ids, "text_logits": log([0.5, 0.5, 0.0], [0.5, 0.5, 0.0])}
    kernel = {"text_ids": ids, "text_logits": log([0.5, 0.25, 0.25], [0.5, 0.5, 0.0])}
    assert compare(baseline, kernel)["kl"] == pytest.approx(0.5 * math.log(2) / 2, rel=1e-6)
    assert compare(kernel, baseline)["kl"] is None  # infinite


def generation(*new: int, logits: list[Tensor] | None = None) -> dict[str, Tensor]:
    """Return a generation with a prompt of two tokens and these new tokens."""
    steps = log(*([0.5, 0.5] for _ in new)) if logits is None else torch.stack(logits)
    return {"sequences": torch.tensor([[7, 7, *new]]), "logits": steps}


def test_generated_tokens_are_compared_up_to_the_first_that_differs() -> None:
    shared, differing, unrelated = log([0.5, 0.5], [0.25, 0.75], [0.01, 0.99])
    baseline = generation(0, 0, 1, logits=[shared, shared, shared])
    kernel = generation(0, 1, 1, logits=[shared, differing, unrelated])
    drift = compare(baseline, kernel)
    kl = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert drift["first_diverging_token"] == 1
    assert drift["generated_compared"] == 2
    assert drift["generated_tokens"] == 3
    assert drift["generated_kl"] == pytest.approx(kl / 2, rel=1e-6)
    assert cells(drift)[:2] == ["KL 0.072 over 2 tokens", "differs from token 1"]


def test_generations_that_end_early_or_have_no_logits() -> None:
    assert compare(generation(0, 0, 1), generation(0, 0))["first_diverging_token"] == 2
    whole, other = ({"sequences": torch.tensor([[7, 7, last]])} for last in (1, 2))
    assert compare(whole, other)["first_diverging_token"] == 2
    assert compare(whole, whole)["first_diverging_token"] is None
    with pytest.raises(ValueError, match="different prompts"):
        compare(generation(0), {**generation(0), "sequences": torch.tensor([[7, 6, 0]])})


def slow_ssim(first: Tensor, second: Tensor) -> float:
    """Compute the paper's equations 13 to 16, window by window."""
    weights = torch.tensor(
        [
            [math.exp(-((y - 5) ** 2 + (x - 5) ** 2) / (2 * 1.5**2)) for x in range(11)]
            for y in range(11)
        ],
        dtype=torch.float64,
    )
    weights /= weights.sum()
    values = []
    for channel in range(first.shape[0]):
        for top in range(first.shape[1] - 10):
            for left in range(first.shape[2] - 10):
                a = first[channel, top : top + 11, left : left + 11]
                b = second[channel, top : top + 11, left : left + 11]
                mean_a, mean_b = (weights * a).sum(), (weights * b).sum()
                variance_a = (weights * (a - mean_a) ** 2).sum()
                variance_b = (weights * (b - mean_b) ** 2).sum()
                covariance = (weights * (a - mean_a) * (b - mean_b)).sum()
                numerator = (2 * mean_a * mean_b + 0.0001) * (2 * covariance + 0.0009)
                denominator = (mean_a**2 + mean_b**2 + 0.0001) * (variance_a + variance_b + 0.0009)
                values.append(float(numerator / denominator))
    return sum(values) / len(values)


def test_ssim_equals_the_papers_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.rand(2, 14, 17, generator=generator, dtype=torch.float64)
    second = (first + 0.3 * torch.randn(2, 14, 17, generator=generator)).clamp(0, 1)
    expected = slow_ssim(first, second)
    assert 0.1 < expected < 0.9
    assert float(ssim(first, second)) == pytest.approx(expected, rel=1e-9)
    assert float(ssim(first, first)) == 1.0
    assert ssim(first[:, :10], first[:, :10]).isnan()


def test_pictures_by_hand() -> None:
    frames = torch.full((3, 3, 16, 16), 0.5, dtype=torch.float64)
    other = frames.clone()
    other[1] += 0.1
    other[2] += 0.2
    drift = compare({"frames": frames}, {"frames": other})
    assert drift["frame_mse"] == pytest.approx((0 + 0.01 + 0.04) / 3)
    assert drift["psnr"] == pytest.approx(10 * math.log10(3 / 0.05))
    assert drift["worst_psnr"] == pytest.approx(10 * math.log10(1 / 0.04))
    flat = [(2 * 0.5 * x + 1e-4) / (0.25 + x * x + 1e-4) for x in (0.5, 0.6, 0.7)]
    assert drift["ssim"] == pytest.approx(sum(flat) / 3)
    assert drift["worst_ssim"] == pytest.approx(flat[2])
    assert drift["relative_l1"] == pytest.approx(0.3 / 1.5)
    assert drift["frames"] == 3
    assert cells(drift)[0] == "PSNR 17.7 dB, SSIM 0.976"


def test_black_frames_and_nan() -> None:
    baseline = torch.full((4, 3, 16, 16), 0.5)
    baseline[3] = 0.0  # also black in the baseline
    kernel = baseline.clone()
    kernel[0] = 0.01
    kernel[1] = math.nan
    kernel[2, :, :8] = 0.0  # half of the frame is not black
    drift = compare({"frames": baseline}, {"frames": kernel})
    assert drift["black_frames"] == 2
    assert (drift["nan_count"], drift["baseline_nan_count"]) == (3 * 16 * 16, 0)
    assert drift["psnr"] is drift["ssim"] is drift["relative_l1"] is None
    assert cells(drift) == ["PSNR - dB, SSIM -", "rel. L1 -, cosine -", "2 of 4 black", "768 NaN"]
    reverse = compare({"frames": kernel}, {"frames": baseline})
    assert (reverse["nan_count"], reverse["baseline_nan_count"]) == (0, 3 * 16 * 16)
    assert reverse["black_frames"] == 0


def test_other_outputs_by_hand() -> None:
    baseline = {"output": torch.tensor([1.0, -2.0, 5.0])}
    drift = compare(baseline, {"output": torch.tensor([1.0, -2.0, 6.0])})
    assert drift["relative_l1"] == pytest.approx(1 / 8)
    assert drift["cosine"] == pytest.approx(35 / math.sqrt(30 * 41))
    assert cells(drift) == ["rel. L1 0.12, cosine 0.99796"]
    scalar = compare({"output": torch.tensor(2.0)}, {"output": torch.tensor(3.0)})
    assert scalar["relative_l1"] == 0.5
    assert compare({}, {}) == {"nan_count": 0, "baseline_nan_count": 0}
    trained = [
        {"loss": torch.tensor([3.0, last]), "grad_norm": torch.ones(2)} for last in (2, math.nan)
    ]
    drift = compare(*trained)
    assert (drift["baseline_loss"], drift["loss"], drift["nan_count"]) == (2, None, 1)
    assert cells(drift) == ["loss 2 → -", "gradient norm 1 → 1", "1 NaN"]


def test_outputs_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"output has shape \(3,\) with the kernel but \(2,\)"):
        compare({"output": torch.ones(2)}, {"output": torch.ones(3)})
    logits = torch.zeros(2, 4)
    texts = [{"text_ids": torch.tensor([[0, last]]), "text_logits": logits} for last in (1, 2)]
    with pytest.raises(ValueError, match="different texts"):
        compare(*texts)
