"""Recorded models to plan or check, and data for building these models. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attention_replay.errors import Error
from capture.storage.plain_files import possible
from replay.api.messages import say

if TYPE_CHECKING:
    import torch

    from capture.storage.capture_record import CaptureRecord
    from capture.storage.dataset import Dataset
    from replay.plan.plan import Plan
    from replay.sketches.sketch import ErrorSketch


class RecordingError(Error):
    """Reason why a recording's model cannot be planned or checked."""


@dataclass(frozen=True)
class ModelRequest:
    """Options for running a recorded model."""

    plan: str | None = None
    """Path of a plan, which is run in addition to the kernels."""
    text: str | None = None
    """Path of a text file on which a language model's perplexity is measured."""
    model_rounds: int | None = None
    """Number of timed runs per kernel; None for as many as fit into a few seconds."""
    trust_code: bool = False
    """True to run code files that the recording or the plan names."""
    any_device: bool = False
    """True to use a plan that was made on another type of GPU."""
    timeout: float = 300.0
    """Seconds after which a model process that gives no sign of life is killed."""
    sketch: str | None = None
    """Path of a sketch, from which the drift of every kernel and plan is foretold."""

    def check(self) -> None:
        """Raise Error if the plan, the text or the sketch cannot be used."""
        _ = self.words, self.loaded_sketch
        names = [] if self.loaded_plan is None else self.loaded_plan.code
        for file in [code.rpartition(":")[0] for code in names]:
            if not os.path.isfile(file):
                from replay.end_to_end.rebuild import missing  # imports torch

                raise RecordingError(
                    f"{self.plan} names a kernel in {file}, which {missing(file, 'replay plan')}, "
                    "or make the plan again"
                )
        if names and not self.trust_code:
            raise RecordingError(
                f"{self.plan} names kernels whose code would run, {', '.join(names)}: "
                "read it, and allow it to run with --trust-code"
            )

    @cached_property
    def loaded_plan(self) -> Plan | None:
        """The plan, read once, because its file may be a pipe.

        Raises:
            PlanError: the plan cannot be read.
        """
        from replay.plan.plan import Plan

        return None if self.plan is None else Plan.load(self.plan)

    @cached_property
    def loaded_sketch(self) -> ErrorSketch | None:
        """The sketch.

        Raises:
            SketchError: the sketch cannot be read.
        """
        if self.sketch is None:
            return None
        from replay.sketches.sketch import ErrorSketch

        return ErrorSketch.load(self.sketch)

    @property
    def plan_kernels(self) -> str | None:
        """Return the names of the plan's kernels, the default kernels to measure."""
        plan = self.loaded_plan
        return None if plan is None else ",".join([plan.baseline, *plan.kernels])

    @cached_property
    def words(self) -> str | None:
        """The text on which perplexity is measured.

        Raises:
            RecordingError: the text cannot be read, or is empty.
        """
        if self.text is None:
            return None
        return text_of("--text", self.text, "a text of a few hundred words")


def text_of(option: str, path: str, content: str) -> str:
    """Return the text in a file that an option names.

    Args:
        content: content that the file should have, in words.

    Raises:
        RecordingError: the text cannot be read, or is empty.
    """
    try:
        text = possible(path).read_text(encoding="utf-8")
    except OSError as error:
        reason = f"cannot read {option} {path}: {error.strerror}"
        raise RecordingError(f"{reason}; name a file with {content}") from error
    except ValueError as error:
        raise RecordingError(f"{option} {path} is not UTF-8: convert it first") from error
    if not text.strip():
        raise RecordingError(f"{option} {path} is empty: write {content} into it")
    return text


@dataclass(frozen=True)
class RecordedModels:
    """Models of a recording, ready to be built, and the variants to run in them."""

    request: ModelRequest
    captures: list[CaptureRecord]
    builds: list[dict[str, Any]]
    """Arguments for building the model of each capture."""
    text: str | None
    plan: Plan | None


