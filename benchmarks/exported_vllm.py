"""Starts vLLM with the arguments of `replay export --to vllm`, and shows what each layer runs.

    python -m benchmarks.exported_vllm

Needs a GPU and vLLM, no network. Prints a line for each plan: the exported arguments, the backend
of the layers, and the type of each layer's cache. Exit code 1 if vLLM refuses the arguments, or
runs another backend or cache than the plan says.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.engines_vllm import ENVIRONMENT, Case, engine_options, save_checkpoint
from benchmarks.gpu import gpu
from replay.api.export_plan import export
from replay.plan.plan import Plan
from tests.replay.export.plans import choice, plan_of

LAYERS = 4
PLANS = {
    "FlashAttention 2": ("FlashAttention", ["fa2-kvcache"] * LAYERS),
    "FlashAttention 3": ("FlashAttention", ["fa3-kvcache"] * LAYERS),
    "FP8 caches": ("FlashAttention", ["fa3-kvcache-fp8"] * LAYERS),
    "FP8 in two layers": ("FlashAttention", [*["fa3-kvcache-fp8"] * 2, *["fa3-kvcache"] * 2]),
    "FlashInfer": ("FlashInfer", ["flashinfer-paged"] * LAYERS),
    "FlexAttention": ("FlexAttention", ["flex"] * LAYERS),
}
"""Start of the class's name of vLLM's backend, and the kernel of each layer."""


def plan(kernels: list[str]) -> Plan:
    return plan_of(
        *(
            choice(f"model.layers.{layer}.self_attn.attn", kernel, phase=phase)
            for layer, kernel in enumerate(kernels)
            for phase in ("prefill", "decode", "mixed")
        )
    )


def run(name: str, directory: Path) -> None:
    """Start vLLM as the plan says, generate, and print what its layers run."""
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported

    starts, kernels = PLANS[name]
    path = directory / "vllm.json"
    export(plan(kernels), "vllm", path)
    exported = json.loads(path.read_text())
    print(f"{name}: {json.dumps(exported)}", flush=True)
    version = exported["attention_config"].get("flash_attn_version")
    if version and not is_fa_version_supported(version):
        print(f"{name}: not run, since this build of vLLM has no FlashAttention {version}")
        return
    options = engine_options(Case("llama", "FLASH_ATTN"))
    for replaced in ("attention_config", "kv_cache_dtype"):
        del options[replaced]
    engine = LLM(model=str(directory / "llama"), **options, **exported)
    prompt = TokensPrompt(prompt_token_ids=list(range(100)))
    engine.generate([prompt], SamplingParams(max_tokens=4), use_tqdm=False)
    worker: Any = engine.llm_engine.model_executor.driver_worker
    model = getattr(worker, "worker", worker).model_runner.get_model()
    layers = [layer for layer in model.modules() if getattr(layer, "kv_cache", None) is not None]
    impls = [type(layer.impl).__name__ for layer in layers]
    caches = [layer.kv_cache_dtype for layer in layers]
    print(f"{name}: {', '.join(dict.fromkeys(impls))}; caches {', '.join(caches)}", flush=True)
    for kernel, impl, cache in zip(kernels, impls, caches, strict=True):
        if not impl.startswith(starts) or cache.startswith("fp8") != kernel.endswith("fp8"):
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
        save_checkpoint("llama", directory / "llama")
        for each in options.plans.split(","):
            command = (sys.executable, "-m", "benchmarks.exported_vllm", "--run", each, name)
            with (directory / "log").open("w+") as log:
                process = subprocess.Popen(
                    command, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log
                )
                try:
                    code = process.wait(options.seconds)
                except subprocess.TimeoutExpired:
                    process.kill()
                    code = process.wait()
                log.seek(0)
                lines = log.read().splitlines()
            shown = [line for line in lines if line.startswith(f"{each}: ")]
            failed |= code != 0
            if code:
                shown += [f"{each}: exit code {code}: {line}" for line in lines[-3:]]
            print("\n".join(shown), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
