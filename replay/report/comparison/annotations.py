"""Met and undecided conditions as workflow commands, which GitHub Actions shows as annotations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from capture.text.printable import printable
from replay.comparison.comparison import Comparison
from replay.comparison.conditions import Condition
from replay.comparison.undecided import undecided
from replay.report.comparison.sections import pair_text
from replay.rows.row import KernelId


def workflow_commands(
    compared: Sequence[Comparison],
    conditions: Sequence[Condition],
    findings: Sequence[Mapping[KernelId, str]] = (),
) -> Iterator[str]:
    """Yield `::error …::` for each kernel that meets a condition, `::warning …::` if undecided.

    The kernel of a file is annotated in this file. The sentence is the doctor's, or about the first
    call that fails.

    Args:
        findings: for each comparison, the doctor's sentences on kernels that became wrong.
    """
    for comparison, said in zip(compared, findings or [{}] * len(compared), strict=True):
        for condition in conditions:
            for failure in condition.failures(comparison):
                detail = pair_text(failure.pairs[0]) if failure.pairs else ""
                if condition.name in ("inaccurate", "less-accurate"):
                    detail = said.get(failure.kernel, detail)
                text = f"{failure}: {detail}" if detail else f"{failure}"
                yield _command("error", f"{condition}: {failure.kernel}", failure.kernel, text)
        for each in undecided(comparison, conditions):
            heading = f"{each.condition} is undecided: {each.kernel}"
            yield _command("warning", heading, each.kernel, f"{each}: {each.reason}")


def _command(level: str, heading: str, kernel: KernelId, text: str) -> str:
    path, is_of_file, _ = kernel.name.partition(".py:")
    properties = {"title": heading}
    if is_of_file:
        properties["file"] = f"{path}.py"
    given = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::{level} {given}::{_message(text)}"


def _message(text: str) -> str:
    return printable(text).replace("%", "%25")  # has no line ends, which would end the command


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
