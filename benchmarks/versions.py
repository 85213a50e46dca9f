"""Times our kernels and those of another checkout of this project, in turn.

    git worktree add ../before main
    python -m benchmarks.versions ../before [--kernels 'triton-fa3,triton-fp8'] [--only head_dim]

Each checkout has its own process, and the two take turns in shuffled rounds, so that changes of the
GPU's speed affect both equally. A sample is the median of some calls with a cold L2. The output
shows medians over rounds, TFLOPS of this checkout, its speed as a multiple of the other's with
minimum and maximum over rounds, and both relative L1 errors against float64 attention, on some rows
of two heads. `--core` times only the kernels' cores. Needs a GPU of 30 GB; a minute for each
kernel, most of it compiling.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Sizes = tuple[int, int, int, int, int, int, int]
"""(B, Hq, Hkv, Sq, Sk, D, Dv)."""
WINDOW: dict[str, Any] = {"window": (1024, None)}
CALLS: dict[str, tuple[Sizes, bool, dict[str, Any]]] = {
    "small": ((1, 2, 1, 100, 130, 32, 32), False, {}),
    "4608 head_dim 128": ((1, 24, 24, 4608, 4608, 128, 128), False, {}),
    "4096 head_dim 128 causal": ((1, 32, 32, 4096, 4096, 128, 128), True, {}),
    "8192 head_dim 128 causal": ((1, 32, 8, 8192, 8192, 128, 128), True, {}),
    "16384 head_dim 128": ((1, 64, 8, 16384, 16384, 128, 128), False, {}),
    "8192 head_dim 128 window": ((1, 32, 8, 8192, 8192, 128, 128), True, WINDOW),
    "8192 head_dim 128 soft cap": ((1, 32, 8, 8192, 8192, 128, 128), True, {"softcap": 50.0}),
    "17776 head_dim 64": ((2, 30, 30, 17776, 17776, 64, 64), False, {}),
    "4250 head_dim 64": ((4, 24, 24, 4250, 4250, 64, 64), False, {}),
    "1024 head_dim 64 causal": ((8, 64, 16, 1024, 1024, 64, 64), True, {}),
    "8192 head_dim 64 window": ((1, 64, 8, 8192, 8192, 64, 64), True, WINDOW),
    "4608 head_dim 96": ((1, 24, 24, 4608, 4608, 96, 96), False, {}),
    "4096 head_dim 192/128 causal": ((1, 128, 128, 4096, 4096, 192, 128), True, {}),
    "8192 head_dim 256": ((1, 16, 8, 8192, 8192, 256, 256), False, {}),
}
"""Sizes, causality, and fields of `AttentionVariant`."""
SERVE = "--serve"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("other", type=Path, help="other checkout of this project")
    parser.add_argument("--kernels", default="triton-fa3", help="comma-separated names of kernels")
    parser.add_argument("--only", default="", help="part of the names of calls to time")
    parser.add_argument("--core", action="store_true")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=0.05, help="length of a sample")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args(argv)
    if not (arguments.other / "replay" / "kernels").is_dir():
        parser.error(f"{arguments.other} is not a checkout of this project")
    chosen = [name for name in CALLS if arguments.only in name]
    if not chosen:
        parser.error(f"no call has {arguments.only!r} in its name: {', '.join(CALLS)}")
    if arguments.device == "cuda":
        from benchmarks.gpu import gpu  # not in the other checkout, which runs this file too

        gpu()
    here = Path(__file__).resolve().parents[1]
    versions = {"here": _Version(here), "other": _Version(arguments.other.resolve())}
    for kernel in arguments.kernels.split(","):
        for name in chosen:
            ask = {
                "kernel": kernel,
                "call": name,
                "core": arguments.core,
                "seconds": arguments.seconds,
                "device": arguments.device,
            }
            print(f"{kernel}, {name}: {_compare(versions, ask, arguments.rounds)}", flush=True)
    for version in versions.values():
        version.stop()


class _Version:
    """The process of a checkout, which times requested calls."""

    def __init__(self, checkout: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), SERVE],
            env=os.environ | {"PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the process's reply, with the time in ms and the error, or the fault."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"fault": "its process died"}
        answer = self._process.stdout.readline()
        return json.loads(answer) if answer else {"fault": "its process died"}

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _compare(versions: dict[str, _Version], ask: dict[str, Any], rounds: int) -> str:
    first = {name: version.ask(ask) for name, version in versions.items()}
    if faults := [f"{name}: {each['fault']}" for name, each in first.items() if "fault" in each]:
        return "; ".join(faults)
    samples: dict[str, list[float]] = {name: [] for name in versions}
    for _ in range(rounds):
        for name in random.sample(list(versions), len(versions)):
            answer = versions[name].ask(ask)
            if "fault" in answer:
                return f"{name}: {answer['fault']}"
            samples[name].append(answer["ms"])
    ratios = [old / new for new, old in zip(samples["here"], samples["other"], strict=True)]
    new, old = (statistics.median(samples[name]) for name in ("here", "other"))
    (batch, heads, _, q_len, kv_len, head_dim, v_head_dim), is_causal, variant = CALLS[ask["call"]]
    pairs = q_len * kv_len
    if is_causal:
        width = min(kv_len, variant.get("window", (kv_len,))[0] + 1)
        pairs = sum(min(query + 1, width) for query in range(q_len))
    tflops = 2 * batch * heads * pairs * (head_dim + v_head_dim) / new / 1e9
    return (
        f"{new:.4f} ms ({old:.4f}), {tflops:.0f} TFLOPS, {statistics.median(ratios):.3f} times as "
        f"fast [{min(ratios):.3f}-{max(ratios):.3f}], error {first['here']['error']:.4%} "
        f"({first['other']['error']:.4%})"
    )


def serve() -> None:
    """Answer questions from standard input until its end."""
    kept: dict[str, tuple[Callable[[], Any], float, float]] = {}
    for line in sys.stdin:
        question = json.loads(line)
        key = json.dumps(question)
        answer: dict[str, Any]
        try:
            if key not in kept:
                kept.clear()  # a call's tensors may fill the GPU
                kept[key] = _prepared(question)
            run, once, error = kept[key]
            count = max(3, min(400, int(question["seconds"] * 1000 / max(once, 0.01))))
            answer = {"ms": _sample(run, count, question["device"]), "error": error}
        except Exception as fault:
            answer = {"fault": f"{type(fault).__name__}: {fault}".partition("\n")[0]}
        print(json.dumps(answer), flush=True)


def _prepared(question: dict[str, Any]) -> tuple[Callable[[], Any], float, float]:
    """Return the function to time, the ms of one run, and the error of its output."""
    from dataclasses import replace

    import torch

    from capture.call.attention_variant import AttentionVariant
    from replay.kernels.registry import find
    from replay.workloads.random_calls import Spec

    sizes, is_causal, variant = CALLS[question["call"]]
    device = torch.device(question["device"])
    spec = Spec(*sizes, is_causal=is_causal)
    call = spec.call(device, torch.Generator(device).manual_seed(0))
    call = replace(call, variant=AttentionVariant(**variant))
    kernel = find(question["kernel"])
    arguments = call.arguments()

    def drop_in() -> Any:
        return kernel.attention(**arguments)

    run = drop_in
    if question["core"] and kernel.prepare is not None:
        run = kernel.prepare(call)
    with torch.no_grad():
        output = run()
        output = getattr(output, "output", output)
        error = _error(call, output)
        for _ in range(2):
            run()
    return run, _sample(run, 1, question["device"]), error


def _error(call: Any, output: Any) -> float:
    """Return the relative L1 of some rows of the first two heads, against float64 attention."""
    import torch

    q_len, kv_len = call.query.shape[2], call.key.shape[2]
    rows = torch.linspace(0, q_len - 1, 8, device=call.query.device).long()
    keys = torch.arange(kv_len, device=rows.device)
    group = call.query.shape[1] // call.key.shape[1]
    key, value = (
        each[:1, : max(1, 2 // group)].double().repeat_interleave(min(group, 2), 1)
        for each in (call.key, call.value)
    )
    scores = call.query[:1, :2, rows].double() @ key.mT * call.query.shape[3] ** -0.5
    cap, (left, _) = call.variant.softcap, call.variant.window
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if call.is_causal:
        scores = scores.masked_fill(keys > rows[:, None], -torch.inf)
    if left is not None:
        scores = scores.masked_fill(keys < rows[:, None] - left, -torch.inf)
    expected = scores.softmax(-1) @ value
    found = output[:1, :2, rows].double()
    return float((found - expected).abs().sum() / expected.abs().sum())


def _sample(run: Callable[[], Any], count: int, device: str) -> float:
    """Return the median of some runs, in ms."""
    import torch

    with torch.no_grad():
        if device == "cpu":
            times = []
            for _ in range(count):
                began = time.perf_counter()
                run()
                times.append(1000 * (time.perf_counter() - began))
            return statistics.median(times)
        unrelated = torch.zeros(2**26, device=device)
        pairs = []
        for _ in range(count):
            unrelated.sum()  # a read buffer leaves nothing to write, as in `replay.timing.timer`
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


if __name__ == "__main__":
    if sys.argv[1:] == [SERVE]:
        del sys.path[0]  # this folder, whose modules must not be imported
        serve()
    else:
        main()
