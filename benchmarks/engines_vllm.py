"""Records vLLM's attention in the engine's process, for each backend, graph mode and cache format.

    python -m benchmarks.engines_vllm                                      # all cases, four at once
    python -m benchmarks.engines_vllm --cases 'llama-*,mla-triton-eager' --jobs 2 --seconds 300
    python -m benchmarks.engines_vllm --list

Needs a GPU and vLLM, no network: the checkpoints are small, with random weights. Each case runs in
its own process and prints one line:

- ops: calls of vLLM's attention operator, as PyTorch's profiler counts them;
- calls: calls of the backend's methods, counted by wrappers on each layer's own object;
- seen, recorded: calls that the recorder counted, and calls that it stored;
- error: largest error of a recorded output, divided by its tolerance (float64 reference);
- tokens: `same` if recording changed no token; `unstable` if two runs without a recording differ.

Exit code 1 if a case fails, calls are missing, tokens change or an error exceeds its tolerance.
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import gpu
from benchmarks.vllm_process import Child, give, model_of

VOCABULARY = 1024
PROMPTS = ((37, 24), (1200, 8), (5, 24), (640, 16), (300, 24), (77, 3), (900, 12), (1, 24))
"""Tokens of each prompt, and tokens to generate. Longer prompts than a step holds are read in
chunks, beside requests that decode."""
STEP_TOKENS = 512
MAX_CALLS = 48


@dataclass(frozen=True)
class Case:
    """One engine: checkpoint, attention backend, graphs, format of the cache."""

    checkpoint: str
    backend: str
    mode: str = "eager"
    """eager; piecewise: graphs between the attention calls; full: vLLM's default, whole graphs."""
    cache: str = "auto"

    @property
    def name(self) -> str:
        parts = (self.checkpoint, self.backend.lower().replace("_", "-"), self.mode)
        return "-".join(parts if self.cache == "auto" else (*parts, self.cache))


