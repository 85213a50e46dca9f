"""Function `cache_formats`, which rounds recorded caches and measures the errors of the outputs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from replay.api.cache_decode_times import decode_times
from replay.api.call_choices import RecordedCalls
from replay.api.choices import joined_names
from replay.api.chosen_device import ChoiceError, device_of
from replay.api.replay_calls import call_choice

if TYPE_CHECKING:
    import torch

    from capture.call.attention_call import AttentionCall, Origin
    from capture.storage.dataset import Dataset
    from replay.diagnosis.cache_tables import CacheErrors
    from replay.workloads.workload import Workload

WITHOUT_CACHE = ("denoise", "encode", "recompute")
"""Phases whose calls read no cache (`capture.hooks.phases`)."""


def cache_formats(
    dataset: str | os.PathLike[str] | Dataset | Iterable[AttentionCall],
    formats: str | Sequence[str] | None = None,
    *,
    calls: str | Sequence[str] | None = None,
    budget: str | None = None,
    device: str | torch.device | None = None,
    progress: bool | None = None,
) -> CacheErrors:
    """Round the keys and values of recorded calls as caches would store them, by layer.

    A cache stores numbers q and scales s, and returns x' for an element x:

    - `bf16`: x rounded to bfloat16.
    - `fp8`: s · e4m3(x / s) with s = max|x| / 448. `fp8-tensor` has one s for the keys of a call
      and one for the values, `fp8-head` one for each key head, `fp8-token` one for each token and
      key head, and `fp8` has s = 1. e4m3 is that of Micikevicius et al. 2022 ("FP8 formats for deep
      learning"), limited to ±448; vLLM has the same scales (`fp8`, `fp8_per_token_head`).
    - `int8-token`: s · round(x / s) with s = max|x| / 127 for each token and key head.
      `int8-token-truncated` rounds towards zero, as vLLM 0.22.1 does for `int8_per_token_head`.
    - `int4-group`: z + s · round((x - z) / s) with z = min x and s = (max x - z) / 15 for each 32
      adjacent channels of a token (KIVI, Liu et al. 2024, where keys have groups of tokens).

    Names with `-rotated` round keys K R instead of K, and the query is Q R. R is orthogonal, made
    of Hadamard matrices (QuaRot, Ashkboos et al. 2024), so exact scores do not change.

    Each error compares two outputs in float64: softmax(scale · QK'ᵀ + mask) · V' with the rounded
    keys and values, and that with the recorded ones. It is the error of one layer's output, and no
    measure of the model's text. A kernel's own rounding comes on top.

    Args:
        dataset: a directory that `capture` wrote, an archive of one, an address, a dataset, or
            calls.
        formats: names, as a list or comma-separated; by default the eight above, and
            `int4-group-rotated`.
        calls: names and globs of the calls to use; by default those of the phases that read a
            cache, such as `prefill` and `decode`.
        budget: largest error of a layer's worst call, such as "relative_l1=0.02" or "cosine=0.999";
            None to choose no layers.
        device: "cpu", "cuda" or "cuda:1"; by default a GPU if there is one.
        progress: False to hide progress on stderr.

    Returns:
        `CacheErrors`: print them, or read `found`, which has the errors of each call and format.
        `kept("fp8")` has the layers to keep in 16 bits, and `vllm_flags("fp8")` vLLM's flags for
        them. On a GPU, `decode` has the core times of our decode kernels for the formats.

    Raises:
        ChoiceError: no call reads a cache, calls are of several models, or the device is unknown.
        FormatError: there is no format of a name.
        PlanError: the budget cannot be read.
        DatasetError: the recording cannot be read.

    Example:
        >>> print(cache_formats("captured_inputs", "fp8,fp8-token", budget="relative_l1=0.02"))
    """
    from replay.plan.plan import parse_budget

    limit = None if budget is None else parse_budget(budget)  # before PyTorch is imported

    from capture.errors import DatasetError
    from replay.accuracy.cache_formats import DEFAULT, CacheFormat
    from replay.diagnosis.cache_errors import cache_errors
    from replay.diagnosis.cache_tables import CacheErrors
    from replay.end_to_end.run_pace import RunPace
    from replay.report.progress import shown_runs

    named = joined_names(formats)
    names = DEFAULT if named is None else [name.strip() for name in named.split(",")]
    chosen = tuple(CacheFormat.parse(name) for name in dict.fromkeys(names))
    quiet = progress is False
    place = device_of(None if device is None else str(device))
    found = CacheErrors(formats=chosen, budget=limit)
    with call_choice(dataset, joined_names(calls)) as choice:
        opened = choice.opened(quiet=quiet)
        assert opened is not None
        given = choice.found(opened, quiet=quiet)
        found.note = given.note
        origins = {entry.path.stem: entry.origin for entry in opened.entries}
        workloads = given.workloads
        if isinstance(choice, RecordedCalls) and choice.names is None:
            without = {name for name, each in origins.items() if each.phase in WITHOUT_CACHE}
            workloads = [each for each in workloads if each.name not in without]
        _check(workloads, origins)
        pace = RunPace()
        pace.expect(Counter({"call": len(workloads)}))
        with shown_runs(pace, "reading", quiet=quiet):
            for workload in workloads:
                name = workload.name

                def say(stage: str, name: str = name) -> None:
                    pace.enter(f"{name}: {stage}")

                with pace.running("call"):
                    try:
                        call = workload.load_to_judge(place)
                        found.found += cache_errors(name, call, chosen, say)
                    except (DatasetError, ValueError) as error:
                        found.left_out[name] = str(error)
        found.unmeasured = _unmeasured(opened, {each.layer for each in found.found})
        decoding = [each.call for each in found.found if each.phase == "decode"]
        found.decode = decode_times(
            opened, [*dict.fromkeys(decoding)], chosen, place, progress=progress
        )
    return found


def _check(chosen: Sequence[Workload], origins: dict[str, Origin]) -> None:
    """Raise ChoiceError if no call is chosen, or calls of several models."""
    if not chosen:
        phases = Counter(each.phase for each in origins.values())
        counts = ", ".join(f"{count} {phase}" for phase, count in phases.items())
        raise ChoiceError(
            f"no recorded call reads a cache (calls by phase: {counts}): record a model that "
            "generates text, or name calls that do with --call"
        )
    models = sorted({origins[each.name].model for each in chosen if each.name in origins})
    if len(models) > 1:
        raise ChoiceError(
            f"the calls are of several models ({', '.join(models)}): choose those of one, such as "
            f"--call '{models[0]}-*'"
        )


def _unmeasured(dataset: Dataset, measured: set[str]) -> list[str]:
    """Return the layers that read a cache according to the census, but have no error."""
    rows = [row for capture in dataset.captures for row in capture.census.get("rows", ())]
    layers = dict.fromkeys(row["module"] for row in rows if row["phase"] not in WITHOUT_CACHE)
    return [layer for layer in layers if layer not in measured]
