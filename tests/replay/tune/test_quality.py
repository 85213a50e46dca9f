"""Results of a run as named tensors, and quality budgets with figures by hand."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from replay.tune.outputs import named_tensors
from replay.tune.quality import METRICS, Quality, QualityBudget, QualityError, parse_quality

GREY = Image.new("RGB", (16, 12), (51, 102, 204))
FRAMES = np.full((2, 12, 16, 3), 51, np.uint8)
PICTURE = torch.full((1, 3, 12, 16), 0.2)
LATENTS = torch.full((1, 16, 4), -2.0)
LOGITS = torch.zeros(1, 3, 4)
IDS = torch.tensor([[0, 1, 2]])


@pytest.mark.parametrize(
    ("result", "shapes"),
    [
        (GREY, {"images": (1, 3, 12, 16)}),
        ([GREY, GREY], {"images": (2, 3, 12, 16)}),
        ([LATENTS, torch.ones(1, 3, 5, 5)], {"output": (1 * 16 * 4 + 3 * 5 * 5,)}),
        (([[GREY, GREY]],), {"images": (2, 3, 12, 16)}),
        (FRAMES, {"images": (2, 3, 12, 16)}),
        ([*FRAMES], {"images": (2, 3, 12, 16)}),
        (PICTURE[0], {"images": (1, 3, 12, 16)}),
        (SimpleNamespace(frames=FRAMES[None] / 255.0), {"frames": (2, 3, 12, 16)}),
        (
            SimpleNamespace(images=[GREY], latents=LATENTS),
            {"images": (1, 3, 12, 16), "latents": (1, 16, 4)},
        ),
        (LATENTS, {"output": (1, 16, 4)}),
        ("text", {"sequences": (1, 4)}),
        (["te", "t"], {"sequences": (1, 4)}),
        (IDS, {"sequences": (1, 3)}),
        (
            SimpleNamespace(sequences=IDS, logits=(LOGITS[:, 0],)),
            {"sequences": (1, 3), "logits": (1, 4)},
        ),
        ({"input_ids": IDS, "logits": LOGITS}, {"text_ids": (1, 3), "text_logits": (3, 4)}),
    ],
)
def test_result_becomes_named_tensors(result: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    found = named_tensors(result)
    assert {name: tuple(each.shape) for name, each in found.items()} == shapes
    if "images" in found:
        assert found["images"].flatten()[0] == pytest.approx(0.2)


def logits(*differences: float) -> dict[str, Tensor]:
    """Return a text whose first token has these logits, and all others 0."""
    first = torch.tensor([[[each, 0.0] for each in differences]])
    return named_tensors(
        {"input_ids": torch.zeros(1, len(differences), dtype=torch.int64), "logits": first}
    )


@pytest.mark.parametrize(
    ("budget", "baseline", "outputs", "figure", "holds"),
    [
        ("psnr=20", {"images": PICTURE}, {"images": PICTURE + 0.1}, 20.0, None),
        ("psnr=99", {"images": PICTURE}, {"images": PICTURE}, math.inf, True),
        ("psnr=1", {"images": PICTURE}, {"images": PICTURE * math.nan}, math.nan, False),
        ("relative_l1=0.2", {"output": LATENTS}, {"output": LATENTS * 1.1}, 0.1, True),
        ("cosine=0.9", {"output": LATENTS}, {"output": -LATENTS}, -1.0, False),
        ("top1=0.5", named_tensors("text"), named_tensors("tent"), 0.5, True),
        ("top1=0.6", logits(1.0, 1.0), logits(1.0, -1.0), 0.5, False),
        # ln(1 + e) and ln 2 are the negative log-likelihoods of the second token.
        ("perplexity=1.4", logits(0.0, 0.0), logits(-1.0, 0.0), (1 + math.e) / 2, False),
        ("kl=0.1", logits(0.0), logits(0.0), 0.0, True),
    ],
)
def test_figure_is_compared_with_the_limit(
    budget: str,
    baseline: dict[str, Tensor],
    outputs: dict[str, Tensor],
    figure: float,
    holds: bool | None,
) -> None:
    limit = parse_quality(budget)
    found = limit.figure(baseline, outputs)
    assert found == pytest.approx(figure, rel=1e-5, nan_ok=True)
    if holds is not None:
        assert Quality(limit, (found,)).holds is holds


@pytest.mark.parametrize("metric", METRICS)
def test_worst_prompt_decides(metric: str) -> None:
    budget = QualityBudget(metric, 0.5)
    quality = Quality(budget, (0.4, 0.6))
    assert not quality.holds
    assert quality.mean == pytest.approx(0.5)
    assert str(budget.shown(quality.worst)) in str(quality)


@pytest.mark.parametrize(
    ("budget", "searched", "figures", "foretold"),
    [
        # 3.182 is Student's t with three degrees of freedom.
        ("psnr=30", (38.0, 39.0), (40.0, 41.0), 39.5 - 3.182 * 1.291 * 1.118),
        ("psnr=30", (math.inf, math.inf), (math.inf, 100.0), 100.0),
        ("psnr=110", (math.inf, math.inf), (130.0, 130.0), 120 - 3.182 * 11.547 * 1.118),
        ("psnr=110", (130.0, 130.0), (130.0, 130.0), 130.0),
        ("kl=0.5", (0.1, 0.1), (0.1, 0.5), 0.2 + 3.182 * 0.2 * 1.118),
        ("kl=0.5", (), (0.1, 0.5), None),
        ("kl=0.5", (0.1, 0.2), (0.1, math.nan), None),
    ],
)
def test_quality_on_other_prompts_is_foretold(
    budget: str,
    searched: tuple[float, ...],
    figures: tuple[float, ...],
    foretold: float | None,
) -> None:
    limit = parse_quality(budget)
    quality = Quality(limit, figures, searched)
    if foretold is None:
        assert quality.foretold is None
        assert quality.is_safe == quality.holds
        return
    assert quality.foretold == pytest.approx(foretold, rel=0.01)
    assert quality.holds
    assert quality.is_safe == limit.holds(foretold)
    expected = f"{limit.digits(quality.foretold)} or better expected on other prompts"
    assert (expected in str(quality)) == bool(searched)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("psnr", "write it as psnr=35"),
        ("psnr=nan", "out of range: expected at least 0"),
        ("ssim=2", "out of range: expected -1 to 1"),
    ],
)
def test_budget_that_makes_no_sense_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(QualityError, match=sentence):
        parse_quality(text)
