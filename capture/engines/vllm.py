"""A run of vLLM in this process: `capture --engine vllm`. Imports vLLM late.

vLLM runs the model in this process, where the recording sees it, and without CUDA graphs of whole
steps, which call no Python.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attention_replay.errors import Error
from capture.engines.requests import RandomPrompt, Request, read_prompts, read_trace
from capture.errors import described

if TYPE_CHECKING:
    from torch import nn


class EngineError(Error):
    """vLLM is missing, or cannot be recorded as requested; the message names the remedy."""


@dataclass(frozen=True)
class EngineRun:
    """An engine with its requests, as far as `models.Runnable` describes other runs."""

    roots: dict[str, nn.Module]
    run: Callable[[], None]
    weights: str
    settings: dict[str, Any]
    extent: dict[str, int]
    pipeline: None = field(default=None, init=False)


def load(
    model: str,
    *,
    prompts: str | None = None,
    trace: str | None = None,
    seed: int = 0,
    dtype: str | None = None,
    options: Mapping[str, str] = {},
) -> EngineRun:
    """Start vLLM with a model, and return a run that answers prompts, or the requests of a trace.

    Args:
        model: directory or name of a checkpoint that vLLM supports.
        prompts, trace: file of requests (`capture.engines.requests`); exactly one is given.
        options: other arguments of `vllm.LLM` as text: JSON, or else a string.

    Raises:
        EngineError: vLLM is not installed, refuses an argument or a request's length, or runs the
            model in other processes.
        RequestsError: the file of requests cannot be used.
    """
    if prompts is None:
        assert trace is not None
        requests = read_trace(Path(trace))
    else:
        requests = read_prompts(Path(prompts))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        from vllm import LLM, SamplingParams
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise EngineError(
            "--engine vllm needs vLLM, which is not installed: run this command in vLLM's Python "
            "environment"
        ) from error
    given = {name: _value(text) for name, text in options.items()}
    has_text = any(isinstance(each.prompt, str) for each in requests)
    try:
        engine = LLM(model=model, **_defaults(given, seed, dtype, has_text))
    except (TypeError, ValueError) as error:  # such as an unknown argument
        reason = " ".join(described(error).split())
        raise EngineError(f"vLLM does not start with this --model and --set: {reason}") from error
    executor = engine.llm_engine.model_executor
    worker = getattr(executor, "driver_worker", None)
    if worker is None:
        raise EngineError(
            "vLLM runs the model in other processes: to record these, leave out --engine and "
            "start vLLM with ATTENTION_REPLAY_RECORD=DIR in its environment"
        )
    config = engine.llm_engine.model_config
    _check_lengths(requests, config.max_model_len)

    def add(number: int, request: Request) -> None:
        prompt: Any = request.prompt
        if isinstance(prompt, RandomPrompt):
            prompt = prompt.tokens(config.get_vocab_size(), seed)
        sampling = SamplingParams(
            temperature=0,
            max_tokens=request.max_tokens,
            ignore_eos=request.ignores_end,
            detokenize=False,
        )
        if not isinstance(prompt, str):
            prompt = {"prompt_token_ids": list(prompt)}
        try:
            engine.llm_engine.add_request(str(number), prompt, sampling)
        except ValueError as error:  # such as a text that is too long
            raise EngineError(f"vLLM refuses request {number + 1}: {error}") from error

    return EngineRun(
        roots={"": worker.get_model()},
        run=lambda: _answer(engine.llm_engine, requests, add),
        weights=model,
        settings={"engine": "vllm", "options": {"model": model, **given}},
        extent={},
    )


def _defaults(
    given: Mapping[str, Any], seed: int, dtype: str | None, has_text: bool
) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`: those given, and others that show every call."""
    arguments = {
        "seed": seed,
        "skip_tokenizer_init": not has_text,
        "enforce_eager": "compilation_config" not in given,
        **({} if dtype is None else {"dtype": dtype}),
        **given,
    }
    if not arguments["enforce_eager"]:
        compilation = given.get("compilation_config", {})
        arguments["compilation_config"] = {"cudagraph_mode": "PIECEWISE", **compilation}
    return arguments


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text


def _check_lengths(requests: Sequence[Request], most: int) -> None:
    """Check that the model's context has room for each prompt of known length and a new token."""
    lengths = [
        each.prompt.length if isinstance(each.prompt, RandomPrompt) else len(each.prompt)
        for each in requests
        if not isinstance(each.prompt, str)
    ]
    long = [length for length in lengths if length >= most]
    if long:
        raise EngineError(
            f"{len(long)} of {len(requests)} requests do not fit into vLLM's max_model_len of "
            f"{most} tokens (longest prompt: {max(long)}): leave them out, or add "
            f"--set max_model_len=N if the model allows it"
        )


def _answer(engine: Any, requests: Sequence[Request], add: Callable[[int, Request], None]) -> None:
    """Give the engine each request at its arrival, and run it until all are answered.

    Time in which the engine has no request is skipped: it changes no batch.
    """
    began, waiting = time.monotonic(), list(enumerate(requests))[::-1]
    while waiting or engine.has_unfinished_requests():
        now = time.monotonic() - began
        if waiting and not engine.has_unfinished_requests():
            now = max(waiting[-1][1].arrival, now)
            began = time.monotonic() - now
        while waiting and waiting[-1][1].arrival <= now:
            add(*waiting.pop())
        engine.step()
