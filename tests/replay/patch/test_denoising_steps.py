"""Kernels of ranges of denoising steps run at their steps, in one graph for all steps."""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from replay import apply, register_kernel, use_plan
from replay.patch.denoising_steps import current_step
from replay.plan.key_lengths import KeyLengths
from replay.plan.plan import Plan, PlanError
from replay.plan.step_ranges import StepRange
from tests import tiny_flux

from .conftest import graphs, plan_of, scaling
from .test_custom_op import operators
from .test_use_plan import STATES, Block, Transformer

STEPS = 4
EARLY, LATE = StepRange(0, 1), StepRange(2, 3)


class Scheduler:
    def set_timesteps(self, count: int) -> None:
        self.timesteps = torch.linspace(1, 0.25, count)

    def step(self, states: Tensor) -> Tensor:
        return states


class Pipeline:
    """Denoiser that reads two prompts at each step."""

    def __init__(self, transformer: nn.Module, scheduler: Any = None) -> None:
        self.scheduler = scheduler or Scheduler()
        self.transformer = transformer
        self.step = -1

    @property
    def components(self) -> dict[str, Any]:
        return {"transformer": self.transformer, "scheduler": self.scheduler}

    def __call__(self, steps: int = STEPS) -> Tensor:
        self.scheduler.set_timesteps(steps)
        total = torch.zeros(())
        for index, time_step in enumerate(self.scheduler.timesteps):
            self.step = index
            for _ in range(2):
                # A new tensor each time, as when a pipeline expands the time step to the batch.
                total = total + self.transformer(STATES, time_step.expand(2)[0].clone())
            self.scheduler.step(total)
        return total


