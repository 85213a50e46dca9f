"""The one list of a row's fields, which every output is made from.

A row as JSON is a tree (`replay.rows.files.row_to_json`); `FIELDS` names its leaves by dotted path,
with unit and meaning. CSV has a column per field; tables and the docs take their words from it.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Field(NamedTuple):
    """A leaf of a row."""

    path: str
    unit: str
    meaning: str


_ERRORS = {
    "cosine": ("", "cosine similarity of the flattened outputs"),
    "relative_l1": ("", "Σ|output - reference| / Σ|reference|"),
    "rmse": ("", "root of the mean squared error"),
    "max_abs": ("", "largest absolute error"),
    "mae": ("", "mean absolute error"),
    "mse": ("", "mean squared error"),
    "nan_count": ("", "NaN elements in the output"),
    "inf_count": ("", "infinite elements in the output"),
    "mismatched_nonfinite": ("", "NaN or infinite in one of the two and not the same in the other"),
    "row_cosine_p1": ("", "1st percentile of the cosines of single rows (one query of one head)"),
    "row_cosine_p10": ("", "10th percentile of the same"),
    "row_cosine_min": ("", "the worst row's cosine"),
    "worst_row": ("", "batch, head and query of that row"),
    "worst_head": ("", "batch and head with the largest relative L1"),
    "worst_head_cosine": ("", "that head's cosine"),
    "worst_head_relative_l1": ("", "that head's relative L1"),
}
_TIMES = {
    "p10": "10th percentile of",
    "p50": "median of",
    "p90": "90th percentile of",
    "iqr": "interquartile range of",
    "n": "number of samples of",
}
_GPU = {
    "sm_clock_mhz": ("MHz", "SM clock"),
    "power_w": ("W", "power draw"),
    "temperature_c": ("°C", "temperature"),
    "throttle_reasons": ("", "why the clock was held down"),
}
_SUMMARIES = {"min": "minimum", "max": "maximum", "mean": "mean", "std": "standard deviation"}

FIELDS: list[Field] = [
    Field("kernel", "", "the kernel's name"),
    Field("environment", "", "the Python environment it ran in; `this` is the one that replays"),
    Field("call.name", "", "the recorded call's file, or the random shape's number"),
    Field("call.model", "", "the model, or the suite, it comes from"),
    Field("call.weights", "", "which weights made the values"),
    Field("call.module", "", "path of the module that made the call"),
    Field("call.phase", "", "denoise, prefill, decode, encode, or synthetic"),
    Field("call.step", "", "forwards of the model before this one"),
    Field("call.call_index", "", "position among all attention calls of the run"),
    Field("call.shape.batch", "", "B"),
    Field("call.shape.q_heads", "", "Hq, query heads"),
    Field("call.shape.kv_heads", "", "Hkv, key/value heads"),
    Field("call.shape.q_len", "", "Sq, query length"),
    Field("call.shape.kv_len", "", "Sk, key length"),
    Field("call.shape.head_dim", "", "D, of query and key"),
    Field("call.shape.v_head_dim", "", "Dv, of value and output"),
    Field("call.dtype", "", "of query, key and value"),
    Field("call.is_causal", "", "whether PyTorch's top-left causal mask applied"),
    Field("call.mask", "", "kind and shape of attn_mask, empty without one"),
    Field(
        "status",
        "",
        "ok, inaccurate, unsupported, unavailable, error, crash, timeout, "
        "out-of-memory, or not-timed (correct, but a time would mean nothing)",
    ),
    Field("reason", "", "why the status is what it is"),
    Field("flags", "", "what else was noticed, e.g. that the kernel is not deterministic"),
    Field("changed_inputs", "", "which of its inputs the kernel changes in place"),
    Field("log", "", "the end of what a worker that died had printed"),
    *(
        Field(
            f"time_ms.{name}",
            "" if name == "n" else "ms",
            f"{words} the drop-in time: SDPA's tensors in, output out",
        )
        for name, words in _TIMES.items()
    ),
    *(
        Field(
            f"core_time_ms.{name}",
            "" if name == "n" else "ms",
            f"{words} the core time: after layout change and quantisation",
        )
        for name, words in _TIMES.items()
    ),
    Field("first_call_ms", "ms", "the first call, compilation included"),
    Field("host_ms", "ms", "median time the host needs to launch one call (GPU only)"),
    *(
        Field(
            f"layer_host_ms.{name}",
            "" if name == "n" else "ms",
            f"{words} what the host needs to launch one call and the rest of a layer (GPU only)",
        )
        for name, words in _TIMES.items()
    ),
    Field(
        "tflops",
        "TFLOPS",
        "2 · valid (query, key) pairs · (D + Dv) / median time; the pairs of the call, also where "
        "a sparse kernel leaves some out",
    ),
    Field(
        "gb_per_s",
        "GB/s",
        "query, key, value and mask read once, output written once, "
        "each at its stored element size / median time",
    ),
    Field("flop_per_byte", "FLOP/B", "arithmetic intensity: the two counts above divided"),
    Field("speedup.vs", "", "the baseline kernel"),
    Field("speedup.ratio", "×", "median over rounds of baseline time / this kernel's time"),
    Field("speedup.low", "×", "lower end of its 95 % bootstrap interval"),
    Field("speedup.high", "×", "upper end"),
    Field("speedup.verdict", "", "faster, slower, or tie when the interval includes 1"),
    Field(
        "kept", "", "share of the (query, key) pairs that a sparse kernel kept; empty for others"
    ),
    *(
        Field(f"accuracy.{reference}.{name}", unit, f"{words}{against}")
        for reference, against in {
            "gold": "; against the high-precision reference, of all keys also for sparse kernels",
            "captured": "; against the output the model recorded",
            "reference": "; against the kernel named with --reference",
            "noise_floor": "; of the recorded output itself against the gold",
            "chosen": "; of a sparse kernel against the gold of the keys that it chose",
        }.items()
        for name, (unit, words) in _ERRORS.items()
    ),
    *(
        Field(f"output_summary.{name}", "", f"{words} of the output (--compare-stats)")
        for name, words in _SUMMARIES.items()
    ),
    *(
        Field(f"reference_summary.{name}", "", f"{words} of the reference (--compare-stats)")
        for name, words in _SUMMARIES.items()
    ),
    Field(
        "programs",
        "",
        "Triton programs launched: name, registers and spills per thread, shared "
        "bytes and warps per block (--resources)",
    ),
    Field("peak_bytes", "B", "most memory the call took beyond its inputs (GPU only)"),
    *(
        Field(f"gpu_{when}.{name}", unit, f"{words} {when} the timed rounds")
        for when in ("before", "during")
        for name, (unit, words) in _GPU.items()
    ),
    Field("cache", "", "cold or warm L2, as the samples were taken"),
    Field("calls_before", "", "untimed calls of the kernel before each sample"),
    *(
        Field(f"machine.{name}", "", words)
        for name, words in {
            "device": "GPU or processor",
            "python": "version",
            "torch": "version",
            "cuda": "version",
            "cudnn": "version",
            "triton": "version",
            "threads": "torch's threads (CPU only)",
        }.items()
    ),
]
"""Every field of a row, in the order of CSV columns. JSON also has `time_ms.samples`,
`core_time_ms.samples` and `layer_host_ms.samples`, the raw times of every round."""


def leaf(row: dict[str, Any], path: str) -> Any:
    """The value at a dotted path of `row_to_json`'s tree; None where a branch is missing."""
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value
