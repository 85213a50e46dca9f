"""Kernels by module and phase run at the right places, in eager and compiled models."""

import gc
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capture import load, record
from capture.errors import RecordingWarning
from capture.hooks.census import CallSignature
from capture.hooks.interceptor import TORCH_SDPA, Arguments
from replay import use_kernel, use_plan
from replay.kernels.registry import KernelNameError
from replay.patch.call_counts import Swap
from replay.patch.planned_modules import PlanMismatch, key_length
from replay.plan.key_lengths import KeyLengths
from replay.plan.plan import PlanError
from tests.factories import tiny_llama

from .conftest import graphs, plan_of

pytestmark = pytest.mark.usefixtures("scaled")


class Attention(nn.Module):
    breaks = False

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, states: Tensor) -> Tensor:
        batch, length, _ = states.shape
        heads = self.inward(states).view(batch, length, 2, 8).transpose(1, 2)
        if self.breaks:
            torch._dynamo.graph_break()
        attended = F.scaled_dot_product_attention(heads, heads, heads)
        normed: Tensor = self.norm(attended.transpose(1, 2).reshape(batch, length, 16))
        return normed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, states: Tensor) -> Tensor:
        attended: Tensor = self.attn(states)
        return states + attended


class Transformer(nn.Module):
    """Denoiser, which takes a timestep."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, states: Tensor, timestep: Tensor) -> Tensor:
        for block in self.blocks:
            states = block(states)
        return states * timestep


STATES, TIMESTEP = torch.randn(2, 5, 16), torch.tensor(0.5)


@pytest.fixture
def transformer() -> Transformer:
    return Transformer().eval()


def scaled_by_hand(model: Transformer, *factors: int) -> Tensor:
    """Return the model's output with the attention output of each block scaled."""
    states = STATES
    for block, factor in zip(model.blocks, factors, strict=True):
        assert isinstance(block, Block)
        attn = block.attn
        heads = attn.inward(states).view(2, 5, 2, 8).transpose(1, 2)
        attended = factor * TORCH_SDPA(heads, heads, heads)
        states = states + attn.norm(attended.transpose(1, 2).reshape(2, 5, 16))
    return states * TIMESTEP


MIXED = (
    ("transformer.blocks.0.attn", "denoise", "twice"),
    ("transformer.blocks.1.attn", "denoise", "thrice"),
    ("transformer.blocks.3.attn", "denoise", "twice"),
)


def check_mixed(swap: Swap, output: Tensor, model: Transformer, runs: int = 1) -> None:
    torch.testing.assert_close(output, scaled_by_hand(model, 2, 3, 1, 2))
    assert {name: tally.hits for name, tally in swap.kernels.items()} == {
        "twice": 2 * runs,
        "thrice": runs,
    }
    assert swap.not_planned == runs
    assert swap.fallbacks == {"not in the plan": runs}
    assert swap.missing == []


@pytest.mark.parametrize("given", ["nothing", "module", "pipeline", "file"])
def test_each_module_gets_its_kernel(given: str, transformer: Transformer, tmp_path: Path) -> None:
    plan: Any = replace(plan_of(*MIXED), device="cpu")
    if given == "file":
        plan.save(tmp_path / "plan.json")
        plan = str(tmp_path / "plan.json")
    watched = {"module": transformer, "pipeline": {"vae": nn.Linear(2, 2), "transformer": None}}
    watched["pipeline"]["transformer"] = transformer
    before = transformer(STATES, timestep=TIMESTEP)
    with use_plan(plan, watched.get(given)) as swap:
        check_mixed(swap, transformer(STATES, timestep=TIMESTEP), transformer)
    assert str(swap) == "twice: 2 calls\nthrice: 1 call\nnot in the plan: 1 call"
    assert torch.equal(transformer(STATES, timestep=TIMESTEP), before)
    assert not any("forward" in vars(module) for module in transformer.modules())


class NoLength(nn.Module):
    """Module without a length, like a compiled graph."""

    def __len__(self) -> int:
        raise TypeError("has no length")


