"""Runs kernels inside vLLM, and compares their predicted and measured tokens per second.

    python -m benchmarks.engine_swaps                                    # both sizes, four minutes
    python -m benchmarks.engine_swaps --sizes middle --kernels triton-varlen --seconds 200

Needs a GPU with 80 GB of memory and vLLM 0.22, no network: the models have random weights. 64
requests with 8,192 to 32,768 tokens generate 32 tokens each. Their prompts stay in the engine's
prefix cache, so that a run consists of one short step of all prompts and 31 decode steps. Prints a
line for each kernel:

- tokens per second with the kernel, and with vLLM's own attention (FlashAttention) beside it;
- measured: median ratio of adjacent runs without and with the kernel;
- predicted: from replays of recorded batches, as explained at `predicted`, with a swap that costs
  nothing, as where the GPU is busy, and in brackets with one that costs as much as the swap of
  vLLM's own function;
- requests with the same tokens; those of random weights change with the last bit of an output;
- calls that the kernel answered, and that fell back to vLLM's own attention.

Exit code 1 if a kernel fails or answers no call.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import gpu
from benchmarks.vllm_process import Child, give, model_of
from replay.plan.call_matching import match
from replay.rows.row import Row

OWN = "vllm-flash-attn"
"""The function that vLLM's backend FLASH_ATTN calls. Swapped in, it shows what a swap costs;
replayed, it has the time of vLLM's own attention."""
KERNELS = ("triton-paged-decode", "triton-varlen")
REQUESTS, SHORTEST, LONGEST, NEW_TOKENS = 64, 8192, 32768, 32
VOCABULARY = 32_000
RECORDED = 2
"""Recorded calls. One of 64 requests takes 5 GB with eight key heads of width 128."""
ROUNDS = 5


@dataclass(frozen=True)
class Size:
    """Sizes of a Llama."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int

    @property
    def cache_bytes(self) -> int:
        """Return the size of a bfloat16 cache that holds all requests, with a fifth to spare."""
        token = self.layers * 2 * self.kv_heads * (self.hidden // self.heads) * 2
        return int(1.2 * token * sum(length + NEW_TOKENS for length in lengths()))


SIZES = {"tiny": Size(4, 512, 8, 2), "middle": Size(6, 4096, 32, 8)}


@dataclass(frozen=True)
class Measured:
    """Result of one kernel in the engine."""

    kernel: str
    tokens_per_second: float
    own_tokens_per_second: float
    measured: float
    """Speed-up over vLLM's own attention."""
    predicted: float | None
    """Predicted speed-up if a swap costs nothing; None if nothing is predicted."""
    with_swap: float | None
    """The same if a swap costs as much as that of vLLM's own function."""
    tokens: str
    answered: int
    fallbacks: dict[str, int]

    def __str__(self) -> str:
        predicted = "not predicted"
        if self.predicted is not None:
            error = self.predicted / self.measured - 1
            predicted = f"predicted {self.predicted:.3f} ({error:+.1%}) [{self.with_swap:.3f}]"
        fell_back = sum(self.fallbacks.values())
        return (
            f"{self.kernel}: {self.tokens_per_second:.0f} tokens/s, own "
            f"{self.own_tokens_per_second:.0f}; speed-up measured {self.measured:.3f}, "
            f"{predicted}; tokens {self.tokens}; {self.answered} calls answered, {fell_back} fell "
            f"back{f' {self.fallbacks}' if fell_back else ''}"
        )


def lengths() -> list[int]:
    """Return the lengths of the prompts."""
    draw = random.Random(0)
    return [draw.randint(SHORTEST, LONGEST) for _ in range(REQUESTS)]


def write_config(size: Size, directory: Path) -> None:
    """Write the config of a Llama, for an engine that makes up the weights."""
    from transformers import LlamaConfig

    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.hidden // size.heads,
        max_position_embeddings=2 * LONGEST,
        torch_dtype="bfloat16",
    ).save_pretrained(directory)