def kernels_at_steps(pipeline: Any) -> list[tuple[int, str]]:
    """Register `early` and `late`; return the list to which each hit adds its step and kernel."""
    hits: list[tuple[int, str]] = []

    def noted(name: str, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attend(*args: Any, **kwargs: Any) -> Tensor:
            hits.append((pipeline.step, name))
            return kernel(*args, **kwargs)

        return attend

    register_kernel("early")(noted("early", scaling(2)))
    register_kernel("late")(noted("late", scaling(3)))
    return hits


def two_ranges(module: str) -> Plan:
    choices = [(module, "denoise", name) for name in ("early", "late")]
    return plan_of(*choices, steps=[EARLY, LATE])


def each_twice(steps: int) -> list[tuple[int, str]]:
    return [(step, "early" if step < 2 else "late") for step in range(steps) for _ in range(2)]


def wrapped(transformer: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(transformer, backend="aot_eager", fullgraph=True)
    return compiled


def in_place(transformer: nn.Module) -> nn.Module:
    transformer.compile(backend="aot_eager", fullgraph=True)
    return transformer


OPERATORS: list[list[str]] = []


def blocks(transformer: nn.Module) -> nn.Module:
    OPERATORS.clear()
    backend = operators(OPERATORS)
    for block in transformer.modules():
        if isinstance(block, Block):
            block.compile(backend=backend, fullgraph=True)
    return transformer


@pytest.mark.parametrize(
    ("compiling", "number"), [(lambda same: same, 0), (wrapped, 1), (in_place, 1), (blocks, 2)]
)
def test_each_step_has_its_kernel_in_every_run(
    compiling: Callable[[nn.Module], nn.Module], number: int
) -> None:
    """Graphs are counted: none more for a step, a run, or the same plan again."""
    transformer = Transformer(blocks=2).eval()
    pipeline = Pipeline(compiling(transformer))
    hits = kernels_at_steps(pipeline)
    plan = two_ranges("transformer.blocks.0.attn")
    before = pipeline()
    known, modules = graphs(), [*pipeline.transformer.modules()]
    attributes = [{**vars(module)} for module in modules]
    for _ in range(2):
        with use_plan(plan, pipeline) as swap:
            outputs = [pipeline() for _ in range(2)]
        assert hits == 2 * each_twice(STEPS)
        assert {name: tally.hits for name, tally in swap.kernels.items()} == {"early": 8, "late": 8}
        assert swap.not_planned == 2 * 2 * STEPS  # the other block
        assert torch.equal(*outputs)
        hits.clear()
    assert graphs() - known == number
    if compiling is blocks:  # only graphs that depend on the step stay out of CUDA graphs
        assert ["by_step" in str(graph) for graph in OPERATORS] == [False, True, False]
    assert torch.equal(pipeline(), before)
    assert [vars(module) for module in modules] == attributes


def test_kernels_of_lengths_and_steps_share_a_layer() -> None:
    """Steps also count without a pipeline, from the beginning of the block."""
    transformer = Transformer(blocks=1).eval()
    hits = kernels_at_steps(pipeline := Pipeline(transformer))
    del pipeline.scheduler
    path = ("blocks.0.attn", "denoise")
    short, long = KeyLengths(5, 5), KeyLengths(50, 50)
    plan = plan_of(
        *((*path, "early"), (*path, "late"), (*path, "early")),
        kv_lens=[short, short, long],
        steps=[StepRange(0, 0), StepRange(1, 1), StepRange(0, 1)],
    )
    for _ in range(2):
        with use_plan(plan, transformer):
            for pipeline.step, time_step in enumerate((0.9, 0.5)):
                transformer(STATES, torch.tensor(time_step))
                transformer(STATES.repeat(1, 10, 1), torch.tensor(time_step))
        assert hits == [(0, "early"), (0, "early"), (1, "late"), (1, "early")]
        hits.clear()


def test_steps_after_the_plan_keep_the_models_attention() -> None:
    pipeline = Pipeline(Transformer(blocks=1).eval())
    hits = kernels_at_steps(pipeline)
    said = "a call at step 4 is after the last step that the plan was made for, .*: record such"
    with use_plan(two_ranges("blocks.0.attn")) as swap:
        with pytest.warns(UserWarning, match=said) as warned:
            pipeline(steps=6)
        assert len(warned) == 1
    assert hits == each_twice(STEPS)
    assert swap.fallbacks == {"not in the plan": 4}
    assert swap.on_other_steps in str(swap)


def test_calls_without_a_certain_step_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline(Transformer(blocks=1).eval())
    kernels_at_steps(pipeline)
    around = torch.compile(lambda: pipeline.transformer(STATES, torch.ones(())), backend="eager")
    plan = two_ranges("blocks.0.attn")
    with use_plan(plan, pipeline) as swap:
        pipeline()
        with pytest.raises(PlanError, match="compile the denoiser itself, and do so before"):
            around()
        assert swap.hits == 2 * STEPS
        with monkeypatch.context() as replaced, ThreadPoolExecutor(1) as other:
            replaced.setattr(Block, "forward", lambda *_: other.submit(pipeline).result())
            with pytest.raises(PlanError, match="two threads run a denoiser at the same time"):
                pipeline()
        monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
        with pytest.raises(PlanError, match="a CUDA graph repeats those of one step: capture the"):
            current_step(on_gpu=True)
    with use_plan(plan_of(("blocks.0.attn", "denoise", "early")), pipeline):
        pipeline()


class FluxPipeline(DiffusionPipeline):  # type: ignore[misc]
    def __init__(self, transformer: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)
        self.step = -1

    def __call__(self) -> Tensor:
        self.scheduler.set_timesteps(STEPS)
        states: Tensor = torch.zeros(1, 16, 4)
        for index, time_step in enumerate(self.scheduler.timesteps):
            self.step = index
            states = self.scheduler.step(tiny_flux.step(self.transformer), time_step, states)[0]
        return states


@pytest.mark.slow
def test_pipeline_of_diffusers_is_one_graph() -> None:
    pipeline = FluxPipeline(tiny_flux.model(), FlowMatchEulerDiscreteScheduler())
    hits = kernels_at_steps(pipeline)
    plan = two_ranges("transformer.transformer_blocks.0.attn")
    with use_plan(plan, pipeline):
        expected = pipeline()
    pipeline.transformer.compile(backend="aot_eager", fullgraph=True)
    with use_plan(plan, pipeline):
        torch.testing.assert_close(pipeline(), expected)
    assert hits == 2 * [(step, name) for step, name in each_twice(STEPS)[::2]]
    assert graphs() == 1


def test_applied_plan_stays_until_it_is_removed() -> None:
    """Hooks of accelerate are replaced in each run, as a pipeline that offloads models does."""
    transformer = Transformer(blocks=1).eval()
    hits = kernels_at_steps(pipeline := Pipeline(transformer))
    before = [{**vars(module)} for module in transformer.modules()]
    own = pipeline()
    plan = two_ranges("transformer.blocks.0.attn")
    dropped = weakref.ref(apply(plan, pipeline))
    gc.collect()
    with pytest.raises(RuntimeError, match="or remove that applied plan, before"):
        apply(plan, pipeline)
    pipeline()
    assert hits == each_twice(STEPS)
    hits.clear()
    dropped().remove()  # type: ignore[union-attr]
    for hooked in (False, True):
        if hooked:
            add_hook_to_module(transformer, ModelHook())
        with apply(plan, pipeline) as applied:
            for _ in range(2):
                planned = pipeline()
                if hooked:
                    remove_hook_from_module(transformer)
                    add_hook_to_module(transformer, ModelHook())
        assert hits == 2 * each_twice(STEPS)
        assert applied.swap.hits == len(hits)
        assert not torch.equal(planned, own)
        assert torch.equal(pipeline(), own)
        hits.clear()
        applied.remove()
        if not hooked:
            assert [vars(module) for module in transformer.modules()] == before