MAIN = ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")
CASES = {
    case.name: case
    for case in (
        *(Case("llama", backend) for backend in MAIN),
        *(Case("llama", backend, "piecewise") for backend in MAIN),
        *(Case("llama", backend, "eager", "fp8") for backend in MAIN),
        *(Case("gptoss", backend) for backend in MAIN[:2]),
        Case("gptoss", "FLASH_ATTN", "piecewise"),
        Case("gptoss", "TRITON_ATTN", "eager", "fp8"),
        *(Case("mla", backend) for backend in ("FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA")),
        Case("mla", "FLASH_ATTN_MLA", "piecewise"),
        Case("mla", "FLASHMLA", "eager", "fp8"),
        Case("mla", "TRITON_MLA", "eager", "fp8"),
        Case("llama", "FLEX_ATTENTION"),
        Case("llama", "FLASH_ATTN", "full"),
    )
}


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
MLA: dict[str, Any] = {
    "moe_intermediate_size": 256,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    # Sinks, and windows of 128 keys in every other layer.
    "gptoss": (
        "GptOssForCausalLM",
        {"intermediate_size": 512, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"sliding_window": 128, "max_position_embeddings": 131072},
    ),
    # Dense layers of DeepSeek-V3, with latent attention of 16 heads.
    "mla": ("DeepseekV3ForCausalLM", MLA),
    # Windows of 128 keys in every other layer, without sinks.
    "gemma": (
        "Gemma3ForCausalLM",
        {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
}
"""Class of each checkpoint's model, and its sizes other than `SIZES`."""
SHARPER = ("q_proj.weight", "k_proj.weight", "kv_b_proj.weight")
"""Weights that are enlarged, since random queries and keys attend to all keys alike."""


def save_checkpoint(name: str, directory: Path) -> None:
    """Write a small model with random weights as vLLM reads it."""
    import torch
    import transformers

    torch.manual_seed(0)
    class_name, sizes = CHECKPOINTS[name]
    model_class = getattr(transformers, class_name)
    model = model_class(model_class.config_class(**SIZES | sizes)).to(torch.bfloat16).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if path.endswith(SHARPER):
                weight.mul_(4)
            elif path.endswith("sinks"):
                weight.normal_()
    model.save_pretrained(directory)


def engine_options(case: Case) -> dict[str, Any]:
    """Return the arguments of `LLM` for a case, without the model's directory."""
    compilation: dict[str, Any] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
    if case.mode == "piecewise":
        compilation["cudagraph_mode"] = "PIECEWISE"
    return {
        "attention_config": {"backend": case.backend},
        "kv_cache_dtype": case.cache,
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_batched_tokens": STEP_TOKENS,
        "max_num_seqs": len(PROMPTS),
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 512 * 2**20,
        "seed": 0,
        **(
            {"enforce_eager": True} if case.mode == "eager" else {"compilation_config": compilation}
        ),
    }


def started(case: Case, directory: Path) -> Any:
    """Start the engine of a case."""
    from vllm import LLM

    return LLM(model=str(directory / case.checkpoint), **engine_options(case))


def generation(engine: Any, tokens: Sequence[int]) -> Callable[[], list[list[int]]]:
    """Return a function that returns the tokens that the engine generates for each prompt.

    Args:
        tokens: number of tokens to generate for each of `PROMPTS`.
    """
    from vllm import SamplingParams, TokensPrompt

    draw = random.Random(0)
    prompts = [
        TokensPrompt(prompt_token_ids=[draw.randrange(VOCABULARY) for _ in range(length)])
        for length, _ in PROMPTS
    ]
    sampling = [
        SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)
        for most in tokens
    ]

    def generate() -> list[list[int]]:
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def without_experts() -> bool:
    """Let gpt-oss's layers skip their experts if this build of vLLM has no kernels for them."""
    import torch
    from vllm import _custom_ops  # noqa: F401 - loads the operators

    if hasattr(torch.ops._moe_C, "topk_softmax"):
        return False
    from vllm.model_executor.models import gpt_oss

    gpt_oss.MLPBlock.forward = lambda self, x: x
    return True


def count_calls(model: Any) -> Counter[str]:
    """Count the calls of the backend's methods in each layer, beside any recording."""
    counts: Counter[str] = Counter()
    for layer in model.modules():
        impl = getattr(layer, "impl", None)
        for method in ("forward", "forward_mha", "forward_mqa"):
            if hasattr(impl, method) and getattr(layer, "kv_cache", None) is not None:
                setattr(impl, method, _counted(getattr(impl, method), counts, method))
    return counts


def _counted(method: Callable[..., Any], counts: Counter[str], name: str) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return method(*args, **kwargs)

    return counted


def run_case(case: Case, directory: Path) -> dict[str, Any]:
    """Start the engine, generate without, with and again without a recording, and judge it."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from capture import record

    replaced = case.checkpoint == "gptoss" and without_experts()
    began = time.perf_counter()
    engine = started(case, directory)
    start_s = time.perf_counter() - began
    model = model_of(engine)
    generate = generation(engine, [tokens for _, tokens in PROMPTS])
    before = generate()
    counts = count_calls(model)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        out = directory / f"{case.name}-calls"
        with record(model, out, max=MAX_CALLS, name=case.checkpoint) as recording:
            during = generate()
    torch.cuda.synchronize()
    calls = dict(counts)
    after = generate()
    seen: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for (_, phase, signature), count in recording.census.items():
        seen[f"{signature.entry_point}:{phase}"] += count.calls
        if signature.refusal:
            refused[signature.refusal] += count.calls
    return {
        "ops": sum(
            is_operator(event.name) and not is_operator(getattr(event.cpu_parent, "name", ""))
            for event in profiled.events()
        ),
        "calls": calls,
        "seen": recording.seen,
        "phases": dict(seen),
        "recorded": recording.kept,
        "refused": dict(refused),
        "problems": recording.problems,
        "missed": [f"{missed}" for missed in recording.missed_attention],
        **judged(out),
        "tokens": "unstable" if before != after else "same" if before == during else "changed",
        "start_s": round(start_s, 1),
        "without_experts": replaced,
        "device": torch.cuda.get_device_name(),
    }


def is_operator(name: str) -> bool:
    """Return whether this is vLLM's attention operator, which a dispatch mode may call twice."""
    return name.startswith("vllm::unified_") and name.endswith("attention_with_output")


def judged(out: Path) -> dict[str, Any]:
    """Judge each recorded output by the float64 reference: phases and backends, worst error."""
    import torch

    from capture import load
    from replay.accuracy.verdict import Expected, judge
    from replay.rows.errors_of_output import AccuracyClass

    kept: Counter[str] = Counter()
    worst, sentence, layouts = 0.0, "", set()
    try:
        entries = load(out).entries
    except Exception as error:
        return {"kept": {}, "error": None, "worst": f"{type(error).__name__}: {error}"}
    for entry in entries:
        call = entry.load("cuda" if torch.cuda.is_available() else "cpu")
        kept[f"{call.origin.backend}:{call.origin.phase}"] += 1
        pages = None if call.page_table is None else tuple(call.page_table.shape)
        layouts.add(
            f"q{tuple(call.query.shape)} k{tuple(call.key.shape)} pages{pages} {call.key.dtype}"
        )
        assert call.output is not None
        try:
            # With a cache in 8 bits, kernels also round probabilities to 8 bits.
            rule: AccuracyClass = "quantised" if call.key.itemsize == 1 else "exact"
            found = judge(call.output, Expected.of(call), rule)
        except Exception as error:
            worst, sentence = float("inf"), f"{entry.path.stem}: {type(error).__name__}: {error}"
            continue
        if not found.tolerance_ratio <= worst:
            worst, sentence = found.tolerance_ratio, f"{entry.path.stem}: {found.sentence}"
    return {
        "kept": dict(kept),
        "error": worst,
        "worst": sentence,
        "layouts": sorted(layouts)[:6],
    }


def start(case: Case, directory: Path, seconds: float) -> dict[str, Any]:
    """Run one case in a process of its own; return its result, or the reason for its failure."""
    arguments = ("--run", case.name, "--directory", str(directory))
    child = Child(directory / f"{case.name}.log", "engines_vllm", *arguments)
    child.wait(seconds)
    results = child.results()
    return dict(results[-1]) if results else {"failed": child.failure()}


def failure(case: Case, result: dict[str, Any]) -> str:
    """Return what is wrong with a case's result; empty if all is well."""
    if "failed" in result:
        return str(result["failed"])
    wrong = []
    if case.mode != "full" and result["ops"] > result["seen"]:
        wrong.append(f"{result['ops']} operator calls, {result['seen']} seen")
    if result["refused"] and case.mode != "full":
        wrong.append(f"refused {result['refused']}")
    if result["missed"]:
        wrong.append(f"missed {result['missed']}")
    if not result["recorded"]:
        wrong.append("nothing recorded")
    if result["tokens"] == "changed":
        wrong.append("tokens changed")
    if result["error"] is None or not result["error"] <= 1:
        wrong.append(result["worst"])
    return "; ".join((*wrong, *result["problems"]))


def line(case: Case, result: dict[str, Any]) -> str:
    """Return the printed line of a case."""
    wrong = failure(case, result)
    if "failed" in result:
        return f"{case.name}: FAILED: {wrong}"
    error = "none" if result["error"] is None else f"{result['error']:.2f}"
    return (
        f"{case.name}: ops {result['ops']}, calls {result['calls']}, seen {result['seen']} "
        f"{result['phases']}, recorded {result['recorded']} {result['kept']}, error {error}, "
        f"tokens {result['tokens']}, started in {result['start_s']} s"
        + (", without experts" if result["without_experts"] else "")
        + (f"; WRONG: {wrong}" if wrong else "")
    )


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--cases", default="*", help="names or globs, separated by commas")
    arguments.add_argument("--seconds", type=float, default=240, help="limit of a case")
    arguments.add_argument("--jobs", type=int, default=4, help="cases at a time (default: 4)")
    arguments.add_argument("--directory", type=Path, help="keeps checkpoints, logs, recordings")
    arguments.add_argument("--csv", type=Path, help="file for the results")
    arguments.add_argument("--list", action="store_true", help="print the names of the cases")
    arguments.add_argument("--run", metavar="CASE", help="run one case in this process")
    given = arguments.parse_args()
    if given.run:
        give(run_case(CASES[given.run], given.directory))
        return 0
    chosen = [
        case
        for name, case in CASES.items()
        if any(fnmatch.fnmatch(name, glob) for glob in given.cases.split(","))
    ]
    if given.list or not chosen:
        print("\n".join(CASES))
        return 0 if given.list else 2
    gpu()
    directory = given.directory or Path(tempfile.mkdtemp(prefix="engines_vllm-"))
    for name in {case.checkpoint for case in chosen}:
        if not (directory / name / "config.json").exists():
            save_checkpoint(name, directory / name)
    results: dict[str, dict[str, Any]] = {}

    def run(case: Case) -> None:
        results[case.name] = start(case, directory, given.seconds)
        print(line(case, results[case.name]), flush=True)

    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(run, chosen))
    (directory / "results.json").write_text(json.dumps(results, indent=1))
    if given.csv:
        write(given.csv, chosen, results)
    wrong = [case.name for case in chosen if failure(case, results[case.name])]
    print(f"{len(chosen) - len(wrong)} of {len(chosen)} cases passed; logs in {directory}")
    return 1 if wrong else 0


def write(path: Path, cases: list[Case], results: dict[str, dict[str, Any]]) -> None:
    """Write one row for each case."""
    columns = ("ops", "seen", "recorded", "phases", "error", "tokens", "device")
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("checkpoint", "backend", "mode", "cache", *columns, "wrong"))
        for case in cases:
            result = results[case.name]
            values = (result.get(column, "") for column in columns)
            place = (case.checkpoint, case.backend, case.mode, case.cache)
            writer.writerow((*place, *values, failure(case, result)))


if __name__ == "__main__":
    sys.exit(main())