def fill(model: Any) -> None:
    """Draw weights under which attention changes the tokens; those of vLLM are close to zero."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1.3 * weight.shape[-1] ** -0.5)
            else:  # of a norm
                weight.fill_(1)


def predicted(
    census: Mapping[str, Any], rows: Sequence[Row], kernel: str, own: float, before: float
) -> float | None:
    """Return a kernel's predicted speed-up in a run.

        own / (before − Σ count · (t_own − t_kernel))

    The sum is over the census; a batch has the times of the replayed batches that represent it
    (`replay.plan.batch_matching`). It is None if one of them has no correct, timed row.

    Args:
        own: seconds of a run with the engine's own attention.
        before: seconds of a run with the same kernels and the cost of the swap.
    """
    timed = {(row.kernel, row.call.name): row for row in rows if row.time_ms is not None}
    calls = [row.call for (name, _), row in timed.items() if name == OWN]
    saved = 0.0
    for counted in match(census, calls):
        if not counted.shares:
            return None
        for call, share in counted.shares.items():
            row, other = timed[OWN, call], timed.get((kernel, call))
            if other is None or other.status != "ok":
                return None
            assert row.time_ms is not None
            assert other.time_ms is not None
            saved += counted.calls * share * (row.time_ms.p50 - other.time_ms.p50) / 1000
    return own / (before - saved)


class Engine:
    """vLLM in this process, with one batch of requests."""

    def __init__(self, size: Size, directory: Path) -> None:
        from vllm import LLM, SamplingParams, TokensPrompt

        write_config(size, directory)
        self.llm = LLM(
            model=str(directory),
            load_format="dummy",
            attention_config={"backend": "FLASH_ATTN"},
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=LONGEST + NEW_TOKENS,
            max_num_batched_tokens=16384,
            max_num_seqs=REQUESTS,
            enable_prefix_caching=True,
            gpu_memory_utilization=0.5,
            kv_cache_memory_bytes=size.cache_bytes,
            enforce_eager=True,
            seed=0,
        )
        self.model = model_of(self.llm)
        fill(self.model)
        draw = random.Random(1)
        self._prompts = [
            TokensPrompt(prompt_token_ids=[draw.randrange(VOCABULARY) for _ in range(length)])
            for length in lengths()
        ]
        self._sampling = SamplingParams(
            temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False
        )

    def generate(self) -> tuple[float, list[list[int]]]:
        """Answer all requests; return the seconds, and the tokens of each request."""
        import torch

        torch.cuda.synchronize()
        began = time.perf_counter()
        outputs = self.llm.generate(self._prompts, self._sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        return seconds, [list(output.outputs[0].token_ids) for output in outputs]


def run_size(name: str, kernels: Sequence[str], directory: Path) -> Iterator[Any]:
    """Yield a sentence after each step, and the fields of each `Measured`."""
    import capture
    from capture.storage.dataset import Dataset
    from replay import use_kernel
    from replay.api.replay_calls import replay

    engine = Engine(SIZES[name], directory / name)
    engine.generate()  # fills the prefix cache
    _, expected = engine.generate()
    stable = engine.generate()[1] == expected
    yield f"{name}: engine started, two runs with {'the same' if stable else 'other'} tokens"
    out = directory / f"{name}-calls"
    with capture.record(engine.model, out, max=RECORDED, name=name) as recording:
        engine.generate()
    names = [OWN, *kernels]
    rows = replay(str(out), kernels=names, baseline=OWN, rounds=10, workers=False, progress=False)
    problems = {f"{row.kernel}: {row.status}, {row.reason}" for row in rows if row.status != "ok"}
    phases = sorted({row.call.phase for row in rows})
    yield f"{name}: {recording.kept} of {recording.seen} calls recorded {phases} {problems or ''}"
    (captured,) = Dataset.open(out).captures
    swaps: dict[str, tuple[str, int, dict[str, int]]] = {}
    for kernel in names:
        try:
            with use_kernel(kernel, engine.model) as swap:
                _, tokens = engine.generate()
        except Exception as error:
            yield f"{name}: {kernel}: FAILED: {type(error).__name__}: {str(error)[:300]}"
            continue
        counts = swap.kernels[kernel]
        same = sum(each == other for each, other in zip(tokens, expected, strict=True))
        found = f"same in {same} of {REQUESTS} requests{'' if stable else ' (unstable)'}"
        swaps[kernel] = found, counts.hits, dict(counts.fallbacks)
        yield f"{name}: {kernel} ran first"
    ratios: dict[str, list[float]] = {kernel: [] for kernel in swaps}
    own_seconds = []
    shuffle = random.Random(0).shuffle
    for number in range(ROUNDS):
        order = [*swaps]
        shuffle(order)
        for kernel in order:
            before, _ = engine.generate()
            with use_kernel(kernel, engine.model):
                seconds, _ = engine.generate()
            own_seconds.append(before)
            ratios[kernel].append(before / seconds)
        yield f"{name}: round {number + 1} of {ROUNDS}"
    own = statistics.median(own_seconds)
    speedups = {kernel: statistics.median(each) for kernel, each in ratios.items()}
    rate = REQUESTS * NEW_TOKENS / own
    for kernel, (found, hits, fallbacks) in swaps.items():
        ratio = speedups[kernel]
        forecast = with_swap = None
        if kernel != OWN and OWN in speedups:
            of_kernel = captured.census, rows, kernel, own
            forecast = predicted(*of_kernel, own)
            with_swap = predicted(*of_kernel, own / speedups[OWN])
        measured = Measured(
            kernel, rate * ratio, rate, ratio, forecast, with_swap, found, hits, fallbacks
        )
        yield asdict(measured)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--sizes", default=",".join(SIZES), help="sizes of models")
    arguments.add_argument("--kernels", default=",".join(KERNELS), help="kernels to swap in")
    arguments.add_argument("--seconds", type=float, default=240, help="limit of the whole run")
    arguments.add_argument("--run", metavar="SIZE", help="run one size in this process")
    arguments.add_argument("--directory", type=Path, help="keeps configs, logs and recordings")
    given = arguments.parse_args()
    if given.run:
        for step in run_size(given.run, given.kernels.split(","), given.directory):
            give(step)
        return 0
    gpu()
    directory = given.directory or Path(tempfile.mkdtemp(prefix="engine_swaps-"))
    directory.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + given.seconds
    failed = False
    for size in given.sizes.split(","):
        arguments_of_size = ("--run", size, "--kernels", given.kernels)
        log = directory / f"{size}.log"
        child = Child(log, "engine_swaps", *arguments_of_size, "--directory", str(directory))
        child.wait(max(until - time.monotonic(), 0.0))
        steps = child.results()
        if child.process.returncode:
            steps.append(f"{size}: FAILED: {child.failure()}")
        for step in steps:
            if isinstance(step, dict):
                measured = Measured(**step)
                failed = failed or not measured.answered
                print(f"{size}: {measured}", flush=True)
            else:
                failed = failed or "FAILED" in step
                print(step, file=sys.stderr, flush=True)
    print(f"logs in {directory}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
