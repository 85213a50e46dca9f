"""Tables of a plan in 80 columns."""

import re
from collections.abc import Sequence
from dataclasses import replace

from replay.plan.key_lengths import KeyLengths
from replay.plan.plan import Budget, LayerChoice, Plan, TotalError, Worst
from replay.plan.step_ranges import StepRange
from replay.plan.uniform import Uniform
from replay.report.plan_tables import fold, print_plan
from replay.report.tuning import used_kernels
from tests.printed import printed

BUDGET = Budget("cosine", 0.998)


def choice(
    module: str,
    kernel: str = "sage1",
    *,
    cosine: float = 0.9991,
    ms: float = 5.0,
    covered: bool = True,
    inside: bool = True,
) -> LayerChoice:
    worst = Worst(cosine, 0.01, 0.02) if covered else None
    saved = (10 - ms) * 50
    return LayerChoice(
        module, "denoise", kernel, covered, inside, worst, ms, 10.0, saved, 50, int(covered)
    )


def report(
    choices: Sequence[LayerChoice],
    uniforms: Sequence[Uniform] = (),
    total: TotalError | None = None,
) -> str:
    plan = Plan("cogvideo", "random, seed 0", BUDGET, "torch-default", list(choices))
    return printed(print_plan, replace(plan, total_error=total), uniforms)


def test_a_plan_says_nothing_to_the_terminal() -> None:
    """Names come from a recording, which may be hostile."""
    escape = "\x1b[2J\x07"
    chosen = replace(choice(f"blocks{escape}.0"), phase=escape)
    plan = Plan(escape, escape, BUDGET, "torch-default", [chosen], {f"k{escape}": escape})
    text = printed(print_plan, plan, [])
    assert "blocks" in text
    assert all(line.isprintable() for line in text.splitlines())


def names(modules: Sequence[str]) -> list[str]:
    return [name for name, _ in fold([choice(module) for module in modules])]


def test_layers_that_differ_in_a_number_are_one_line() -> None:
    assert names([f"blocks.{layer}.attn1" for layer in range(30)]) == ["blocks.0-29.attn1"]
    assert names(["blocks.3.a", "blocks.0.a", "blocks.1.a"]) == ["blocks.0-1,3.a"]
    assert names(["blocks.10.a", "blocks.9.a"]) == ["blocks.9-10.a"]
    unlike = ["blocks.0.a", "blocks.1.b", "blocks", ""]
    assert names(unlike) == unlike
    grid = [f"down.{part}.blocks.{layer}.a" for part in range(2) for layer in range(3)]
    assert names(grid) == ["down.0-1.blocks.0-2.a"]


def test_a_name_stands_for_its_members_alone() -> None:
    """Two of the four corners of a grid do not form a rectangle."""
    corners = ["down.0.blocks.1.a", "down.1.blocks.0.a"]
    assert names(corners) == corners
    ragged = ["down.0.blocks.0.a", "down.0.blocks.1.a", "down.1.blocks.0.a"]
    assert names(ragged) == ["down.0.blocks.0-1.a", "down.1.blocks.0.a"]


def test_unlike_choices_stay_apart() -> None:
    choices = [choice(f"blocks.{layer}.a") for layer in range(6)]
    choices[2] = choice("blocks.2.a", "torch-default")
    choices[3] = choice("blocks.3.a", "torch-default", covered=False, inside=False)
    assert [name for name, _ in fold(choices)] == ["blocks.0-1,4-5.a", "blocks.2.a", "blocks.3.a"]


def test_ranges_of_lengths_and_steps_are_lines_of_their_own() -> None:
    """A layer with one kernel, or one range of lengths, does not show its lengths."""
    choices = [
        replace(choice(f"blocks.{layer}.a", kernel), kv_lens=lengths)
        for layer in range(2)
        for kernel, lengths in (("sage1", KeyLengths(4, 4)), ("fa2", KeyLengths(60, 4096)))
    ]
    choices.append(replace(choice("blocks.2.a", "fa2"), kv_lens=KeyLengths(4, 4)))
    assert "step" not in report(choices)
    both = (("sage1", StepRange(0, 0)), ("fa2", StepRange(1, 49)))
    choices += [
        replace(choice(f"blocks.{layer}.b", kernel), kv_lens=KeyLengths(4, 4), steps=steps)
        for layer in range(2)
        for kernel, steps in both
    ]
    text = re.sub(r"\s+", " ", report(choices))
    assert "blocks.0-1.b denoise, step 0 sage1" in text
    assert "blocks.0-1.b denoise, steps 1 to 49 fa2" in text
    assert "blocks.0-1.a denoise, 4 keys sage1" in text
    assert "blocks.0-1.a denoise, 60 to 4,096 keys fa2" in text
    assert "blocks.2.a denoise fa2" in text
    assert "5 layers: fa2 at 5, sage1 at 4" in text


