"""Starts vLLM with the arguments of `replay export --to vllm`, and shows what each layer runs.

    python -m benchmarks.exported_vllm

Needs a GPU and vLLM, no network; a backend per kind of layers needs vLLM 0.26. Prints a line for
each plan: the exported arguments, and each layer's backend and type of cache. Exit code 1 if vLLM
refuses the arguments, or runs another backend or cache than the plan says.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.engines_vllm import Case, engine_options, save_checkpoint
from benchmarks.gpu import gpu
from benchmarks.vllm_process import Child, model_of
from replay.api.export_plan import export
from replay.plan.plan import Plan
from tests.replay.export.plans import choice, plan_of

LAYERS = 4
PLANS = {
    "FlashAttention 2": ["fa2-kvcache"] * LAYERS,
    "FlashAttention 3": ["fa3-kvcache"] * LAYERS,
    "FP8 caches": ["fa3-kvcache-fp8"] * LAYERS,
    "FP8 in two layers": [*["fa3-kvcache-fp8"] * 2, *["fa3-kvcache"] * 2],
    "FlashInfer": ["flashinfer-paged"] * LAYERS,
    "FlexAttention": ["flex"] * LAYERS,
    "a backend per kind": ["flex", "fa3-kvcache"] * 2,
}
"""The kernel of each layer."""
PER_KIND = "a backend per kind"
"""The plan of the model whose even layers have a sliding window."""
STARTS = {"flex": "FlexAttention", "flashinfer-paged": "FlashInfer"}
"""Start of the name of vLLM's class for a kernel; FlashAttention for others."""


def plan(name: str) -> Plan:
    return plan_of(
        *(
            choice(
                f"model.layers.{layer}.self_attn.attn",
                kernel,
                phase=phase,
                has_window=layer % 2 == 0 if name == PER_KIND else None,
                baseline_ms=5.0 + 5.0 * (layer % 2),  # layers without a window take longer
            )
            for layer, kernel in enumerate(PLANS[name])
            for phase in ("prefill", "decode", "mixed")
        )
    )


def run(name: str, directory: Path) -> None:
    """Start vLLM as the plan says, generate, and print what its layers run."""
    import vllm
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported

    path = directory / "vllm.json"
    export(plan(name), "vllm", path)
    exported = json.loads(path.read_text())
    print(f"{name}: {json.dumps(exported)}", flush=True)
    version = exported["attention_config"].get("flash_attn_version")
    if version and not is_fa_version_supported(version):
        print(f"{name}: not run, since this build of vLLM has no FlashAttention {version}")
        return
    if name == PER_KIND and tuple(map(int, vllm.__version__.split(".")[:2])) < (0, 26):
        print(f"{name}: not run, since vLLM {vllm.__version__} has one backend")
        return
    checkpoint = "gemma" if name == PER_KIND else "llama"
    options = engine_options(Case(checkpoint, "FLASH_ATTN"))
    for replaced in ("attention_config", "kv_cache_dtype"):
        del options[replaced]
    engine = LLM(model=str(directory / checkpoint), **options, **exported)
    prompt = TokensPrompt(prompt_token_ids=list(range(100)))
    engine.generate([prompt], SamplingParams(max_tokens=4), use_tqdm=False)
    modules = model_of(engine).modules()
    layers = [layer for layer in modules if getattr(layer, "kv_cache", None) is not None]
    impls = [type(layer.impl).__name__ for layer in layers]
    caches = [layer.kv_cache_dtype for layer in layers]
    print(f"{name}: {', '.join(impls)}; caches {', '.join(caches)}", flush=True)
    for kernel, impl, cache in zip(PLANS[name], impls, caches, strict=True):
        is_backend = impl.startswith(STARTS.get(kernel, "FlashAttention"))
        if not is_backend or cache.startswith("fp8") != kernel.endswith("fp8"):
            raise SystemExit(f"{name}: wrong: {kernel} became {impl} with a cache in {cache}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120, help="limit of an engine")
    parser.add_argument("--plans", default=",".join(PLANS), help="names, separated by commas")
    parser.add_argument("--run", nargs=2, metavar=("PLAN", "DIR"), help="run one in this process")
    options = parser.parse_args()
    if options.run:
        run(options.run[0], Path(options.run[1]))
        return
    gpu()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for checkpoint in ("llama", "gemma"):
            save_checkpoint(checkpoint, directory / checkpoint)
        for each in options.plans.split(","):
            child = Child(directory / "log", "exported_vllm", "--run", each, name)
            child.wait(options.seconds)
            shown = [line for line in child.lines() if line.startswith(f"{each}: ")]
            if child.process.returncode:
                failed = True
                shown.append(f"{each}: failed: {child.failure()}")
            print("\n".join(shown), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
