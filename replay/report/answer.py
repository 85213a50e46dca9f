"""Answer of a replay in one sentence: the kernels to use, or that the baseline stays."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from replay.report.matrix import BUSY, Cell, Matrix
from replay.report.pooled import pooled_speedup
from replay.rows.errors_of_output import AccuracyClass
from replay.rows.row import KernelId
from replay.timing.statistics import RELEVANT


def answer(found: Matrix) -> str:
    """Return the answer, such as `triton-fa3: 1.21× in cogvideo, same output.`

    A quantised kernel is added if it is faster than the baseline and the best exact kernel. Sparse
    kernels are left out, because speed alone does not show whether their work suffices. The answer
    is empty without kernels.
    """
    if not found.kernels:
        return ""
    every = [cell for kernel in found.kernels for cell in found.row(kernel)]
    if all(cell.outcome in ("wrong", "cannot") for cell in every):
        return "No kernel tested ran correctly."
    baselines = list(dict.fromkeys(kind.baseline for kind in found.kinds if kind.baseline))
    if not baselines:
        able = [
            kernel
            for kernel in found.kernels
            if any(cell.outcome not in ("wrong", "cannot") for cell in found.row(kernel))
        ]
        if len(able) == 1:
            return f"Only {able[0]} ran correctly, so nothing is compared."
        return "No kernel was timed beside a baseline, so there are no speed-ups."
    keep = baselines[0] if len(baselines) == 1 else "what the model calls"
    exact = _chosen(found, "exact")
    best = {at: kernel for kernel, kinds in exact.items() for at in kinds}
    quantised = {
        kernel: kinds
        for kernel, chosen in _chosen(found, "quantised").items()
        if (kinds := [at for at in chosen if _is_faster(found, at, kernel, best.get(at))])
    }
    sentences = [
        f"{kernel} is {_ratios(found, kernel, kinds)} {_where(found, kinds)}, quantised: "
        f"relative error {_worst_error(found, kernel, kinds):.1e}."
        for kernel, kinds in quantised.items()
    ]
    decided = {at for kinds in quantised.values() for at in kinds}
    return " ".join([_exact_sentence(found, exact, decided, keep), *sentences])


def _exact_sentence(
    found: Matrix, exact: dict[KernelId, list[int]], decided: Collection[int], keep: str
) -> str:
    """Return the sentence on exact kernels.

    Args:
        decided: kinds of call with a faster quantised kernel.
    """
    total = len(found.kinds)
    if exact:
        parts = [
            f"{kernel}: {_ratios(found, kernel, kinds)} {_where(found, kinds)}"
            for kernel, kinds in exact.items()
        ]
        is_everywhere = sum(map(len, exact.values())) == total
        end = ", same output." if is_everywhere else f"; elsewhere keep {keep}."
        return ", ".join(parts) + end
    for kernel in found.kernels:
        outcomes = [cell.outcome for cell in found.row(kernel)]
        if found.class_of(kernel) == "exact" and (faster := outcomes.count("faster")):
            return (
                f"Keep {keep}: {kernel} is faster in {faster} of {total} kinds of call, but wrong "
                f"or failing in {outcomes.count('wrong')}."
            )
    rows = [found.row(kernel) for kernel in found.kernels if found.class_of(kernel) == "exact"]
    others = [cells for cells in rows if all(cell.outcome != "baseline" for cell in cells)]
    rivals = [cells for cells in others if all(cell.outcome != "wrong" for cell in cells)]
    if not others:
        return f"Keep {keep}: no other exact kernel was tested."
    if all(cell.outcome == "cannot" for cells in rivals for cell in cells):
        return f"Keep {keep}: no other exact kernel tested ran correctly."
    undecided = [
        at
        for at in range(total)
        if at not in decided and any(_may_be_faster(cells[at]) for cells in rivals)
    ]
    if undecided:
        reason = _reason([cells[at] for at in undecided for cells in rivals])
        kinds = "" if total == 1 else f" {_in_kinds(len(undecided), total)}"
        return f"Undecided{kinds} ({reason}): no exact kernel is shown to be faster than {keep}."
    kinds = {1: "", 2: " in either kind of call"}.get(total, f" in any of {total} kinds of call")
    if decided:
        return f"Keep {keep}: no exact kernel is shown to be faster{kinds}."
    return f"Keep {keep}: no kernel tested is faster{kinds}."


def _may_be_faster(cell: Cell) -> bool:
    """Return True if a cell is inconclusive, and its interval does not exclude a relevant gain."""
    high = cell.speedup.high if cell.speedup else None
    return cell.outcome == "inconclusive" and (high is None or high >= RELEVANT)


def _chosen(found: Matrix, accuracy_class: AccuracyClass) -> dict[KernelId, list[int]]:
    """Return kernels and the kinds of call to use them in.

    The kernel with the greatest product of speed-ups comes first; the next ones are chosen for the
    kinds that are left. A kernel that is wrong anywhere is left out.
    """
    gains: dict[KernelId, dict[int, float]] = {}
    for kernel in found.kernels:
        cells = found.row(kernel)
        is_wrong = any(cell.outcome == "wrong" for cell in cells)
        if found.class_of(kernel) == accuracy_class and not is_wrong:
            gains[kernel] = {
                at: math.log(cell.speedup.ratio)
                for at, cell in enumerate(cells)
                if cell.outcome == "faster" and cell.speedup
            }
    chosen: dict[KernelId, list[int]] = {}
    while any(gains.values()):
        best = max(gains, key=lambda kernel: sum(gains[kernel].values()))
        chosen[best] = sorted(gains.pop(best))
        for left in gains.values():
            for at in chosen[best]:
                left.pop(at, None)
    return chosen


def _is_faster(found: Matrix, at: int, kernel: KernelId, exact: KernelId | None) -> bool:
    """Return True if a kernel is faster than the exact kernel chosen for a kind of call."""
    if exact is None:
        return True
    over = pooled_speedup(found.kinds[at], kernel, over=exact)
    if over is not None:
        return over.verdict == "fast"
    ours, theirs = found.cells[kernel, at].speedup, found.cells[exact, at].speedup
    return bool(ours and theirs and ours.low and theirs.high and ours.low > theirs.high)


def _ratios(found: Matrix, kernel: KernelId, kinds: Collection[int]) -> str:
    """Format the speed-ups of a kernel: `1.21×`, or `1.10× to 1.30×` if they differ."""
    speedups = [found.cells[kernel, at].speedup for at in kinds]
    ratios = sorted(speedup.ratio for speedup in speedups if speedup)
    return " to ".join(dict.fromkeys(f"{ratio:.2f}×" for ratio in (ratios[0], ratios[-1])))


def _where(found: Matrix, kinds: Sequence[int]) -> str:
    total = len(found.kinds)
    if total > 1:
        return _in_kinds(len(kinds), total)
    return f"in {found.kinds[0].model or 'this call'}"


def _in_kinds(number: int, total: int) -> str:
    if number < total:
        return f"in {number} of {total} kinds of call"
    return "in both kinds of call" if total == 2 else f"in all {total} kinds of call"


def _worst_error(found: Matrix, kernel: KernelId, kinds: Collection[int]) -> float:
    """Return the greatest relative L1 error of a kernel over the calls of these kinds."""
    rows = [row for at in kinds for row in found.kinds[at].rows[kernel]]
    return max(row.accuracy.reference.relative_l1 for row in rows if row.accuracy)


def _reason(cells: Sequence[Cell]) -> str:
    """Return the reason of inconclusive cells; a busy machine outweighs the others."""
    reasons = {cell.reason for cell in cells if cell.outcome == "inconclusive"}
    return BUSY if BUSY in reasons else min(reasons)
