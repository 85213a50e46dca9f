"""Errors that a sketch foretells from its scores, in hand-computed numbers."""

import math
from pathlib import Path

import pytest
import torch

from replay.plan.plan import Budget, LayerChoice, Plan
from replay.plan.step_ranges import StepRange
from replay.sketches.sketch import ErrorSketch, Place, SketchError

FIRST, SECOND = Place("blocks.0", "denoise", 64, 0), Place("blocks.1", "denoise", 64, 1)
OWN = "torch-default"


def sketch(scores: list[list[list[float]]], prompts: list[int] | None = None) -> ErrorSketch:
    """Return a sketch with scores [direction][place][kernel]."""
    tensor = torch.tensor(scores)
    _, places, kernels = tensor.shape
    return ErrorSketch(
        "toy",
        "relative_l2",
        ["rough", "fine"][:kernels],
        [FIRST, SECOND][:places],
        prompts or [0] * len(scores),
        tensor,
        torch.ones(places, kernels),
        runs=1 + len(scores),
        picture_db=15.0,
    )


def rough(*place: object) -> str:
    return "rough"


def test_half_of_the_cross_terms_is_kept() -> None:
    # Sums over places: 1 + 2 = 3 and 3 - 1 = 2, mean square 6.5; squares alone: 5 and 10, mean 7.5.
    foretold = sketch([[[1.0], [2.0]], [[3.0], [-1.0]]]).foretell(rough)
    assert foretold.error == pytest.approx(math.sqrt((6.5 + 7.5) / 2))
    assert foretold.psnr == pytest.approx(15 - 10 * math.log10(7))
    # First place: (1 + 9)/2/2 + (1·3 + 3·2)/2/2 = 4.75; second: (4 + 1)/4 + (2·3 - 1·2)/4 = 2.25.
    assert foretold.share_by("module") == pytest.approx(
        {"blocks.0": 4.75 / 7, "blocks.1": 2.25 / 7}
    )
    assert foretold.share_by("step") == pytest.approx({0: 4.75 / 7, 1: 2.25 / 7})


def test_prompts_are_averaged_geometrically() -> None:
    foretold = sketch([[[0.01]], [[1.0]]], prompts=[0, 1]).foretell(rough)
    assert foretold.error == pytest.approx(0.1)


def test_a_prompt_that_explodes_weighs_as_much_as_others() -> None:
    # Relative to its scale, the first prompt has a rough energy of 4 and the second of 1.
    scores = [[[2.0, 0.5]], [[1000.0, 1000.0]]]
    made = sketch(scores, prompts=[0, 1])
    scale = math.sqrt(1.0 * 1000.0**2)
    assert made.foretell(rough).error == pytest.approx(math.sqrt(scale * (4 + 1) / 2))


def test_a_standard_error_leaves_out_a_prompt_at_a_time() -> None:
    # Without a prompt, the energy is the scale of the other: levels of 0 and -40 dB, whose
    # jackknife is √(1/2 (20² + 20²)) = 20 dB.
    foretold = sketch([[[0.01]], [[1.0]]], prompts=[0, 1]).foretell(rough)
    assert foretold.margin_db == pytest.approx(20)
    assert foretold.upper == pytest.approx(1.0)
    # Of 2 directions, one prompt has 10 log₁₀(1 + √(2/2)).
    one = sketch([[[0.01]], [[1.0]]]).foretell(rough)
    assert one.margin_db == pytest.approx(10 * math.log10(2))


def test_the_models_own_attention_has_no_error() -> None:
    foretold = sketch([[[1.0], [2.0]]]).foretell(lambda *place: OWN)
    assert foretold.error == 0
    assert foretold.psnr == math.inf
    assert not foretold.by_place


def test_an_error_of_logits_is_a_root_of_kl() -> None:
    made = sketch([[[0.1]]])
    logits = ErrorSketch(**{**vars(made), "measure": "kl", "picture_db": None})
    assert logits.foretell(rough).kl == pytest.approx(0.01)


def plan(kernel: str, step: int) -> Plan:
    choice = LayerChoice(
        *("blocks.0", "denoise", kernel, True, True, None, None, None, 0.0, 1, 1),
        steps=StepRange(step, step),
    )
    return Plan("toy", "", Budget("cosine", -1.0), OWN, [choice])


def test_a_plan_counts_at_its_steps() -> None:
    made = sketch([[[3.0], [4.0]]])
    assert made.foretell(plan("rough", step=0)).error == pytest.approx(3.0)
    assert made.foretell(plan("rough", step=1)).error == 0


def test_a_kernel_without_scores_is_refused() -> None:
    with pytest.raises(SketchError, match="no errors of other: make it again with --kernels rough"):
        sketch([[[1.0]]]).foretell(plan("other", step=0))


def test_a_sketch_survives_its_file(tmp_path: Path) -> None:
    made = sketch([[[1.0, 0.5], [2.0, 0.25]]])
    made.foretell(rough)
    made.save(tmp_path / "sketch")
    loaded = ErrorSketch.load(tmp_path / "sketch")
    assert loaded.foretell(rough) == made.foretell(rough)
    assert loaded.places == made.places


@pytest.mark.parametrize("content", [None, b"", b"no sketch, but longer than eight bytes"])
def test_a_file_that_is_no_sketch_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "sketch").write_bytes(content)
    with pytest.raises(SketchError, match=r"sketch.*replay foretell"):
        ErrorSketch.load(tmp_path / "sketch")
