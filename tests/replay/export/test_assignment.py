"""Kernels that an export assigns to the places of a target, and what it reports as lost."""

import ast
import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.nn.attention import SDPBackend

from replay.api.export_plan import export
from replay.cli.main import main
from replay.export.loaders import __path__ as LOADERS
from replay.export.targets import TARGETS
from replay.export.vllm import KINDS
from replay.kernels.registry import catalogue
from replay.plan.plan import LayerChoice, PlanError
from tests.in_this_process import runner
from tests.replay.export.plans import choice, plan_of

HOSTILE = 'a\'"""\n]; raise SystemExit  # \\ \u2028 \ud800 é {}'


XDIT = Enum("XDIT", ["SDPA", "FLASH", "CUDNN", "FLASH_3", "FLASH_3_FP8"])
"""Stand-in for a part of xDiT's `AttentionBackendType`."""


def schedule(*choices: LayerChoice, steps: int = 4) -> list[str]:
    """Export a plan and read it like xDiT's `AttentionSchedule.from_comma_delimited_string`."""
    text = export(plan_of(*choices), "xdit", steps=steps).text
    return [XDIT[token.strip().upper()].name for token in text.split(",")]


@pytest.mark.parametrize(
    ("choices", "names"),
    [
        ((choice("a", "fa3"), choice("b", "fa3")), "FLASH_3"),
        # 8 bits are used only at the layers for which they were chosen.
        ((choice("a", "fa3-fp8", 9.0, fa3=2.0), choice("b", "fa3", 2.0)), "FLASH_3"),
        ((choice("a", "fa3-fp8", 9.0), choice("b", "torch-default", 0.0)), "SDPA"),
        ((choice("a", "fa3"), choice("b", "torch-default", 0.0)), "SDPA"),
        ((choice("a", "fa3"), choice("b", "torch-default", 0.0, fa3=-0.5)), "FLASH_3"),
        ((choice("a", "fa3"), choice("b", "torch-default", 0.0, fa3=-1.5)), "SDPA"),
        (
            (
                choice("a", "fa3", 1.0, torch_cudnn=0.5, fa2=0.9),
                choice("b", "torch-cudnn", 2.0, fa3=1.0, fa2=1.5),
            ),
            "CUDNN",
        ),
        # A kernel that no layer chose saves most together, or xDiT lacks the chosen one.
        ((choice("a", "fa3", torch_cudnn=0.9), choice("b", "fa2", torch_cudnn=0.9)), "CUDNN"),
        ((choice("a", "sage1", 9.0, fa3=1.0), choice("b", "fa3", 2.0)), "FLASH_3"),
        ((choice("a", "sage1", 9.0, fa3=1.0),), "FLASH_3"),
        # The plan keeps the model's own attention, however fast another kernel seems.
        ((choice("a", "torch-default", 0.0, fa3=1.0),), "SDPA"),
        ((choice("a", "fa3", phase="encode"),), "SDPA"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layers_that_share_a_kernel(choices: tuple[LayerChoice, ...], names: str) -> None:
    assert schedule(*choices, steps=1) == [names]


def test_schedule_has_a_name_for_each_step() -> None:
    choices = [
        choice("a", "fa3", steps=(1, 2)),
        choice("a", "fa3-fp8", steps=(3, 4)),
        choice("b", "fa3-fp8", steps=(2, 4), fa3=1.0),
    ]
    names = ["SDPA", "SDPA", "FLASH_3", "FLASH_3_FP8", "FLASH_3_FP8", "SDPA"]
    choices.append(choice("b", "torch-default", 0.0, steps=(0, 1)))
    assert schedule(*choices, steps=6) == names
    assert schedule(choice("a", "fa3", steps=(1, 9_999)), steps=2) == ["SDPA", "FLASH_3"]


def test_steps_count_by_their_share_of_a_choice() -> None:
    """In steps 0 and 1, fa3 saves 2 ms in the first layer and costs 2 ms in the second."""
    short = choice("b", "fa2", 2.0, steps=(0, 1), fa3=-2.0)
    rest = choice("b", "fa3", 8.0, steps=(2, 9))
    found = schedule(choice("a", "fa3", 10.0, steps=(0, 9), fa2=5.0), short, rest, steps=3)
    assert found == ["FLASH", "FLASH", "FLASH_3"]


def test_kernel_may_run_at_a_layer_that_has_it_without_the_plan() -> None:
    own = replace(choice("a", "sage1", 5.0), baseline="fa3")
    exported = export(plan_of(own, choice("b", "fa3", 2.0)), "xdit", steps=1)
    assert (exported.text, exported.saved_ms) == ("FLASH_3\n", 2)
    kept = replace(choice("a", "eager", 0.0, fa3=0.0), baseline="eager")
    (loss,) = export(plan_of(kept, choice("b", "fa3", 2.0)), "xdit", steps=1).losses
    assert loss.reason == "xdit has one kernel for all layers of a step"


def layer(number: int, kernel: str, *of_choice: float, **fields: Any) -> LayerChoice:
    module, fields = f"model.layers.{number}.attn", {"phase": "decode", **fields}
    return choice(module, kernel, *of_choice, **fields)


full, window = partial(layer, has_window=False), partial(layer, has_window=True)


def per_kind(version: int = 0, **backends: str) -> dict[str, Any]:
    versions = {"flash_attn_version": version} if version else {}
    return {"attention_config": {"backend": "auto", "backend_per_kind": backends, **versions}}


FLASH_3 = {"attention_config": {"backend": "FLASH_ATTN", "flash_attn_version": 3}}
FLASHINFER = {"attention_config": {"backend": "FLASHINFER"}}
FP8 = "fa3-kvcache-fp8"
ONLY_0_IN_FP8 = {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["1", "2"]}


@pytest.mark.parametrize(
    ("choices", "arguments", "lost_ms"),
    [
        (
            [
                layer(0, "flashinfer-decode", 5.0, fa3_kvcache=1.0),
                layer(0, "fa3", phase="prefill", flashinfer_paged=0.5),
            ],
            FLASHINFER,
            0.5,
        ),
        (
            [
                layer(0, "flashinfer-decode", fa3_kvcache=0.0),
                layer(1, "fa3-varlen", 2.0, phase="mixed", flashinfer_paged=0.0),
            ],
            FLASH_3,
            1,
        ),
        ([layer(0, "fa3-kvcache"), layer(0, "fa3", phase="prefill")], FLASH_3, 0),
        ([layer(0, "triton-decode")], {}, 1),
        ([layer(0, "triton-decode", flashinfer_paged=0.75)], FLASHINFER, 0.25),
        # The faster one of a backend's kernels counts, unless the model has it already.
        (
            [layer(0, "triton-decode", flashinfer_paged=0.75, flashinfer_decode=0.5)],
            FLASHINFER,
            0.25,
        ),
        (
            [layer(0, "triton-decode", flashinfer_decode=0.5, flashinfer_paged=0.75)],
            FLASHINFER,
            0.25,
        ),
        (
            [replace(layer(0, "triton-decode", fa3=0.5), baseline="fa3-varlen")],
            FLASH_3,
            1,
        ),
        ([layer(0, "fa3", phase="denoise")], {}, 1),
        ([layer(0, FP8), layer(1, FP8)], {**FLASH_3, "kv_cache_dtype": "fp8"}, 0),
        (
            [layer(0, "fa3"), layer(1, FP8), layer(11, "flashinfer-paged", fa3=0.0)],
            {**FLASH_3, "kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0", "11"]},
            1,
        ),
        (
            [
                choice(f"model.layers.{n}.attn", FP8 if n == 0 else "fa3-kvcache", phase="decode")
                for n in (0, 1, 2)
            ],
            {**FLASH_3, **ONLY_0_IN_FP8},
            0,
        ),
        (
            [layer(0, "vllm-flash-attn-fp8"), layer(1, "vllm-flash-attn")],
            {**FLASH_3, "kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["1"]},
            0,
        ),
        # The model ran with an FP8 cache, with which alone the time of FlashInfer was measured.
        (
            [replace(layer(0, "triton-varlen", flashinfer_paged=0.5), baseline=FP8)],
            {**FLASH_3, "kv_cache_dtype": "fp8"},
            1,
        ),
        ([layer(0, "vllm-flash-attn")], {"attention_config": {"backend": "FLASH_ATTN"}}, 0),
        ([layer(0, "vllm-triton")], {"attention_config": {"backend": "TRITON_ATTN"}}, 0),
        # Only one phase of the layer has an FP8 cache, or another layer needs another backend.
        ([layer(0, FP8, fa3=0.0), layer(0, "fa3", phase="prefill")], FLASH_3, 1),
        (
            [layer(0, FP8, flashinfer_paged=0.0), layer(1, "flashinfer-paged", 4.0)],
            FLASHINFER,
            1,
        ),
        (
            [full(0, "flex"), full(1, "flex"), window(2, "flashinfer-paged")],
            per_kind(full_attention="FLEX_ATTENTION", sliding_window="FLASHINFER"),
            0,
        ),
        (
            [full(0, "flash-mla"), window(1, "flashinfer-mla")],
            per_kind(mla_attention="FLASHMLA", sliding_window_mla="FLASHINFER_MLA"),
            0,
        ),
        (
            [full(0, FP8), window(1, "torch-default", 0.0)],
            {
                **per_kind(3, full_attention="FLASH_ATTN"),
                "kv_cache_dtype": "fp8",
                "kv_cache_dtype_skip_layers": ["1"],
            },
            0,
        ),
        ([full(0, "fa3"), window(1, "fa3")], FLASH_3, 0),
        # FlashAttention has one version, and the window of a layer is unknown.
        ([full(0, "fa2", 1.0, fa3=0.0), window(1, "fa3", 2.0)], FLASH_3, 1),
        (
            [full(0, "flex", 2.0, flashinfer_paged=0.0), layer(1, "flashinfer-paged", 5.0)],
            FLASHINFER,
            2,
        ),
        # vLLM cannot name a layer with two numbers.
        ([layer(0, FP8, fa3=0.0), choice("blocks.0.1", "fa3", phase="encode")], FLASH_3, 1),
    ],
)
def test_vllm_has_a_backend_for_each_kind_and_a_cache_for_each_layer(
    choices: list[LayerChoice], arguments: dict[str, object], lost_ms: float
) -> None:
    exported = export(plan_of(*choices), "vllm")
    assert json.loads(exported.text) == arguments
    assert ("needs vLLM 0.26 or later" in str(exported)) == ("per_kind" in exported.text)
    assert sum(loss.lost_ms for loss in exported.losses) == lost_ms


def test_plan_that_changes_nothing_is_said_to() -> None:
    exported = export(plan_of(choice("a", "torch-default", 0.0)), "vllm")
    assert exported.text == "{}\n"
    assert str(exported) == (
        "vllm: the plan changes nothing: it names no kernel but the model's own"
    )


def test_losses_have_their_cost_in_speed_and_error() -> None:
    plan = plan_of(
        choice("a.0", "fa3-fp8", 12.0, steps=(0, 3), fa3=4.0),
        choice("a.0", "fa3", 2.0, steps=(4, 5)),
        choice("a.1", "fa3", 6.0),
        choice("a.2", "sage1", 6.0, fa3=6.0),
        choice("a.3", "torch-default", 0.0, covered=False, fa3=0.0),
        choice("text", "fa2", 1.0, phase="encode"),
    )
    exported = export(plan, "xdit", steps=6)
    assert exported.text == "FLASH_3,FLASH_3,FLASH_3,FLASH_3,FLASH_3,FLASH_3\n"
    assert exported.planned_ms == 27
    found = {loss.planned: loss for loss in exported.losses}
    assert (found["fa3-fp8"].used, found["fa3-fp8"].lost_ms) == ("fa3", 8)
    assert (found["sage1"].used, found["sage1"].lost_ms) == ("fa3", 0)
    assert found["fa2"].lost_ms == 1
    assert exported.saved_ms == 18
    assert str(exported).splitlines() == [
        "xdit: saves 18 of the plan's 27 ms per run on NVIDIA H200",
        "- 1 module (a.0): fa3, not fa3-fp8, because xdit has one kernel for all layers of a "
        "step; costs 8 ms per run; error: within relative_l1 ≤ 0.1",
        "- 1 module (text): torch-default, not fa2, because xdit cannot address these calls; "
        "costs 1 ms per run; error: that of the model's own attention",
        "- 1 module (a.2): fa3, not sage1, because xdit does not have sage1; costs 0 ms per run; "
        "error: within relative_l1 ≤ 0.1",
        "- 1 module (a.3): fa3, not torch-default, because xdit has one kernel for all layers of a "
        "step; costs 0 ms per run; error: not measured",
    ]
    plan = plan_of(choice("a", "fa3", 5.0), choice("b", "sage1", 2.0))
    nothing = export(plan_of(choice("a", "sage1", 0.1), choice("b", "sage1", 0.2)), "vllm")
    assert str(nothing).startswith("vllm: saves nothing of the plan's 0.3 ms per run")
    assert str(export(plan, "diffusers")).endswith(
        "(b): torch-default, not sage1, because diffusers does not have sage1; costs 2 ms per run; "
        "error: that of the model's own attention"
    )


@pytest.mark.parametrize("to", ["diffusers", "transformers"])
def test_names_in_a_plan_do_not_become_code(to: str) -> None:
    plan = plan_of(
        choice(HOSTILE, "torch-math"), choice("b", HOSTILE), choice("c", "x.py:f\x1b[2J")
    )
    exported = export(plan, to)
    written, loader = ast.parse(exported.text), f"{LOADERS[0]}/{to}_plan.py"
    empty = ast.parse(Path(loader).read_text("utf-8"))
    (values,) = [each for each in written.body if isinstance(each, ast.AnnAssign)]
    found = str(ast.literal_eval(values.value))  # type: ignore[arg-type]
    assert repr(HOSTILE) in found
    assert "x.py" not in found
    (empty_values,) = [each for each in empty.body if isinstance(each, ast.AnnAssign)]
    empty_values.value = values.value
    assert ast.dump(written) == ast.dump(empty)
    assert exported.text.isascii()
    assert len(str(exported).splitlines()) == 3
    assert "\x1b" not in str(exported)


@pytest.mark.parametrize("to", TARGETS)
def test_kernels_of_a_target_exist(to: str) -> None:
    assert catalogue().keys() >= TARGETS[to].kernels.keys()
    names = {each for each in TARGETS[to].kernels.values() if not each.startswith("attention_ker")}
    if to == "diffusers":
        dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
        assert names <= {*dispatch.AttentionBackendName._value2member_map_}
    if to == "transformers":
        backends = [name.removeprefix("sdpa_") for name in names if name.startswith("sdpa_")]
        assert {name.upper() for name in backends} <= SDPBackend.__members__.keys()
    if to == "vllm":
        vllm = importlib.util.find_spec("vllm")  # an import would take seconds
        if vllm is None:
            pytest.skip("needs vLLM's files")
        (folder,) = vllm.submodule_search_locations or ()
        registry = ast.parse(Path(folder, "v1/attention/backends/registry.py").read_text("utf-8"))
        members = {each.id for each in ast.walk(registry) if isinstance(each, ast.Name)}
        assert {name.partition(" ")[0] for name in names} <= members
        if "backend_per_kind" in Path(folder, "config/attention.py").read_text("utf-8"):
            kinds = Path(folder, "v1/kv_cache_interface.py").read_text("utf-8")
            assert all(f'= "{kind}"' in kinds for pair in KINDS.values() for kind in pair)


def test_blocks_of_comfyui_are_found_in_paths_of_diffusers_and_comfyui() -> None:
    place: Callable[[LayerChoice], object] = TARGETS["comfyui"].place
    found = {
        "transformer.transformer_blocks.3.attn": ("double", 3),
        "transformer.single_transformer_blocks.12.attn": ("single", 12),
        "diffusion_model.double_blocks.0": ("double", 0),
        "single_blocks.7": ("single", 7),
        "transformer.blocks.2.attn1": ("double", 2),
        "layers.5.attention": ("double", 5),
        "transformer.context_embedder.token_refiner.refiner_blocks.0.attn": None,
        "unet.down_blocks.0.attentions.1.transformer_blocks.0.attn1": None,
        "input_blocks.4.1.transformer_blocks.0.attn1": None,
        "transformer.blocks.2.attn1\n": None,
    }
    assert {module: place(choice(module, "fa2")) for module in found} == found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("xdit",), "xdit has a kernel for each denoising step: give their number"),
        (("xdit", "--steps", "10001"), "invalid number of steps 10001 (must be 1-10,000)"),
        (("diffusers", "--steps", "5"), "does not depend on the number of steps"),
        (("xdit", "--steps", "0"), "--steps: must be an integer of at least 1"),
        (("sglang",), "invalid choice: 'sglang'"),
    ],
)
def test_command_exports(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "plan.json", tmp_path / "schedule.txt"
    plan_of(choice("a", "fa3", 2.0), choice("b", "sage1", fa3=2.0)).save(path)
    command = runner(main, capsys)
    given = ("export", str(path), "--to")
    code, printed, errors = command(*given, *arguments)
    assert (code, printed) == (2, "")
    assert message in errors
    summary = (
        "xdit: saves 4 of the plan's 3 ms per run on NVIDIA H200\n"
        "- 1 module (b): fa3, not sage1, because "
    )
    code, printed, errors = command(*given, "xdit", "--steps", "2", "--out", str(out))
    assert (code, errors, out.read_text()) == (0, "", "FLASH_3,FLASH_3\n")
    assert printed.startswith(summary)
    code, printed, errors = command(*given, "xdit", "--steps", "2")
    assert (code, printed) == (0, "FLASH_3,FLASH_3\n")
    assert errors.startswith(summary)
    with pytest.raises(PlanError, match="unknown target 'sglang': choose from diffusers, transf"):
        export(path, "sglang")