def recorded_models(
    request: ModelRequest, dataset: Dataset | None, where: str, device: torch.device
) -> RecordedModels:
    """Read, before anything is measured, the data for building a recording's models.

    Args:
        dataset: the recording; None if an older version wrote it.
        where: name of the recording, as the user wrote it.
        device: where the models will be built.

    Raises:
        RecordingError: the text, the plan or the recording cannot be used.
        PlanError: the plan cannot be read.
        NotRebuildable: the recording does not specify how to build its model.
        NotTrusted: the recording names code to run.
    """
    from replay.end_to_end.rebuild import load_arguments

    plan = request.loaded_plan
    captures = whole_captures(dataset, where)
    if plan is not None:
        _check_plan(plan, request, captures, where, device)
    builds = [
        load_arguments(capture, str(device), trust_code=request.trust_code) for capture in captures
    ]
    if request.text is not None:
        _check_text(captures)
    return RecordedModels(request, captures, builds, request.words, plan)


def whole_captures(dataset: Dataset | None, where: str) -> list[CaptureRecord]:
    """Return the captures, after checking that they contain whole calls.

    Raises:
        RecordingError: the recording is incomplete; the message gives the remedy.
    """
    from capture.storage.joined_calls import is_part, model_of

    captures = [] if dataset is None else dataset.captures
    entries = [] if dataset is None else dataset.entries
    if not captures or not all(capture.census.get("rows") for capture in captures):
        reason = f" ({dataset.note})" if dataset is not None and dataset.note else ""
        raise RecordingError(f"{where} has no count of a model's calls{reason}: capture it again")
    if partial := [capture for capture in captures if capture.heads]:
        raise RecordingError(
            f"{where} contains only heads {partial[0].heads} of each call of "
            f"{partial[0].model}, which do not tell what whole calls cost: capture it again "
            "without --heads"
        )
    if parts := [entry.origin for entry in entries if is_part(entry.origin)]:
        raise RecordingError(
            f"{where} contains the {parts[0].split} that each rank of "
            f"{model_of(parts[0])} has, and no single process runs such a model: capture it in one "
            "process"
        )
    return captures


def one_capture(dataset: Dataset | None, where: str) -> CaptureRecord:
    """Return the only capture of a recording, for which a plan is made.

    Raises:
        RecordingError: the recording contains several models, or is incomplete.
    """
    captures = whole_captures(dataset, where)
    if len(captures) > 1:
        models = ", ".join(capture.model for capture in captures)
        raise RecordingError(
            f"a plan is for one model, but {where} contains {models}: capture each into "
            "its own directory (capture --out DIR)"
        )
    return captures[0]


def _check_plan(
    plan: Plan,
    request: ModelRequest,
    captures: Sequence[CaptureRecord],
    where: str,
    device: torch.device,
) -> None:
    """Raise RecordingError if a plan does not suit the recording, the device or the request."""
    from replay.plan.plan_device import mismatch, type_of

    if plan.model not in [capture.model for capture in captures]:
        models = ", ".join(capture.model for capture in captures)
        raise RecordingError(
            f"{request.plan} is a plan for {plan.model}, but {where} contains "
            f"{models}: use a plan for this model"
        )
    if not request.any_device and (misfit := mismatch(plan.device, [type_of(device)])):
        raise RecordingError(
            f"{request.plan} {misfit}: make one here with `replay plan`, or use it all the "
            "same with --any-device"
        )
    if not plan.device:
        say(
            f"{request.plan} does not say which type of GPU it was made "
            "on: make it again to be sure that its kernels are the fastest here"
        )


def _check_text(captures: Sequence[CaptureRecord]) -> None:
    """Raise RecordingError if no recorded model can read a text."""
    language = [
        capture
        for capture in captures
        if any(row["phase"] == "prefill" for row in capture.census["rows"])
    ]
    if not language:
        raise RecordingError(
            "--text requires a language model, but none was recorded: leave it out"
        )
    if all(".py:" in str(capture.settings.get("model")) for capture in language):
        raise RecordingError(
            "--text requires a known tokenizer, which a model built by a function does not have: "
            "leave it out, or capture the model by directory or name"
        )
