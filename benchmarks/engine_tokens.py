"""Compares the tokens of a trained model inside vLLM, with its own attention and with kernels.

    python -m benchmarks.engine_tokens                                   # one minute
    python -m benchmarks.engine_tokens --dtype bfloat16

Needs a GPU and vLLM, no network: the model is the built-in trained Llama. It continues 64 pieces of
text that it was not trained on, 128 to 1,024 tokens long, by 32 tokens each, always with the most
probable one. Prints how many requests get the same tokens as from vLLM with FlashAttention: with
each kernel, and, for comparison, with vLLM's other backends. Exact kernels differ in the last bits
of their outputs, which decide where the two most probable tokens have equal logits: the gap is the
largest difference of the logarithms of their probabilities where a request's tokens first differ.
Logits in bfloat16 are equal more often than in float16.

Exit code 1 if an engine or kernel fails, or a kernel answers no call.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import gpu
from benchmarks.vllm_process import Child, give, model_of
from models import pretrained_weights

KERNELS = ("triton-varlen", "triton-paged-decode")
OWN, OTHERS = "FLASH_ATTN", ("TRITON_ATTN", "FLEX_ATTENTION")
"""vLLM's backends: the one whose tokens are expected, and those compared with it."""
REQUESTS, SHORTEST, LONGEST, NEW_TOKENS = 64, 128, 1024, 32

Token = tuple[int, float]
"""A token, and how much more probable it was than the second candidate, as a difference of natural
logarithms."""


def pieces(directory: Path) -> list[list[int]]:
    """Return the tokens of pieces of the text that the model was not trained on."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokens = tokenizer((directory / "held_out.txt").read_text(encoding="utf-8"))["input_ids"]
    draw = random.Random(0)
    lengths = [draw.randint(SHORTEST, LONGEST) for _ in range(REQUESTS)]
    starts = [draw.randrange(len(tokens) - length) for length in lengths]
    return [tokens[start:][:length] for start, length in zip(starts, lengths, strict=True)]


def started(backend: str, dtype: str) -> tuple[Any, Callable[[], list[list[Token]]]]:
    """Start vLLM; return the model, and a function that answers all requests."""
    from vllm import LLM, SamplingParams, TokensPrompt

    directory = pretrained_weights.directory("llama")
    assert directory is not None
    engine = LLM(
        model=str(directory),
        attention_config={"backend": backend},
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=LONGEST + NEW_TOKENS,
        max_num_batched_tokens=2048,
        max_num_seqs=REQUESTS,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=2**30,
        enforce_eager=True,
        seed=0,
    )
    prompts = [TokensPrompt(prompt_token_ids=piece) for piece in pieces(directory)]
    sampling = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=2
    )

    def generate() -> list[list[Token]]:
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        return [_tokens_of(output.outputs[0]) for output in outputs]

    return model_of(engine), generate


def _tokens_of(answer: Any) -> list[Token]:
    tokens = []
    for token, candidates in zip(answer.token_ids, answer.logprobs, strict=True):
        second, first = sorted(each.logprob for each in candidates.values())[-2:]
        tokens.append((token, first - second))
    return tokens


def compared(name: str, found: Sequence[Sequence[Token]], own: Sequence[Sequence[Token]]) -> str:
    """Return how many requests have the same tokens, and the largest gap at a first other one."""
    gaps = []
    for answer, expected in zip(found, own, strict=True):
        pairs = zip(answer, expected, strict=True)
        other = next((gap for (token, _), (wanted, gap) in pairs if token != wanted), None)
        gaps += [] if other is None else [other]
    gap = f", gap at most {max(gaps):.3f}" if gaps else ""
    return f"{name}: the same tokens in {len(own) - len(gaps)} of {len(own)} requests{gap}"


def run(backend: str, dtype: str, kernels: Sequence[str]) -> None:
    """Give the tokens of a backend, and a line for each kernel in it."""
    from replay import use_kernel

    model, generate = started(backend, dtype)
    own = generate()
    give(own)
    give(compared(f"{backend} again", generate(), own))
    for kernel in kernels:
        with use_kernel(kernel, model) as swap:
            tokens = generate()
        counts = swap.kernels[kernel]
        answered = f"{counts.hits} calls answered, {sum(counts.fallbacks.values())} fell back"
        give(f"{compared(kernel, tokens, own)}; {answered}")
        if not counts.hits:
            raise RuntimeError(f"{kernel} answered no call: {dict(counts.fallbacks)}")


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--kernels", default=",".join(KERNELS), help="kernels to swap in")
    arguments.add_argument("--dtype", default="float16", help="type of the weights and logits")
    arguments.add_argument("--seconds", type=float, default=180, help="limit of the whole run")
    arguments.add_argument("--run", metavar="BACKEND", help="run one backend in this process")
    given = arguments.parse_args()
    if given.run:
        kernels = given.kernels.split(",") if given.run == OWN else ()
        run(given.run, given.dtype, kernels)
        return 0
    gpu()
    directory = Path(tempfile.mkdtemp(prefix="engine_tokens-"))
    options = ("--kernels", given.kernels, "--dtype", given.dtype)
    children = {
        backend: Child(directory / f"{backend}.log", "engine_tokens", "--run", backend, *options)
        for backend in (OWN, *OTHERS)
    }
    own: list[Any] = []
    failed = False
    for backend, child in children.items():
        child.wait(given.seconds)
        tokens, *lines = child.results() or [None]
        own = own or tokens
        if backend != OWN and own and tokens:
            print(compared(backend, tokens, own))
        for line in lines:
            print(line)
        if child.process.returncode:
            failed = True
            print(f"{backend}: FAILED: {child.failure()}")
    print(f"logs in {directory}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
