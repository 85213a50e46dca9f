"""Drift: distance between the outputs of a run with a kernel and a run with the baseline.

A run's outputs are CPU tensors by name, as `models` names them. The following tensors are compared:

- language: `sequences` (1, T), prompt and new tokens; `logits` (steps, V) of the new tokens; and
  for a given text that the model read, `text_ids` (1, T) and `text_logits` (T, V);
- diffusion: `latents`; `frames` (F, C, H, W) or `images` (N, C, H, W) in [0, 1];
- training: `loss` and `grad_norm` (steps,), compared at the last step;
- any other model: `output`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from replay.accuracy.errors import CHUNK_ELEMENTS
from replay.accuracy.errors import compare as compare_tensors
from replay.rows.meaning import floored

Outputs = Mapping[str, Tensor]

Drift = dict[str, float | int | None]
"""Values by name (docs/fields.md); None for infinity and NaN, as in JSON."""

FIRST_GRADIENT = "first gradient of "
"""Beginning of the names of samples, each of a parameter's gradient in the first training step."""

TRAINING = {"loss": "loss", "grad_norm": "gradient norm"}
"""Names in tables of what a training step returns."""

BLACK = 0.02
"""A frame is black if its mean and standard deviation do not exceed this value: about 5 of 255."""

WINDOW = 11
"""Width in pixels of SSIM's Gaussian window, whose standard deviation is 1.5."""


def compare(baseline: Outputs, kernel: Outputs) -> Drift:
    """Compare the outputs of a kernel and the baseline; equal outputs give exactly 0 (or 1, or ∞).

    Raises:
        ValueError: a tensor's shape differs between the runs, or they read different texts.
    """
    found: Drift = {}
    main: tuple[Tensor, Tensor] | None = None
    for name in ("output", "images", "frames", "latents"):
        if pair := _both(name, baseline, kernel):
            main = pair
            if name in ("images", "frames"):
                found |= _pictures(*pair)
    if "sequences" in baseline and "sequences" in kernel:
        generated, compared = _generated(baseline, kernel)
        found |= generated
        main = compared or main
    if pair := _both("text_logits", baseline, kernel):
        if not torch.equal(baseline["text_ids"], kernel["text_ids"]):
            raise ValueError("the two runs read different texts: their logits cannot be compared")
        found |= _text(*pair, baseline["text_ids"][0])
        main = pair
    for name in TRAINING:
        if pair := _both(name, baseline, kernel):
            found[f"baseline_{name}"], found[name] = (float(each[-1]) for each in pair)
    if main is not None:
        found |= _distance(*main)
    found["nan_count"] = _nan_count(kernel)
    found["baseline_nan_count"] = _nan_count(baseline)
    return {
        name: None if value is None or not math.isfinite(value) else value
        for name, value in found.items()
    }


def cells(drift: Drift) -> list[str]:
    """Format a drift as a few short table cells: `PSNR 41.2 dB, SSIM 0.993`."""
    shown = []
    if "kl" in drift:
        shown.append(f"KL {_digits(drift['kl'], 2)}, top-1 {_percent(drift['top1_agreement'])}")
        if "perplexity" in drift:
            before, after = _digits(drift["baseline_perplexity"]), _digits(drift["perplexity"])
            shown.append(f"perplexity {before} → {after}")
    elif "generated_kl" in drift:
        shown.append(
            f"KL {_digits(drift['generated_kl'], 2)} over {drift['generated_compared']} tokens"
        )
    if "first_diverging_token" in drift:
        index = drift["first_diverging_token"]
        shown.append("same tokens" if index is None else f"differs from token {index}")
    if "frame_mse" in drift:
        psnr = "∞" if drift["frame_mse"] == 0 else _truncated(drift["psnr"], 1)
        shown.append(f"PSNR {psnr} dB, SSIM {_truncated(drift['ssim'], 3)}")
    if "relative_l1" in drift:
        shown.append(
            f"rel. L1 {_digits(drift['relative_l1'], 2)}, cosine {_truncated(drift['cosine'], 5)}"
        )
    for name, shown_name in TRAINING.items():
        if name in drift:
            before, after = _digits(drift[f"baseline_{name}"], 6), _digits(drift[name], 6)
            shown.append(f"{shown_name} {before} → {after}")
    if drift.get("black_frames"):
        shown.append(f"{drift['black_frames']} of {drift['frames']} black")
    if drift["nan_count"]:
        shown.append(f"{drift['nan_count']} NaN")
    return shown


