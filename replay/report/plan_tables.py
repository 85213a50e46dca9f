"""Tables of a plan in 80 columns: the choices, and each kernel's result if used at every layer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from rich.console import Console
from rich.text import Text

from capture.call.head_ranges import ranges
from capture.text.counted import counted
from capture.text.printable import printable
from replay.kernels.kernel_names import shortened
from replay.plan.key_lengths import KeyLengths
from replay.plan.plan import Budget, LayerChoice, Plan, TotalError
from replay.plan.step_ranges import StepRange
from replay.plan.uniform import Uniform
from replay.report.fitted import FittedTable
from replay.rows.meaning import floored

NAME_WIDTH = 22
PLACE_WIDTH = 16
"""Width of a module's path in the table of single kernels, in characters."""
PATH_WIDTH = 8
"""Minimum width of a wrapped module's path, in characters."""


def print_plan(plan: Plan, uniforms: Sequence[Uniform], console: Console) -> None:
    """Print a plan and its savings, then the savings of using one kernel at every layer.

    Layers with the same kernel share a line, such as `blocks.0-29.attn1`, if their modules differ
    only in a number. The line shows the mean time over their calls and the worst error. A layer
    that has several kernels has a line for each range of key lengths and of steps.
    """
    metric = plan.budget.metric
    console.print()
    title = " · ".join(filter(None, ("plan", plan.model, plan.device, plan.limits)))
    console.print(Text(printable(title), "bold"))
    console.print(Text(printable(f"weights: {plan.weights}"), "dim"))
    table = _table(("layers", "phase", "kernel"), ("ms", "was", "saved ms", metric))
    divided = _divided(plan.choices)
    # Merge layers with equal choices, so that the table of a large model fits on a screen.
    for name, choices in fold(plan.choices):
        first = choices[0]
        calls = [first.phase, *map(str, _ranges(first, divided))]
        style = "" if first.inside else "yellow" if first.covered else "dim"
        table.add_row(
            *(
                Text(cell, style)
                for cell in (
                    _at_dots(name, NAME_WIDTH) or "(no module)",
                    printable(", ".join(calls)),
                    shortened(first.kernel),
                    _mean_ms(choices, lambda choice: choice.time_ms),
                    _mean_ms(choices, lambda choice: choice.baseline_ms),
                    f"{sum(choice.saved_ms for choice in choices):.4g}",
                    _worst_of(choices, plan.budget) if first.covered else "not captured",
                )
            )
        )
    console.print(table)
    console.print(_total(plan))
    if plan.total_error is not None:
        console.print(Text(_error_sentence(plan.total_error)))
    for note in _notes(plan):
        console.print(Text(printable(note), "yellow"))
    console.print()
    console.print(Text("one kernel at every layer and phase", "bold"))
    console.print(_uniform_table(uniforms, plan.budget))


def fold(choices: Sequence[LayerChoice]) -> list[tuple[str, list[LayerChoice]]]:
    """Merge equal choices for modules whose names differ only in numbers.

    A merged name, such as `blocks.0-3,7.attn1`, stands for exactly the merged layers.
    """
    groups = [(tuple(choice.module.split(".")), [choice]) for choice in choices]
    divided = _divided(choices)
    # Start at the end of the path, where layer indices follow indices of model parts.
    for position in reversed(range(max((len(parts) for parts, _ in groups), default=0))):
        mergeable: dict[object, list[tuple[tuple[str, ...], list[LayerChoice]]]] = {}
        for parts, members in groups:
            is_numbered = parts[position : position + 1] and parts[position].isdigit()
            rest = (*parts[:position], None, *parts[position + 1 :]) if is_numbered else parts
            mergeable.setdefault((_kind(members[0], divided), rest), []).append((parts, members))
        groups = [_merged(each, position) for each in mergeable.values()]
    return [(".".join(parts), members) for parts, members in groups]


def _merged(
    groups: Sequence[tuple[tuple[str, ...], list[LayerChoice]]], position: int
) -> tuple[tuple[str, ...], list[LayerChoice]]:
    parts, members = groups[0]
    if len(groups) == 1:
        return parts, members
    numbers = [int(each[position]) for each, _ in groups]
    name = (*parts[:position], ranges(tuple(sorted(numbers))), *parts[position + 1 :])
    return name, [choice for _, each in groups for choice in each]


def _kind(choice: LayerChoice, divided: Collection[tuple[str, str]]) -> tuple[object, ...]:
    ranges = _ranges(choice, divided)
    return (choice.phase, shortened(choice.kernel), choice.covered, choice.inside, *ranges)


def _ranges(
    choice: LayerChoice, divided: Collection[tuple[str, str]]
) -> list[KeyLengths | StepRange | None]:
    """Return the ranges that distinguish a choice from others of its layer."""
    lengths = [choice.kv_lens] if _layer(choice) in divided else []
    return [*lengths, *([] if choice.steps is None else [choice.steps])]


def _layer(choice: LayerChoice) -> tuple[str, str]:
    return choice.module, choice.phase


def _divided(choices: Sequence[LayerChoice]) -> set[tuple[str, str]]:
    """Return the layers whose choices have different ranges of key lengths."""
    different = {(*_layer(choice), choice.kv_lens) for choice in choices}
    return {
        layer for layer, number in Counter(each[:2] for each in different).items() if number > 1
    }


