"""Times and checks a kernel on attention calls that a model made, for `kernels benchmark`.

`capture share --benchmark` wrote this file. Put it into the folder `benchmarks` of a repository of
the Hub's kernels. It needs torch, safetensors and kernels[benchmark].

Each recorded call is a workload. The reference time is that of PyTorch's own attention. During the
warm-up, the kernel's output is compared with attention in float64: in each head, the largest error
may be `FACTOR` times that of attention in the call's dtype, plus one rounding. This is the rule of
FlashAttention's tests, applied to heads; in 32 bits, the limit is four times as large.
"""

import json
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
from kernels.benchmark import Benchmark
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from capture.storage.standalone import restored

REPOSITORY = ""
"""Dataset of the Hub with the calls, such as ORG/NAME; empty if they are beside this file."""
REVISION = None
FOLDER = "recorded"
"""Folder of the calls, in the repository or relative to this file."""
CALLS: list[str] = []
FUNCTION = "flash_attn_func"
"""Function of the kernel, with the arguments of `attention`."""
FACTOR = 2.0
"""Increase this for a quantised kernel."""


def attention(
    kernel: Any, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None
) -> Tensor:
    """Run the kernel; change this if its function has other arguments than FlashAttention's.

    The tensors are (B, H, S, D); a kernel that takes them as (B, S, H, D) gets views.
    """
    given = (each.transpose(1, 2) for each in (query, key, value))
    output = getattr(kernel, FUNCTION)(*given, softmax_scale=scale, causal=is_causal)
    return (output[0] if isinstance(output, tuple) else output).transpose(1, 2)


class RecordedCalls(Benchmark):
    """Workloads of the recorded calls; methods for each call are added below."""

    def load(self, name: str) -> None:
        """Load a call, with the strides that its tensors had in the model."""
        with safe_open(directory() / f"{name}.safetensors", "pt") as file:
            call = json.loads(file.metadata()["attention-replay"])
            self.query, self.key, self.value = (
                restored(file.get_tensor(each), self.device, **call["layouts"][each])
                for each in ("query", "key", "value")
            )
        self.options = {"is_causal": call["is_causal"], "scale": call["scale"]}
        self.name, self.is_checked = name, False

    def run(self) -> None:
        """Run the kernel."""
        self.out = attention(self.kernel, self.query, self.key, self.value, **self.options)

    def reference(self) -> Tensor:
        """Run PyTorch's attention, and return the kernel's output, which the first run checks."""
        grouped = self.query.shape[1] != self.key.shape[1]
        usual = scaled_dot_product_attention(
            self.query, self.key, self.value, enable_gqa=grouped, **self.options
        )
        if not self.is_checked:
            self.check(usual)
            self.is_checked = True
        return self.out

    def check(self, usual: Tensor) -> None:
        """Raise RuntimeError if the kernel's output is wrong, given that of PyTorch's attention."""
        if self.out.shape != usual.shape or self.out.dtype != usual.dtype:
            raise RuntimeError(
                f"{self.name}: the output is {tuple(self.out.shape)} in {self.out.dtype}, expected "
                f"{tuple(usual.shape)} in {usual.dtype}"
            )
        given = self.query, self.key, self.value
        precise = torch.float32 if self.device == "mps" else torch.float64  # mps has no float64
        right = eager(*given, precise, **self.options)
        plain = eager(*given, usual.dtype, **self.options)
        error, *others = ((each - right).abs().amax((2, 3)) for each in (self.out, usual, plain))
        own = torch.maximum(*others)
        # In 32 bits, the order in which a kernel adds matters as much as its rounding.
        factor = FACTOR * 4 if usual.dtype == torch.float32 else FACTOR
        limit = factor * own + torch.finfo(usual.dtype).eps * right.abs().amax((2, 3))
        if not bool((error <= limit).all()):
            batch, head = (int(each[0]) for each in torch.where(~(error <= limit)))
            raise RuntimeError(
                f"{self.name}: wrong in batch {batch}, head {head}: the largest error is "
                f"{float(error[batch, head]):.3g}, at most {float(limit[batch, head]):.3g} is "
                f"allowed (in the same dtype: {float(own[batch, head]):.3g})"
            )


for _name in CALLS:
    setattr(RecordedCalls, f"setup_{_name}", partialmethod(RecordedCalls.load, _name))
    setattr(RecordedCalls, f"benchmark_{_name}", RecordedCalls.run)
    setattr(RecordedCalls, f"verify_{_name}", RecordedCalls.reference)


def directory() -> Path:
    """Return the directory of the calls, after downloading those of the Hub."""
    if not REPOSITORY:
        return Path(__file__).resolve().parent / FOLDER
    from huggingface_hub import snapshot_download

    wanted = [str(Path(FOLDER, f"{name}.safetensors")) for name in CALLS]
    copied = snapshot_download(
        REPOSITORY, repo_type="dataset", revision=REVISION, allow_patterns=wanted
    )
    return Path(copied, FOLDER)


def eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dtype: torch.dtype,
    *,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Return attention computed in `dtype` from its definition, by blocks of queries."""
    heads, length = query.shape[1], key.shape[2]
    query, key, value = (
        each.to(dtype).repeat_interleave(heads // each.shape[1], 1) for each in (query, key, value)
    )
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    rows = max(1, 2**26 // (query.shape[0] * heads * length))
    positions = torch.arange(length, device=query.device)
    outputs = []
    for first, block in zip(range(0, query.shape[2], rows), query.split(rows, 2), strict=True):
        scores = block @ key.mT * factor
        if is_causal:
            last = torch.arange(first, first + block.shape[2], device=query.device)
            scores = scores.masked_fill(positions > last[:, None], float("-inf"))
        outputs.append(scores.softmax(-1) @ value)
    return torch.cat(outputs, 2)
