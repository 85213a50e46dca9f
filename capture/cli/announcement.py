"""Says what `capture --model` is about to run, and how much disk the recording will take."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from capture.recording.sampling import PER_LAYER
from capture.text.counted import counted, human_bytes
from capture.text.printable import printable

if TYPE_CHECKING:
    from capture.hooks.modules import CallSite, WatchedModule
    from capture.recording.recording import Recording


def announcement(name: str, runnable: Any) -> str:
    """Describe a run before it starts: what is known of its size, dtype, device and weights.

    Args:
        runnable: the model and its run (`models.Runnable`).
    """
    parts = [*_size(runnable.extent), *_dtype_and_device(runnable.roots)]
    size = ", ".join(parts) or "size unknown before the run"
    lines = f"{name}: {size}", f"weights: {runnable.weights}"
    return "\n".join(map(printable, lines))


def _size(extent: Mapping[str, int]) -> list[str]:
    pixels = (
        f"{extent['width']}×{extent['height']} pixels" if {"width", "height"} <= {*extent} else ""
    )
    frames = counted(extent["frames"], "frame") if "frames" in extent else ""
    parts = [" of ".join(filter(None, (frames, pixels)))]
    for key, noun in (
        ("steps", "step"),
        ("prompt_tokens", "prompt token"),
        ("new_tokens", "new token"),
    ):
        parts.append(counted(extent[key], noun) if key in extent else "")
    return [*filter(None, parts)]


def _dtype_and_device(roots: Mapping[str, Any]) -> list[str]:
    """Return the dtype and device of most weights; empty for a model without weights."""
    sizes: Counter[str] = Counter()
    for root in roots.values():
        for weight in root.parameters():
            dtype = str(weight.dtype).removeprefix("torch.")
            sizes[f"{dtype} on {weight.device}"] += weight.numel()
    return [most for most, _ in sizes.most_common(1)]


class DiskEstimate:
    """Estimate of a recording's size, printed after the first forward pass with a kept call.

    A call's size is known only when the model has made it. The estimate assumes that all calls are
    like those of this pass.

    Args:
        max_calls: number of calls to keep, or `per-layer`.
        console: where the estimate is printed. A recording that does not fit on the disk is
            reported on stderr, even if the console is quiet.
    """

    def __init__(
        self,
        recording: Recording,
        max_calls: int | str,
        max_bytes: int | None,
        directory: Path,
        console: Any,
    ) -> None:
        self._recording, self._directory, self._console = recording, directory, console
        self._max_calls, self._max_bytes = max_calls, max_bytes
        self._is_printed = False

    def enter(self, watched: WatchedModule, site: CallSite) -> None:
        """Do nothing at the start of a pass."""

    def leave(self) -> None:
        """Print the estimate if calls are kept and it is not printed yet."""
        if self._is_printed or not self._recording.kept:
            return
        self._is_printed = True
        with contextlib.suppress(OSError):  # a closed stderr must not end the model's run
            self._print()

    def _print(self) -> None:
        kept, nbytes = self._recording.kept, self._recording.expected_bytes
        if self._max_calls == PER_LAYER:
            expected, calls = nbytes, f"the first phase's {counted(kept, 'call')}"
        else:
            expected = nbytes * int(self._max_calls) // kept
            calls = (
                f"up to {counted(int(self._max_calls), 'call')} of {human_bytes(nbytes // kept)}"
            )
        if self._max_bytes is not None:
            expected = min(expected, self._max_bytes)
        free = shutil.disk_usage(self._directory).free
        self._console.print(
            Text(f"disk: about {human_bytes(expected)} for {calls} ({human_bytes(free)} free)")
        )
        if expected > free:
            sentence = (
                f"the recording may not fit: about {human_bytes(expected)} are needed and "
                f"{human_bytes(free)} are free in {printable(str(self._directory))}; lower --max, "
                "set --max-bytes, or choose another --out"
            )
            print(f"capture: {sentence}", file=sys.stderr, flush=True)
