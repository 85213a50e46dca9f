"""Runs of a model whose outputs are judged: of prompts, of windows of a text, or of one run."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from attention_replay.errors import check_type
from capture.text.counted import counted
from replay.tune.directory import TuningError

Run = Callable[[], Any]
"""Function that runs the model once, and returns what is judged."""


@dataclass(frozen=True)
class JudgedRuns:
    """Runs of a model whose outputs are judged."""

    runnable: Any
    """The model (`models.Runnable`); its own run is the first one, which is recorded and timed."""
    runs: Sequence[Run]
    noun: str = ""
    """Noun for what a run reads; empty if there is only the model's own run."""
    names: Sequence[str] = ()
    """Prompts, or digests of the windows of a text."""

    @property
    def searched(self) -> Sequence[Run]:
        """Runs of the search: the first half."""
        return self.runs[: (len(self.runs) + 1) // 2]

    @property
    def kept(self) -> Sequence[Run]:
        """Runs that are kept for acceptance: the second half, if there are several runs."""
        return self.runs[len(self.searched) :]

    @property
    def judged_on(self) -> str:
        """Runs that decide on a plan, in words."""
        if self.kept:
            return f"judged on {counted(len(self.kept), self.noun)} kept for acceptance"
        return "judged on the run it was tuned on"


def judged_runs(runnable: Any, prompts: Sequence[Any] | None, text: str | None) -> JudgedRuns:
    """Return the runs of a model on prompts, on a text, or else its own run.

    Args:
        runnable: the model (`models.Runnable`).
        prompts: prompts, at least two; None if there are none.
        text: a text that a language model reads in windows, in one forward pass each, as in
            prefill; None if there is none.

    Raises:
        TuningError: the model reads no prompts or no text, or there are too few prompts.
        ModelError: a prompt is too long, or the text too short.
    """
    if text is not None:
        return _of_text(runnable, text)
    return JudgedRuns(runnable, [runnable.run]) if prompts is None else _of(runnable, prompts)


def check_prompts(prompts: Sequence[Any]) -> None:
    """Raise TuningError for one text or too few prompts, TypeError for anything but a list."""
    check_type("prompts", prompts, (Sequence,), "a list of prompts")
    if isinstance(prompts, str):
        raise TuningError("prompts must be a list of prompts, not one text: put them in a list")
    if len(prompts) < 2:
        raise TuningError(
            "prompts must be at least two, because half of them are kept for acceptance: give "
            "more, or none"
        )


def check_arguments(run: Any, prompts: Sequence[Any] | None) -> None:
    """Raise TuningError if a function cannot be called with a prompt, or without if none is given.

    Functions written in C have no signature, and are not checked.
    """
    if prompts is not None:
        check_prompts(prompts)
    given = () if prompts is None else ("a prompt",)
    try:
        signature = inspect.signature(run)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        call = "run(prompt)" if given else "run()"
        raise TuningError(
            f"{call} cannot be called ({error}): pass prompts= if run takes a prompt, leave it out "
            "if run takes no argument, and give any other parameter a default"
        ) from None


def _of(runnable: Any, prompts: Sequence[Any]) -> JudgedRuns:
    check_prompts(prompts)
    if runnable.for_prompt is None:
        raise TuningError(
            f"{runnable.name} reads no prompts: leave them out, or let a FILE.py:FUNCTION return a "
            "run with a parameter `prompt`"
        )
    runs = [runnable.for_prompt(prompt) for prompt in prompts]
    names = [str(prompt) for prompt in prompts]
    settings = dict(runnable.settings)
    if "given" in settings:  # the recording names the prompt that was run
        given = {**settings["given"], "prompt": names[0]}
        settings |= {"prompt": names[0], "given": given}
    return JudgedRuns(replace(runnable, run=runs[0], settings=settings), runs, "prompt", names)


def _of_text(runnable: Any, text: str) -> JudgedRuns:
    language = runnable.language
    if language is None or language.score is None:
        raise TuningError(
            f"{runnable.name} is not a language model that can score a text: leave out the text, "
            "let run() return the input_ids and logits of one, or name a checkpoint's directory"
        )

    def score(ids: Tensor) -> dict[str, Tensor]:
        return {"input_ids": ids, "logits": language.score(ids)[None]}

    windows = language.windows(text)
    digests = [hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16] for ids in windows]
    runs = [partial(score, ids) for ids in windows]
    return JudgedRuns(replace(runnable, run=runs[0], extent={}), runs, "text window", digests)