def test_deleted_model_and_other_kinds_of_modules_are_ignored(transformer: Transformer) -> None:
    """The deleted model has the same paths as the live one, and a cycle keeps it in memory."""
    others = NoLength(), nn.ModuleList(), torch.jit.script(nn.Linear(2, 2))
    gone = nn.Module()
    gone.transformer = Transformer()
    gone.itself = [gone]
    gc.disable()
    try:
        del gone
        with use_plan(plan_of(*MIXED)) as swap:
            check_mixed(swap, transformer(STATES, TIMESTEP), transformer)
    finally:
        gc.enable()
    assert len(others) == 3  # the tuple keeps the modules alive


def test_recorded_names_fit_modules_called_as_forward(
    transformer: Transformer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    by_forward = lambda block, states: states + block.attn.forward(states)  # noqa: E731
    monkeypatch.setattr(Block, "forward", by_forward)
    with record(transformer, tmp_path / "calls"):
        transformer(STATES, TIMESTEP)
    origins = [call.origin for call in load(tmp_path / "calls")]
    plan = plan_of(*((origin.module, origin.phase, "twice") for origin in origins))
    one = use_kernel("twice", module=transformer.blocks[0])
    for used, hits in ((use_plan(plan, transformer), 4), (one, 1)):
        with used as swap:
            transformer(STATES, TIMESTEP)
        assert (swap.hits, swap.not_planned) == (hits, 4 - hits)
    said = "Transformer was called as `.forward.*, so a plan may not apply: call the model as"
    with pytest.warns(RecordingWarning, match=said), record(transformer, tmp_path / "unfollowed"):
        transformer.forward(STATES, TIMESTEP)


class Adapted(nn.Module):
    """Stand-in for a wrapper of peft, around adapted layers or learned prompts."""

    def __init__(self, model: nn.Module, *, prompts: bool) -> None:
        super().__init__()
        self.base_model = model if prompts else nn.ModuleDict({"model": model})
        self.inner = [model]

    def get_base_model(self) -> nn.Module:
        return self.inner[0]


@pytest.mark.parametrize("prompts", [False, True])
def test_paths_fit_with_and_without_a_component_and_peft(
    prompts: bool, transformer: Transformer
) -> None:
    adapted = Adapted(transformer, prompts=prompts)
    inside = "base_model." if prompts else "base_model.model."
    bare = [(path[12:], phase, kernel) for path, phase, kernel in MIXED]
    wrapped = [(f"{inside}{path}", phase, kernel) for path, phase, kernel in bare]
    named = [(f"transformer.{path}", phase, kernel) for path, phase, kernel in wrapped]
    places: list[Any] = [transformer, adapted]
    places += [None, *({"transformer": place} for place in places)]
    for plan, watched in itertools.product((MIXED, bare, wrapped, named), places):
        with use_plan(plan_of(*plan), watched) as swap:
            check_mixed(swap, transformer(STATES, TIMESTEP), transformer)


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_blocks_compiled_alone_share_the_graphs_of_their_choice(
    how: str, transformer: Transformer
) -> None:
    for number, block in enumerate(transformer.blocks):
        if how == "in place":
            block.compile(backend="eager", fullgraph=True)
        else:
            transformer.blocks[number] = torch.compile(block, backend="eager", fullgraph=True)
    plain = Transformer().eval()
    plain.load_state_dict(
        {name.replace("_orig_mod.", ""): held for name, held in transformer.state_dict().items()}
    )
    before = transformer(STATES, TIMESTEP)
    for _ in range(2):
        with use_plan(plan_of(*MIXED), {"transformer": transformer}) as swap:
            check_mixed(swap, transformer(STATES, TIMESTEP), plain)
        assert torch.equal(transformer(STATES, TIMESTEP), before)
    assert graphs() == 1 + 3  # one without a plan; three for twice, thrice, not in the plan


def test_code_of_a_plan_runs_only_with_permission(transformer: Transformer, tmp_path: Path) -> None:
    trace = tmp_path / "executed"
    code = (
        "from pathlib import Path\n"
        "from torch.nn.functional import scaled_dot_product_attention as mine\n"
        f"Path({str(trace)!r}).touch()\n"
    )
    (tmp_path / "k.py").write_text(code)
    plan = plan_of(("blocks.0.attn", "denoise", f"{tmp_path}/k.py:mine"))
    with pytest.raises(PlanError, match=r"k\.py:mine: read it, and .* trust_code=True"):
        use_plan(plan, transformer).__enter__()
    assert not trace.exists()
    with use_plan(plan, transformer, trust_code=True) as swap:
        transformer(STATES, TIMESTEP)
    assert trace.exists()
    assert swap.hits


def test_another_plan_is_another_graph(transformer: Transformer) -> None:
    compiled = torch.compile(transformer, backend="eager", fullgraph=True)
    path = "blocks.0.attn"
    for name, factor in (("twice", 2), ("thrice", 3), ("twice", 2)):
        with use_plan(plan_of((path, "denoise", name)), transformer):
            output = compiled(STATES, TIMESTEP)
        torch.testing.assert_close(output, scaled_by_hand(transformer, factor, 1, 1, 1))
    with use_kernel("thrice"):
        output = compiled(STATES, TIMESTEP)
    torch.testing.assert_close(output, scaled_by_hand(transformer, 3, 3, 3, 3))


def test_graph_break_keeps_the_module(
    transformer: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Attention, "breaks", True)
    compiled = torch.compile(transformer, backend="eager")
    compiled(STATES, TIMESTEP)
    with use_plan(plan_of(*MIXED), transformer) as swap:
        check_mixed(swap, compiled(STATES, TIMESTEP), transformer)


def test_threads_do_not_share_modules(transformer: Transformer) -> None:
    run = torch.no_grad()(lambda _: transformer(STATES, TIMESTEP))
    with use_plan(plan_of(*MIXED), transformer) as swap, ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(run, range(80)))
    check_mixed(swap, outputs[0], transformer, runs=80)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_module_is_left_after_an_exception(transformer: Transformer) -> None:
    plan = plan_of(*MIXED)
    forward = transformer.blocks[1].attn.norm.forward  # type: ignore[union-attr]
    heads = torch.randn(1, 2, 5, 8)
    with use_plan(plan, transformer) as swap:
        transformer.blocks[1].attn.norm.forward = None  # type: ignore[union-attr,assignment]
        with pytest.raises(TypeError):
            transformer(STATES, TIMESTEP)
        F.scaled_dot_product_attention(heads, heads, heads)
        assert swap.fallbacks == {"not in the plan": 1}
        transformer.blocks[1].attn.norm.forward = forward  # type: ignore[union-attr]
    with pytest.raises(ZeroDivisionError), use_plan(plan, transformer):
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is TORCH_SDPA
    assert "forward" not in vars(transformer.blocks[0].attn)  # type: ignore[arg-type]


