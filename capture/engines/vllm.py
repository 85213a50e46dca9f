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
from capture.engines.requests import Request, read_prompts, read_trace

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
        EngineError: vLLM is not installed, or runs the model in other processes.
        RequestsError: the file of requests cannot be used.
    """
    requests = None if prompts is None else read_prompts(Path(prompts))
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
    has_text = any(isinstance(each.prompt, str) for each in requests or ())
    engine = LLM(model=model, **_defaults(given, seed, dtype, has_text))
    executor = engine.llm_engine.model_executor
    worker = getattr(executor, "driver_worker", None)
    if worker is None:
        raise EngineError(
            "vLLM runs the model in other processes: to record these, leave out --engine and "
            "start vLLM with ATTENTION_REPLAY_RECORD=DIR in its environment"
        )
    if requests is None:
        assert trace is not None
        requests = read_trace(Path(trace), engine.llm_engine.model_config.get_vocab_size(), seed)

    def sampling(request: Request) -> Any:
        return SamplingParams(
            temperature=0,
            max_tokens=request.max_tokens,
            ignore_eos=request.ignores_end,
            detokenize=False,
        )

    return EngineRun(
        roots={"": worker.get_model()},
        run=lambda: _answer(engine.llm_engine, requests, sampling),
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


def _answer(engine: Any, requests: Sequence[Request], sampling: Callable[[Request], Any]) -> None:
    """Give the engine each request at its arrival, and run it until all are answered."""
    began, waiting = time.monotonic(), list(enumerate(requests))[::-1]
    while waiting or engine.has_unfinished_requests():
        now = time.monotonic() - began
        while waiting and waiting[-1][1].arrival <= now:
            number, request = waiting.pop()
            prompt: Any = request.prompt
            if not isinstance(prompt, str):
                prompt = {"prompt_token_ids": list(prompt)}
            engine.add_request(str(number), prompt, sampling(request))
        if engine.has_unfinished_requests():
            engine.step()
        elif waiting:
            time.sleep(waiting[-1][1].arrival - now)
