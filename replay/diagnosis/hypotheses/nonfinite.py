"""NaN and infinity that reach the kernel in its inputs.

If a query sees them, the output is NaN or infinite whatever the kernel does. If a mask or lengths
hide them, they still spread through a kernel that multiplies hidden values by zero.
"""

from __future__ import annotations

from capture.call.attention_call import AttentionCall
from replay.accuracy.nonfinite import nonfinite_inputs
from replay.diagnosis.subject import Evidence


def nonfinite_input(call: AttentionCall) -> Evidence | None:
    """Return the evidence that queries see NaN or infinity."""
    found = nonfinite_inputs(call)
    if found is None or not found.visible:
        return None
    return Evidence(
        "nonfinite-input",
        f"the inputs are not finite, so no kernel can return a finite output: {found.sentence}",
        {"inputs": found.sentence, "visible": found.visible},
    )


def nonfinite_hidden(call: AttentionCall, spoilt_rows: int) -> Evidence | None:
    """Return the evidence that hidden NaN or infinity spread to rows that do not see it.

    Args:
        spoilt_rows: number of these rows, counted by the judge.
    """
    found = nonfinite_inputs(call) if spoilt_rows else None
    if found is None:
        return None
    shape = call.shape
    rows = shape.batch * shape.q_heads * shape.q_len
    return Evidence(
        "nonfinite-hidden",
        f"{spoilt_rows:,} of {rows:,} rows are NaN or infinite because of inputs that no query "
        f"sees: {found.sentence}",
        {"inputs": found.sentence, "spoilt_rows": spoilt_rows, "rows": rows},
    )