def _both(name: str, baseline: Outputs, kernel: Outputs) -> tuple[Tensor, Tensor] | None:
    """Return both runs' tensors of that name; None if either is missing or empty."""
    if name not in baseline or name not in kernel:
        return None
    ours, theirs = baseline[name], kernel[name]
    if ours.shape != theirs.shape:
        raise ValueError(
            f"{name} has shape {tuple(theirs.shape)} with the kernel but {tuple(ours.shape)} with "
            "the baseline: the shapes must match"
        )
    return (ours, theirs) if ours.numel() else None


def _distance(baseline: Tensor, kernel: Tensor) -> Drift:
    shape = (1, 1, -1, baseline.shape[-1] if baseline.ndim else 1)
    errors = compare_tensors(kernel.reshape(shape), baseline.reshape(shape))
    # Rounding makes the cosine of a tensor with itself differ from 1.
    cosine = 1.0 if errors.relative_l1 == 0 else errors.cosine
    return {"relative_l1": errors.relative_l1, "cosine": cosine}


def _nan_count(outputs: Outputs) -> int:
    return sum(int(tensor.isnan().sum()) for tensor in outputs.values())


# Language


def _generated(baseline: Outputs, kernel: Outputs) -> tuple[Drift, tuple[Tensor, Tensor] | None]:
    """Compare generated tokens; also return the logits of tokens whose context both runs share.

    After the first differing token, the two runs continue different texts. Without logits, prompt
    and new tokens cannot be told apart, so the token's index counts from the sequence's start.
    """
    ours, theirs = baseline["sequences"][0], kernel["sequences"][0]
    length = min(len(ours), len(theirs))
    differing = (ours[:length] != theirs[:length]).nonzero().flatten().tolist()
    if not differing and len(ours) != len(theirs):
        differing = [length]  # end of the shorter sequence
    if "logits" not in baseline or "logits" not in kernel:
        return {"first_diverging_token": differing[0] if differing else None}, None
    steps = len(baseline["logits"])
    diverging = differing[0] - (len(ours) - steps) if differing else None
    if diverging is not None and diverging < 0:
        raise ValueError("the two runs had different prompts: their tokens cannot be compared")
    compared = min(steps, len(kernel["logits"]))
    if diverging is not None:
        compared = min(compared, diverging + 1)
    logits = baseline["logits"][:compared], kernel["logits"][:compared]
    divergence = [float(kl) for p, q in _log_probabilities(*logits) for kl in _kl(p, q)]
    return {
        "generated_kl": sum(divergence) / compared,
        "generated_compared": compared,
        "generated_tokens": steps,
        "first_diverging_token": diverging,
    }, logits


def _text(baseline: Tensor, kernel: Tensor, ids: Tensor) -> Drift:
    """Compare logits (T, V) on a text that both runs read, ids (T,); row t predicts token t + 1."""
    divergence = agreed = ours = theirs = 0.0
    row = 0
    for p, q in _log_probabilities(baseline, kernel):
        divergence += float(_kl(p, q).sum())
        agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        following = ids[row + 1 : row + 1 + len(p), None]
        row += len(p)
        ours -= float(p[: len(following)].gather(1, following).sum())
        theirs -= float(q[: len(following)].gather(1, following).sum())
    drift: Drift = {
        "kl": divergence / len(ids),
        "top1_agreement": agreed / len(ids),
        "text_tokens": len(ids),
    }
    if len(ids) > 1:
        drift["baseline_perplexity"] = _exp(ours / (len(ids) - 1))
        drift["perplexity"] = _exp(theirs / (len(ids) - 1))
    return drift


