"""Interpreter of the PTX in our inline assembly, which runs the 32 threads of a warp together.

The interpreter supports the part of PTX that we use: straight-line code, predicates, exchanges
between threads, and branches that all threads or no threads take. Other functions compile kernels
and search the compiled programs.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

THREADS = 32


def _fused(left: Tensor, right: Tensor, addend: Tensor) -> Tensor:
    return (left.double() * right.double() + addend.double()).float()


def _larger(left: Tensor, right: Tensor) -> Tensor:
    return torch.fmax(left, right)  # NaN only if both are NaN, like the instruction


def _pair(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that packs two float32 into 16 bits each, the second in the lower half."""

    def convert(high: Tensor, low: Tensor) -> Tensor:
        upper, lower = (each.to(dtype).view(torch.int16).long() & 0xFFFF for each in (high, low))
        return upper << 16 | lower

    return convert


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "mov.f32": lambda value: value,
    "mov.b32": lambda value: value,
    "neg.f32": lambda value: -value,
    "add.f32": lambda left, right: left + right,
    "sub.f32": lambda left, right: left - right,
    "mul.f32": lambda left, right: left * right,
    "max.f32": _larger,
    "fma.rn.f32": _fused,
    "ex2.approx.ftz.f32": torch.exp2,
    "cvt.rn.bf16x2.f32": _pair(torch.bfloat16),
    "cvt.rn.f16x2.f32": _pair(torch.float16),
    "setp.gt.f32": lambda left, right: left > right,
    "setp.neu.f32": lambda left, right: ~(left == right),
    "setp.gt.or.f32": lambda left, right, other: (left > right) | other,
    "setp.neu.or.f32": lambda left, right, other: ~(left == right) | other,
    "selp.f32": lambda yes, no, which: torch.where(which, yes, no),
}


def run(text: str, registers: dict[str, Tensor]) -> bool:
    """Run instructions on named registers (32,), and return whether a branch was not taken.

    Raises:
        KeyError: an operation that we do not use, or a register without a value.
    """
    lines = [line.strip() for line in text.replace("{ .reg", "{\n.reg").splitlines()]
    lines = [each for line in lines for each in re.split(r"(?<=;)\s+(?=\S)", line)]
    labels = {line.split(":")[0]: at for at, line in enumerate(lines) if ":" in line}
    at, went_past = 0, False
    while at < len(lines):
        line = lines[at]
        at += 1
        if not line.endswith(";") or line.startswith(".reg"):
            continue
        match = re.match(r"(?:@(!?)(\w+) )?(\S+) (.*);$", line)
        assert match is not None, line
        negated, guard, operation, rest = match.groups()
        holds = torch.ones(THREADS, dtype=torch.bool)
        if guard:
            holds = registers[guard] ^ bool(negated)
        if operation == "bra.uni":
            assert holds.all() or not holds.any(), "some threads branch and others do not"
            if holds.any():
                at = labels[rest]
            else:
                went_past = True
            continue
        target, *operands = (each.strip() for each in rest.split(","))
        if operation == "vote.sync.any.pred":
            found = registers[operands[0]].any().expand(THREADS)
        elif operation == "shfl.sync.bfly.b32":
            found = registers[operands[0]][torch.arange(THREADS) ^ int(operands[1])]
        else:
            found = OPERATIONS[operation](*(_value(each, registers) for each in operands))
        if guard:
            found = torch.where(holds, found, registers[target])
        registers[target] = found
    return went_past


def _value(operand: str, registers: dict[str, Tensor]) -> Tensor:
    if re.fullmatch(r"-?\d[\d.]*(e[+-]\d+)?", operand):
        return torch.full((THREADS,), float(operand))
    return registers[operand]


COMPILE = """
import os
from dataclasses import replace
import torch
from benchmarks.attention_kernels.other_gpus import as_if_on
from capture.call.attention_variant import AttentionVariant
from replay.kernels.registry import find
from replay.workloads.random_calls import Spec

def empty(*shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")

for number, (kernel, sizes, is_causal, fields) in enumerate({calls}):
    os.environ["TRITON_CACHE_DIR"] = os.path.join({directory!r}, str(number))
    call = replace(Spec(*sizes, is_causal=is_causal).without_values(), **eval(f"dict({{fields}})"))
    with as_if_on("9.0"), torch.no_grad():
        find(kernel).attention(**call.arguments())
"""

Compiled = tuple[str, tuple[int, ...], bool, str]
"""Kernel, sizes of the call (B, Hq, Hkv, Sq, Sk, D, Dv), whether it is causal, and further fields
of the call, as the source of keyword arguments."""


def compile_for_hopper(directory: Path, calls: Sequence[Compiled]) -> None:
    """Compile kernels in another process, which needs no GPU, each into a numbered folder."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE.format(calls=calls, directory=str(directory))],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def unfenced_arrivals(program: str) -> list[str]:
    """Return a compiled program's arrivals at barriers during which loads from shared memory may be
    under way.

    TMA waits for such an arrival and then overwrites the memory that the loads read. Only a fence,
    not the arrival or an earlier barrier, keeps TMA from overtaking the loads.
    """
    under_way, found = False, []
    for line in program.splitlines():
        if re.search(r"\tldmatrix|\tld\.shared\.(v\d\.)?b(16|32)", line):
            under_way = True
        elif "fence.proxy.async" in line:
            under_way = False
        elif "mbarrier.arrive.shared" in line and under_way:
            found.append(line.strip())
    return found