def test_inner_module_does_not_inherit_the_kernel() -> None:
    class Outer(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attention()

        def forward(self, states: Tensor) -> Tensor:
            mixed: Tensor = self.inner(super().forward(states))
            return mixed

    model = nn.Sequential(Outer()).eval()
    with use_plan(plan_of(("0", "encode", "twice")), model) as swap:
        model(STATES)
    assert (swap.hits, swap.not_planned) == (1, 1)


class TwoEncoders(nn.Module):
    """Attention to the keys of two encoders, as with an IP-Adapter."""

    def forward(self, query: Tensor, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        attention = F.scaled_dot_product_attention
        return attention(query, text, text), attention(query, image, image)


@pytest.mark.parametrize("compiled", [False, True])
def test_lengths_of_a_module_have_their_own_kernels(compiled: bool) -> None:
    model = nn.Sequential(TwoEncoders())
    query, text, image = (torch.randn(1, 2, length, 8) for length in (6, 77, 4))
    run = torch.compile(model[0], backend="eager", fullgraph=True) if compiled else model[0]
    before = model[0](query, text, image)
    ranges = [KeyLengths(4, 4), KeyLengths(77, 80)]
    plan = plan_of(("0", "encode", "thrice"), ("0", "encode", "twice"), kv_lens=ranges)
    with use_plan(plan, model) as swap:
        of_text, of_image = run(query, text, image)
    torch.testing.assert_close((of_text, of_image), (2 * before[0], 3 * before[1]))
    assert swap.with_other_lengths == 0
    said = r"a call has 17 keys, for which the plan was not made, .*: record such a run and plan"
    with use_plan(plan, model) as swap:
        repeated = image[:, :, :1].repeat(1, 1, 17, 1)
        with pytest.warns(UserWarning, match=said) as warned:
            (_, of_image), _ = run(query, text, repeated), run(query, text, repeated)
        assert len(warned) == 1
    torch.testing.assert_close(of_image, 3 * image[:, :, :1].expand(1, 2, 6, 8))
    assert swap.on_other_lengths in str(swap)


@pytest.mark.parametrize("packed", [False, True])
def test_paged_key_length_matches_the_recording(packed: bool) -> None:
    query, pool = torch.randn(2, 2, 1, 8), torch.randn(9, 2, 16, 8)
    lengths = torch.tensor([0, 1, 2]) if packed else None
    table = torch.zeros(2, 3, dtype=torch.int32)
    arguments = Arguments.of(query, pool, pool, None, page_table=table, cu_seqlens_q=lengths)
    assert key_length(arguments) == CallSignature.of(arguments).key[-2] == (96 if packed else 48)


def test_plan_of_another_gpu_needs_permission(
    transformer: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    plan = replace(plan_of(("blocks.0.attn", "denoise", "twice")), device="H200")
    refused = pytest.raises(PlanError, match=r"plan was made on H200, and this is cpu: .* any_dev")
    with refused, use_plan(plan, transformer):
        pass
    with use_plan(plan, transformer, any_device=True) as swap:
        transformer(STATES, TIMESTEP)
    assert swap.hits == 1


def test_modules_missing_in_the_model_are_reported(transformer: Transformer) -> None:
    choices = [*MIXED, ("transformer.blocks.9.attn", "denoise", "twice")]
    with use_plan(plan_of(*choices), transformer) as swap:
        transformer(STATES, TIMESTEP)
    assert swap.missing == ["transformer.blocks.9.attn"]
    assert str(swap).endswith("\nnot in the model: transformer.blocks.9.attn")


def test_unusable_plans_are_refused_in_one_sentence(transformer: Transformer) -> None:
    def refused(error: type[Exception], match: str, plan: Any, module: Any = transformer) -> None:
        with pytest.raises(error, match=match), use_plan(plan, module):
            pass
        assert F.scaled_dot_product_attention is TORCH_SDPA

    path = "transformer.blocks.0.attn"
    refused(PlanError, r"^cannot read the plan x{1,2000} … x+ .*: make one with", "x" * 10**6)
    refused(TypeError, "plan must be a Plan or the path of its file, got int", 3)
    refused(KernelNameError, "no kernel 'twic'", plan_of((path, "denoise", "twic")))
    refused(PlanMismatch, "Linear has no module 'tr", plan_of(*MIXED), nn.Linear(2, 2))
    refused(PlanMismatch, "process has no module 'x.y'", plan_of(("x.y", "encode", "twice")), None)
    refused(PlanMismatch, "names no module", plan_of())
    refused(TypeError, "nothing to watch in str", plan_of(*MIXED), "transformer")
    twins = plan_of((path, "denoise", "twice"), (f"another{path[11:]}", "denoise", "thrice"))
    refused(PlanMismatch, "differ only in their component", twins, None)
    with use_plan(plan_of(*MIXED), transformer):
        refused_inside = pytest.raises(RuntimeError, match="already intercepted")
        with refused_inside, use_kernel("twice"):
            pass
        assert F.scaled_dot_product_attention is not TORCH_SDPA


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_language_model_has_a_kernel_for_each_phase(compiled: bool, tmp_path: Path) -> None:
    model, prompt = tiny_llama(vocab_size=32), torch.arange(7)[None]

    def generate() -> Tensor:
        tokens: Tensor = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
        return tokens

    before = generate()
    with record(model, out=tmp_path, max=100):
        generate()
    recorded = {(call.origin.module, call.origin.phase) for call in load(tmp_path)}
    kernels = {"prefill": "twice", "decode": "thrice"}
    plan = plan_of(*((module, phase, kernels[phase]) for module, phase in sorted(recorded)))
    assert len(plan.choices) == 4
    if compiled:
        model.compile(backend="eager")
    with use_plan(plan, model) as swap:
        generate()
    assert {name: tally.hits for name, tally in swap.kernels.items()} == {"twice": 2, "thrice": 6}
    assert swap.not_planned == 0
    assert torch.equal(generate(), before)
