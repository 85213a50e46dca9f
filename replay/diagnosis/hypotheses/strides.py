"""Strides that a kernel does not follow."""

from __future__ import annotations

from replay.diagnosis.subject import Evidence, Subject

ORDERS = {False: "(B, H, S, D)", True: "(B, S, H, D)"}
"""Orders of dense memory, by whether heads are inside positions."""


def strides(subject: Subject) -> Evidence | None:
    """Test whether the error disappears when the same values lie in dense memory.

    Then one tensor after another becomes dense alone, to name those whose strides are ignored.
    """
    given, loose = subject.call.tensors(), subject.loose
    for inside, order in ORDERS.items() if loose else ():
        score = subject.cured_by(subject.in_dense_memory(heads_inside=inside))
        if score is None:
            continue
        alone = [
            name
            for name in loose
            if subject.cured_by(subject.in_dense_memory([name], heads_inside=inside))
        ]
        names = alone or loose
        where = "" if names == ["attn_mask"] else f" in the order {order}"
        seen = " and ".join(f"{tuple(given[name].stride())} of {name}" for name in names)
        return Evidence(
            "strides",
            f"it {subject.fault} with the strides {seen}, and is right with the same values in "
            f"dense memory{where}",
            {
                "tensors": names,
                "strides": {name: list(given[name].stride()) for name in names},
                "order": order,
                "error": subject.own.error,
                "error_in_dense_memory": score.error,
            },
        )
    return None