def _log_probabilities(baseline: Tensor, kernel: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield both log-softmaxes in float64, a few rows of (T, V) at a time."""
    rows = max(1, CHUNK_ELEMENTS // baseline.shape[-1])
    for ours, theirs in zip(baseline.split(rows), kernel.split(rows), strict=True):
        yield ours.double().log_softmax(-1), theirs.double().log_softmax(-1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Compute KL(p ‖ q) = Σ p (log p − log q) per row, in nats, from log-probabilities (T, V)."""
    # A token of probability 0 contributes nothing: 0 log 0 is 0.
    terms = (p.exp() * (p - q)).masked_fill(p == -math.inf, 0.0)
    return terms.sum(-1).clamp(min=0)


def _exp(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).exp())


# Pictures


def _pictures(baseline: Tensor, kernel: Tensor) -> Drift:
    """Compare frames or images (N, C, H, W) in [0, 1]; MSE and SSIM include all channels."""
    errors, similarities, black = [], [], 0
    for ours, theirs in zip(baseline, kernel, strict=True):
        ours, theirs = ours.double(), theirs.double()
        errors.append((ours - theirs).square().mean())
        similarities.append(ssim(ours, theirs))
        black += _is_black(theirs) and not _is_black(ours)
    # The tensors' max and min propagate NaN; Python's functions do not.
    mse, ssims = torch.stack(errors), torch.stack(similarities)
    return {
        "frame_mse": float(mse.mean()),
        "psnr": _psnr(mse.mean()),
        "worst_psnr": _psnr(mse.max()),
        "ssim": float(ssims.mean()),
        "worst_ssim": float(ssims.min()),
        "frames": len(errors),
        "black_frames": black,
    }


def _psnr(mse: Tensor) -> float:
    return float(-10 * mse.log10())


def ssim(first: Tensor, second: Tensor) -> Tensor:
    """Compute the mean structural similarity of two pictures (…, H, W) in [0, 1].

    The mean is over windows and channels. Wang, Bovik, Sheikh, Simoncelli 2004, equation 13:
    Gaussian windows of 11 × 11, standard deviation 1.5, that lie inside the picture; K1 = 0.01,
    K2 = 0.03. NaN for a picture smaller than a window.
    """
    if min(first.shape[-2:]) < WINDOW:
        return first.new_full((), math.nan)
    c1, c2 = 0.01**2, 0.03**2
    mean_1, mean_2 = _blurred(first), _blurred(second)
    variance_1 = _blurred(first * first) - mean_1 * mean_1
    variance_2 = _blurred(second * second) - mean_2 * mean_2
    covariance = _blurred(first * second) - mean_1 * mean_2
    luminance = (2 * mean_1 * mean_2 + c1) / (mean_1 * mean_1 + mean_2 * mean_2 + c1)
    contrast_structure = (2 * covariance + c2) / (variance_1 + variance_2 + c2)
    return (luminance * contrast_structure).mean()


def _blurred(picture: Tensor) -> Tensor:
    """Average over the window around each pixel: (…, H, W) → (…, H − 10, W − 10)."""
    offsets = torch.arange(WINDOW) - WINDOW // 2
    weights = torch.exp(-offsets.double().square() / (2 * 1.5**2))
    shares = (weights / weights.sum()).tolist()
    for dim in (-2, -1):  # a Gaussian is separable
        length = picture.shape[dim] - WINDOW + 1
        total = shares[0] * picture.narrow(dim, 0, length)
        for start in range(1, WINDOW):
            total.add_(picture.narrow(dim, start, length), alpha=shares[start])
        picture = total
    return picture


def _is_black(frame: Tensor) -> bool:
    seen = frame.nan_to_num(nan=0.0)  # NaN appears black in a picture file
    return bool(seen.mean() <= BLACK and seen.std(correction=0) <= BLACK)


# Cells


def _digits(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def _truncated(value: float | None, decimals: int) -> str:
    """Round down, so that a small drift does not look like zero drift."""
    return "-" if value is None else floored(decimals)(value)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{_truncated(100 * value, 1)} %"