def test_plan_shows_mean_times_and_the_worst_error() -> None:
    choices = [choice(f"blocks.{layer}.a", ms=4.0 + layer) for layer in range(3)]
    choices[1] = choice("blocks.1.a", cosine=0.99829999, ms=5.0)
    text = report(choices, total=TotalError(0.5, 0.25, 0.00123))
    line = next(line for line in text.splitlines() if line.startswith("blocks"))
    # Mean time, baseline, sum of savings, and the worst cosine, not rounded up.
    assert line.split() == ["blocks.0-2.a", "denoise", "sage1", "5", "10", "750", "0.998299"]
    assert "cogvideo · cosine ≥ 0.998, total error ≤ 0.5" in text
    assert "random, seed 0" in text
    assert "750 ms of attention saved per run (predicted); 3 layers: sage1 at 3" in text
    assert "captured" not in text
    error = "total error 0.25; bound on the planned objective: within 0.12 %"
    assert error in re.sub(r"\s+", " ", text)


def test_uncovered_layers_and_exceeded_budgets_are_reported() -> None:
    text = report(
        [
            choice("blocks.0.a"),
            choice("blocks.1.a", "torch-default", covered=False, inside=False),
            choice("blocks.2.a", "torch-default", inside=False, cosine=0.9),
        ],
        total=TotalError(0.5, None, None),
    )
    told = re.sub(r"\s+", " ", text)
    assert "every choice of kernels has a total error above 0.5, so all layers keep" in told
    assert "1 of 3 layers have calls that were not captured, which keep the model's own" in told
    assert "1 of 3 layers have no kernel within cosine ≥ 0.998 and keep the model's own" in told


def test_a_layer_with_two_phases_is_one_layer() -> None:
    layers = [choice(f"blocks.{layer}.a") for layer in range(4)]
    options = {"phase": "decode", "kernel": "torch-default", "covered": False, "inside": False}
    choices = [*layers, *(replace(each, **options) for each in layers)]
    told = re.sub(r"\s+", " ", report(choices))
    assert "; 4 layers: sage1 at 4 in denoise, torch-default at 4 in decode" in told
    assert "4 of 4 layers in decode have calls that were not captured" in told
    plan = Plan("llama", "trained", BUDGET, "torch-default", choices)
    assert used_kernels(plan) == "sage1 in 4 of 4 layers"


def test_each_kernel_alone_has_a_line() -> None:
    uniforms = [
        Uniform("torch-default", 0.0, 3, 0, 0, 0, 0, "blocks.0.a", "denoise", 1.0),
        Uniform("sage1", 12.34567, 2, 1, 0, 0, 0, "blocks.2.a", "denoise", 0.91),
        Uniform("tied", 0.0, 3, 0, 0, 0, 0, "blocks.0.a", "denoise", 1.0, undecided=3),
        Uniform("flex", None, 2, 0, 0, 1, 0, "", "", None),
    ]
    lines = report([choice("blocks.0.a")], uniforms).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines[-4:]}
    assert rows["tied"][0] == "?"
    assert rows["sage1"] == ["12.35", "2", "1", "0", "0.910000", "blocks.2.a", "denoise"]
    assert rows["flex"] == ["-", "2", "0", "1", "-"]
    heading = next(line for line in lines if line.startswith("kernel"))
    assert "failed" in heading
    assert "falls back" not in heading


def test_names_of_kernels_stay_whole_and_no_figure_is_cut() -> None:
    """The table has every possible column, so the paths of modules are broken."""
    module = "transformer.single_transformer_blocks.0.attn.processor"
    kernels = ["triton-paged-decode-int8", "torch-flash-compiled", "sage1"]
    uniforms = [
        Uniform(kernel, 1234.5, 30, 12, 0, 3, 2, module, "denoise", 0.91) for kernel in kernels
    ]
    text = report([choice(module, kernel, ms=1234.5678) for kernel in kernels], uniforms)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    rows = [line.split()[:3] for line in text.splitlines()]
    for kernel in kernels:
        assert kernel in [row[2] for row in rows if len(row) == 3]
        assert [kernel, "1234", "30"] in rows
