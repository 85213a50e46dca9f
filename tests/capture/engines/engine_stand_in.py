"""Stand-in for vLLM's engine: `LLM`, its worker, and a model of two layers on the CPU."""

from __future__ import annotations

import dataclasses
import random
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.hooks.entry_points import vllm_stand_in
from tests.capture.hooks.entry_points.vllm_stand_in import (
    SLOTS,
    Builder,
    FirstBackend,
    Impl,
    Layer,
    batch_of,
)
from tests.factories import normal

HEADS, KV_HEADS, WIDTH, BLOCKS, STEP_TOKENS, VOCABULARY, CONTEXT = 4, 2, 16, 4, 24, 100, 64
"""BLOCKS: blocks of the cache for each request; STEP_TOKENS: prompt tokens that a step reads."""

SamplingParams = SimpleNamespace
ranks = [0]
parallel = SimpleNamespace(data_parallel_index=0)
MODULES = {
    "vllm.v1.attention.backend": vllm_stand_in,
    **dict.fromkeys(
        ("vllm", "vllm.distributed", "vllm.v1.worker.worker_base"), sys.modules[__name__]
    ),
}
"""Modules that stand for vLLM's."""


def get_tp_group() -> Any:
    return SimpleNamespace(ranks=ranks)


@dataclasses.dataclass
class Running:
    """Request in the engine."""

    row: int
    prompt: list[int]
    left: int
    read: int = 0


class Model(nn.Module):
    """Two layers of attention over a cache of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        shape = FirstBackend.get_kv_cache_shape(8 * BLOCKS, SLOTS, KV_HEADS, WIDTH)
        self.layers = nn.ModuleList(
            Layer(f"model.layers.{n}.attn", FirstBackend, Impl(WIDTH**-0.5), normal(*shape, seed=n))
            for n in range(2)
        )

    def forward(self, states: Tensor, metadata: Any) -> Tensor:
        for n, layer in enumerate(self.layers):
            new = normal(len(states), KV_HEADS, WIDTH, seed=9 + n)
            states = states + layer(states, new, new, metadata).view_as(states)
        return states


class Worker:
    """Worker that runs a step, and returns a token of each request."""

    def __init__(self, name: str, whole_graphs: bool) -> None:
        config = SimpleNamespace(model=name)
        self.vllm_config = SimpleNamespace(model_config=config, parallel_config=parallel)
        self.model, self.builder, self.whole_graphs = Model(), Builder(), whole_graphs
        layers = {layer.layer_name: layer for layer in self.model.layers}
        compilation = SimpleNamespace(static_forward_context=layers)
        self.builder.vllm_config = SimpleNamespace(compilation_config=compilation)

    def get_model(self) -> Model:
        return self.model

    def execute_model(self, step: list[tuple[Running, int]]) -> list[int]:
        queries = [tokens for _, tokens in step]
        lengths = [each.read + tokens for each, tokens in step]
        prefilling = [each.read < len(each.prompt) for each, _ in step]
        rows = torch.tensor([each.row for each, _ in step])
        table = rows[:, None] * BLOCKS + torch.arange(BLOCKS)
        common = batch_of(queries, lengths, table, prefilling)
        metadata = self.builder.build(0, common)
        if self.whole_graphs and not any(prefilling):
            return [0] * len(step)
        states = normal(common.num_actual_tokens, HEADS, WIDTH, seed=sum(lengths))
        with torch.no_grad():
            output = self.model(states, metadata)
        last = output[common.query_start_loc[1:].long() - 1].flatten(1).double().sum(1)
        return (last.abs() * 1000).long().remainder(VOCABULARY).tolist()


class WorkerWrapperBase:
    """Wrapper of a worker, whose `execute_model` runs once a step."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)

    def execute_model(self, step: list[tuple[Running, int]]) -> list[int]:
        return self.worker.execute_model(step)


class Engine:
    """Engine that answers requests in the order of their arrival."""

    def __init__(self, worker: WorkerWrapperBase) -> None:
        self.model_executor = SimpleNamespace(driver_worker=worker)
        self.model_config = SimpleNamespace(
            get_vocab_size=lambda: VOCABULARY, max_model_len=CONTEXT
        )
        self.requests: list[Running] = []
        self.tokens: list[list[int]] = []
        """Tokens of each request."""
        self.steps: list[list[int]] = []
        """Queries of the requests of each step."""

    def add_request(self, name: str, prompt: Any, sampling: Any) -> None:
        tokens = [0] * 5 if isinstance(prompt, str) else prompt["prompt_token_ids"]
        if max(tokens) >= VOCABULARY:
            raise ValueError(f"token id {max(tokens)} is out of vocabulary")
        self.tokens.append([])
        self.requests.append(Running(len(self.tokens) - 1, tokens, sampling.max_tokens))

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> None:
        room, step = STEP_TOKENS, []
        for each in self.requests:
            tokens = min(room, max(len(each.prompt) - each.read, 1))
            if tokens:
                step.append((each, tokens))
            room -= tokens
        self.steps.append([tokens for _, tokens in step])
        found = self.model_executor.driver_worker.execute_model(step)
        for (each, tokens), token in zip(step, found, strict=True):
            each.read += tokens
            if each.read >= len(each.prompt):
                self.tokens[each.row].append(token)
                each.left -= 1
        self.requests = [each for each in self.requests if each.left]


class LLM:
    """Engine with a model, in this process."""

    latest: LLM

    def __init__(self, model: str, **options: Any) -> None:
        self.options = options
        whole_graphs = options.get("compilation_config", {}).get("cudagraph_mode") == "FULL"
        self.llm_engine = Engine(WorkerWrapperBase(Worker(model, whole_graphs)))
        LLM.latest = self

    def answer(self, lengths: list[int], max_tokens: int = 4) -> list[list[int]]:
        """Return the tokens for random prompts."""
        draw, self.llm_engine.tokens = random.Random(0), []
        for n, length in enumerate(lengths):
            prompt = {"prompt_token_ids": [draw.randrange(VOCABULARY) for _ in range(length)]}
            self.llm_engine.add_request(str(n), prompt, SamplingParams(max_tokens=max_tokens))
        while self.llm_engine.has_unfinished_requests():
            self.llm_engine.step()
        return self.llm_engine.tokens
