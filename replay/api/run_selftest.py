"""Function `selftest`, which checks that this machine measures correctly."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from replay.api.chosen_device import device_of
from replay.api.messages import shown_steps

if TYPE_CHECKING:
    import torch

    from replay.selftest.all_checks import SelftestReport

logger = logging.getLogger(__name__)


def selftest(
    device: str | torch.device | None = None, *, progress: bool | None = None
) -> SelftestReport:
    """Measure things with known answers, and report how reliable this machine is.

    Args:
        device: "cpu", "cuda" or "cuda:1"; by default a GPU if there is one.
        progress: False to hide progress on stderr.

    Returns:
        A verdict with `passed`, a `sentence` about the machine, and the `results` of all checks.

    Raises:
        ChoiceError: there is no such device.

    Example:
        >>> verdict = selftest("cpu")
        >>> print(verdict.sentence)
    """
    from replay.selftest.all_checks import selftest as all_checks

    chosen = device_of(None if device is None else str(device))
    with shown_steps(quiet=progress is False) as show:

        def report(name: str) -> None:
            logger.info("%s", name)
            show(name)

        return all_checks(chosen, report)
