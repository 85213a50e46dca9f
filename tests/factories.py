"""Calls, rows and kernels for tests. Each keyword changes one property of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from capture.call.attention_call import AttentionCall, Origin
from capture.call.batch import BatchSize
from capture.call.shape import Shape
from capture.recording.heads import pick
from capture.storage.call_file import PackedCall
from capture.storage.dataset import Dataset
from replay.accuracy.errors import compare
from replay.bench.settings import Settings
from replay.kernels.registry import Kernel
from replay.rows.errors_of_output import (
    Accuracy,
    Errors,
    GradientErrors,
    Gradients,
    Summary,
    Where,
)
from replay.rows.row import (
    CallFacts,
    Energy,
    GpuState,
    Machine,
    Mask,
    Program,
    Roof,
    Row,
    Speedup,
    SpeedupOver,
    Status,
)
from replay.timing.statistics import speed_verdict, summarize
from replay.workloads.sources import Source
from replay.workloads.workload import Workload


def normal(
    *shape: int, dtype: torch.dtype = torch.float32, device: Any = "cpu", seed: int = 0
) -> Tensor:
    """Return standard normal values that depend only on the seed and the device."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, device=device, generator=generator).to(dtype)


def random_call(
    *,
    batch: int = 1,
    q_heads: int = 2,
    kv_heads: int | None = None,
    q_len: int = 9,
    kv_len: int = 13,
    head_dim: int = 32,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    with_output: bool = False,
    origin: dict[str, Any] | None = None,
    **fields: Any,
) -> AttentionCall:
    """Return a call of these sizes with standard normal values; other keywords set fields."""
    generator = torch.Generator(device).manual_seed(seed)
    kv_heads = kv_heads or q_heads
    query, key, value = (
        torch.randn(batch, heads, length, dim, device=device, generator=generator).to(dtype)
        for heads, length, dim in (
            (q_heads, q_len, head_dim),
            (kv_heads, kv_len, head_dim),
            (kv_heads, kv_len, v_head_dim or head_dim),
        )
    )
    call = AttentionCall(
        query,
        key,
        value,
        enable_gqa=q_heads != kv_heads,
        origin=Origin(**{"model": "model", **(origin or {})}),
        **fields,
    )
    if not with_output:
        return call
    with sdpa_kernel(SDPBackend.MATH):
        return call.with_tensors({"output": scaled_dot_product_attention(**call.arguments())})


@dataclass(frozen=True)
class FunctionSource(Source):
    """Workload source whose call is returned by a function."""

    given_name: str
    function: Callable[[torch.device], AttentionCall]

    @property
    def name(self) -> str:
        return self.given_name

    def load(self, device: torch.device) -> AttentionCall:
        return self.function(device)

    def to_json(self) -> dict[str, Any]:
        return {}


def made_workload(name: str, function: Callable[[torch.device], AttentionCall]) -> Workload:
    """Return a workload whose call is made by a function."""
    return Workload.of(FunctionSource(name, function))


def store_part(
    directory: Path, call: AttentionCall, by: int, ranks: Sequence[int], **origin: Any
) -> None:
    """Write a rank's two heads of a call to a file, as if that rank had recorded them.

    Args:
        by: the rank.
        ranks: the ranks that share the call, in the order of their heads.
        origin: fields to replace in the origin of the part.
    """
    first = 2 * ranks.index(by)
    part = pick(call, range(first, first + 2), range(first, first + 2))
    place = {"rank": by, "split": "heads", "split_ranks": [*ranks], "heads": f"{first}-{first + 1}"}
    described = replace(call.origin, model=f"model.rank{by}", **{**place, **origin})
    directory.mkdir(exist_ok=True)
    path = directory / f"model.rank{by}-{described.call_index:06}.safetensors"
    PackedCall.of(replace(part, origin=described)).write(path)


def save_calls(directory: Path, calls: Iterable[AttentionCall]) -> Path:
    """Write calls as `model-000000` and so on to a new directory, with a manifest."""
    directory.mkdir()
    files = ((directory / f"model-{at:06d}.safetensors", call) for at, call in enumerate(calls))
    entries = [PackedCall.of(call).write(path) for path, call in files]
    Dataset(directory, entries, []).save_manifest()
    return directory


def sized_call(sizes: tuple[int, int, int, int, int, int, int], **options: Any) -> AttentionCall:
    """Return a random call of sizes (B, Hq, Hkv, Sq, Sk, D, Dv)."""
    names = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "v_head_dim")
    return random_call(**{**dict(zip(names, sizes, strict=True)), **options})


def one_head(*rows: list[float]) -> Tensor:
    """Return rows as a float64 tensor (1, 1, S, D)."""
    return torch.tensor(rows, dtype=torch.float64)[None, None]


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bits for exact comparisons: fp8 has no `==`, and NaN equals nothing."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(torch.uint8)