def _table(texts: Sequence[str], numbers: Sequence[str]) -> FittedTable:
    table = FittedTable()
    for heading in texts:
        path = PATH_WIDTH if heading == "layers" else None
        table.add_column(heading, overflow="fold", min_width=path)
    for heading in numbers:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def _at_dots(path: str, width: int) -> str:
    """Wrap a module's path to a width, breaking only before dots."""
    lines = [""]
    for part in re.split(r"(?=\.)", printable(path)):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _mean_ms(choices: Sequence[LayerChoice], time: Callable[[LayerChoice], float | None]) -> str:
    """Format the mean time over a run's calls; return a dash if a layer has no time."""
    times = [time(choice) for choice in choices]
    if None in times:
        return "-"
    calls = sum(choice.calls for choice in choices)
    total = sum(choice.calls * (ms or 0.0) for choice, ms in zip(choices, times, strict=True))
    return f"{total / calls:.4g}"


def _worst_of(choices: Sequence[LayerChoice], budget: Budget) -> str:
    figures = [choice.worst.of(budget.metric) for choice in choices if choice.worst is not None]
    return _figure(max(figures, key=budget.badness), budget) if figures else "-"


def _figure(figure: float, budget: Budget) -> str:
    """Format a metric; round a cosine down, so that it never looks better than it is."""
    return floored(6)(figure) if budget.metric == "cosine" else f"{figure:.2e}"


def _total(plan: Plan) -> Text:
    parts = [
        f"{kernel} at {layers_of(choices)}{of_phases(choices, plan.choices)}"
        for kernel, choices in by_kernel(plan.choices)
    ]
    return Text(
        f"{plan.saved_ms:.4g} ms of attention saved per run (predicted); "
        f"{counted(layers_of(plan.choices), 'layer')}: {', '.join(parts)}",
        "bold",
    )


def by_kernel(choices: Iterable[LayerChoice]) -> list[tuple[str, list[LayerChoice]]]:
    """Return the choices of each kernel, the kernel at most layers first."""
    found: dict[str, list[LayerChoice]] = {}
    for each in choices:
        found.setdefault(shortened(each.kernel), []).append(each)
    return sorted(found.items(), key=lambda item: -layers_of(item[1]))


def layers_of(choices: Iterable[LayerChoice]) -> int:
    """Return the number of layers; a layer's phases count once."""
    return len({each.module for each in choices})


def of_phases(choices: Iterable[LayerChoice], others: Iterable[LayerChoice]) -> str:
    """Return the phases of choices, such as ` in decode`; empty if others have the same phases."""
    phases = {each.phase for each in choices}
    return "" if phases == {each.phase for each in others} else f" in {', '.join(sorted(phases))}"


def _error_sentence(total: TotalError) -> str:
    if total.error is None or total.gap is None:
        return (
            f"every choice of kernels has a total error above {total.limit:g}, so all layers keep "
            "the model's own attention"
        )
    return (
        f"total error {total.error:.3g}; "
        f"bound on the planned objective: within {100 * total.gap:.2g} %"
    )


def _notes(plan: Plan) -> list[str]:
    notes = [f"{kernel} left out: {reason}" for kernel, reason in plan.left_out.items()]
    for choices, end in (
        (
            [each for each in plan.choices if not each.covered],
            "have calls that were not captured, which keep the model's own attention: "
            "record them too, with a larger --max, or --modules '*' for other components",
        ),
        (
            [each for each in plan.choices if each.covered and not each.inside],
            f"have no kernel within {plan.budget} and keep the model's own attention",
        ),
    ):
        if choices:
            number = f"{layers_of(choices)} of {layers_of(plan.choices)} layers"
            notes.append(f"{number}{of_phases(choices, plan.choices)} {end}")
    return notes


def _uniform_table(uniforms: Sequence[Uniform], budget: Budget) -> FittedTable:
    names = ("inside", "outside", "overwrites", "falls_back", "failed", "not_captured")
    shown = [
        name
        for name in names
        if name in ("inside", "outside") or any(getattr(each, name) for each in uniforms)
    ]
    table = _table(("kernel",), ("saved ms", *(name.replace("_", " ") for name in shown)))
    table.add_column(f"worst {budget.metric}", justify="right", overflow="fold")
    table.add_column("at", overflow="fold", min_width=PATH_WIDTH)
    for each in uniforms:
        is_usable = each.saved_ms is not None and not each.outside + each.overwrites
        table.add_row(
            Text(each.kernel, "" if is_usable else "yellow"),
            _saved(each),
            *(str(getattr(each, name)) for name in shown),
            "-" if each.worst_figure is None else _figure(each.worst_figure, budget),
            Text(
                f"{_at_dots(each.worst_module, PLACE_WIDTH)} {printable(each.worst_phase)}".strip()
            ),
        )
    return table


def _saved(kernel: Uniform) -> str:
    """Format the saved time; `?` if no layer shows whether the kernel saves any."""
    if kernel.saved_ms is None:
        return "-"
    return "?" if kernel.undecided and not kernel.saved_ms else f"{kernel.saved_ms:.4g}"