def tiny_llama(**config: Any) -> Any:
    """Return an untrained Llama with two layers of four heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    small = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 64,
        "intermediate_size": 32,
    }
    return LlamaForCausalLM(LlamaConfig(**{**small, **config})).eval()


def kernel(name: str, **fields: Any) -> Kernel:
    """Return a kernel that no test runs."""
    return Kernel(name, lambda **arguments: torch.zeros(1), **fields)


def settings(**fields: Any) -> Settings:
    """Return settings for three rounds on the CPU."""
    return replace(Settings(torch.device("cpu"), "warm", rounds=3), **fields)


def call_facts(
    name: str = "call",
    module: str = "layers.0",
    phase: str = "denoise",
    *,
    kv_len: int = 64,
    **fields: Any,
) -> CallFacts:
    """Return the facts of a call with 64 queries, or with one query if the phase is decode."""
    usual = CallFacts(
        name,
        model="model",
        weights="random",
        module=module,
        phase=phase,
        shape=Shape(1, 2, 2, _q_len(phase), kv_len, 32, 32),
        dtype="bfloat16",
    )
    return replace(usual, **fields)


def errors(**figures: Any) -> Errors:
    """Return the errors of a correct output, with the given figures replaced."""
    ones = torch.ones(1, 1, 4, 8)
    return replace(compare(ones, ones), **{"cosine": 1.0, **figures})


def accuracy(against_reference: Errors | None = None, **others: Any) -> Accuracy:
    """Return an accuracy without errors against the reference; keywords set the other errors."""
    return Accuracy(against_reference or errors(), **others)


def speedup(ratio: float = 1.5, low: float | None = None, high: float | None = None) -> Speedup:
    """Return a speed-up with an interval (default: ±0.1) and the verdict that follows from it."""
    low, high = ratio - 0.1 if low is None else low, ratio + 0.1 if high is None else high
    return Speedup(ratio, low, high, *speed_verdict(low, high))


def speedup_over(vs: str = "torch-default", against: Speedup | None = None) -> SpeedupOver:
    return SpeedupOver(**vars(against or speedup()), vs=vs)


def row(
    kernel: str = "mine",
    call: CallFacts | None = None,
    ms: float | Sequence[float] | None = None,
    status: Status = "ok",
    reason: str = "",
    **fields: Any,
) -> Row:
    """Return a row with these times; a single number is repeated ten times."""
    if ms is not None:
        timed = {"time_ms": summarize([ms] * 10 if isinstance(ms, float) else ms)}
        fields = {**timed, "accuracy": accuracy(), **fields}
    return Row(kernel, call or call_facts(), status, reason, **fields)


def unreadable(name: str = "call") -> Row:
    """Return the row of a call whose file cannot be read."""
    return Row("", CallFacts(name), "error", "no such file")


def full_row() -> Row:
    """Return a row in which every field has a value."""
    random = compare(normal(1, 2, 3, 4), normal(1, 2, 3, 4, seed=1))
    times = summarize([1.0, 2.0, 4.0])
    state = GpuState(1980, 690.5, 61, ("software power cap", "0x400"), 2619)
    summary = Summary(-1.0, 1.0, 0.0, 0.5)
    return row(
        call=call_facts(
            backend="torch-flash",
            pinned="torch-flash",
            step=2,
            call_index=7,
            mask=Mask("bool", (1, 1, 1, 64)),
            mask_structure="padding",
            beyond="sinks",
            nonfinite="key 1 infinite (hidden)",
            batch=BatchSize(2, 3, 64, 40, 90),
            grad_output="drawn",
            has_window=True,
        ),
        reason="max abs error …",
        restated_as="padding",
        flags=("no core time",),
        changed_inputs=("key",),
        process="mine",
        ran_on="GPU 1 (GPU-5f3e)",
        host="node-1",
        not_ranked="kernels differ",
        log="its last words",
        rounds="1",
        time_ms=times,
        block_ms=times,
        core_time_ms=times,
        backward_ms=times,
        backward_speedup=speedup_over(),
        both_ms=times,
        both_speedup=speedup_over(),
        both_peak_bytes=24,
        gradients=Gradients(*[GradientErrors(0.5, 0.01, 0.1)] * 3),
        first_call_ms=100.0,
        energy=Energy(150.0, 0.8, 690.0, 1.05),
        burst_ms=1.9,
        sustained_ms=2.2,
        timer="cuda-events-after-reads",
        host_ms=0.02,
        layer_host_ms=summarize([0.6, 0.7, 0.8]),
        cache="cold",
        calls_before=4,
        tflops=500.0,
        gb_per_s=1000.0,
        flop_per_byte=70.0,
        roof=Roof(tflops=900.0, gb_per_s=4000.0),
        roof_share=0.5,
        speedup=speedup_over(),
        accuracy_class="sparse",
        tolerances="exact.rounding_factor=6",
        kept=0.02,
        accuracy=accuracy(
            random,
            captured=random,
            kernel=random,
            noise_floor=random,
            chosen=random,
            tolerance_ratio=0.5,
            where=Where(0.5, 0.01, (0, 1), (2, 3), ((0.01, 0.02), (0.01, 0.5))),
        ),
        output_summary=summary,
        reference_summary=summary,
        peak_bytes=12,
        programs=(Program("kernel", 32, 0, 1024, 4),),
        processor_share=0.97,
        gpu_before=state,
        gpu_during=state,
        machine=Machine(*["x"] * 9),
        measured_at="2026-11-28T08:15:30Z",
        commit="a1b2c3d+",
    )


def census(*calls: tuple[str, str, int, int], mask: bool = False, steps: int = 1) -> dict[str, Any]:
    """Return a census of (module, phase, key length, number of calls); `call_facts` sets sizes."""
    sizes = list(dict.fromkeys((_q_len(phase), kv_len) for _, phase, kv_len, _ in calls))
    return {
        "signatures": [
            {
                "query": [1, 2, q_len, 32],
                "key": [1, 2, kv_len, 32],
                "value": [1, 2, kv_len, 32],
                "dtype": "bfloat16",
                "mask": [1, 1, 1, kv_len] if mask else None,
                "mask_dtype": "bool" if mask else None,
                "is_causal": False,
                "scale": None,
                "enable_gqa": False,
            }
            for q_len, kv_len in sizes
        ],
        "rows": [
            {
                "module": module,
                "phase": phase,
                "signature": sizes.index((_q_len(phase), kv_len)),
                "calls": count,
                "first_step": 0,
                "last_step": steps - 1,
            }
            for module, phase, kv_len, count in calls
        ],
    }


def _q_len(phase: str) -> int:
    return 1 if phase == "decode" else 64
