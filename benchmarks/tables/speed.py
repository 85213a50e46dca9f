"""Speed of kernels: on calls of full-size models, by shape, by call, and under a power limit."""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks import results
from benchmarks.tables.markdown import machine_line, markdown_table

IN_8_BITS = ("fp8", "int8")
"""Names of the 8-bit caches in `benchmarks.attention_kernels.decode`."""


def full_size() -> str:
    """List TFLOPS by kernel on calls of full-size models, but ms for memory-bound decode."""
    rows = results.read(results.DIRECTORY / "full_size.csv")
    scenes = {
        "CogVideoX-2b denoise, TFLOPS": ("cogvideo", "denoise", "tflops"),
        "FLUX.1-dev denoise, TFLOPS": ("flux", "denoise", "tflops"),
        "Llama-2-7b prefill, TFLOPS": ("llama", "prefill", "tflops"),
        "Llama-2-7b decode, ms": ("llama", "decode", "time_ms.p50"),
    }
    for row in rows:
        if row["environment"] != "this":
            row["kernel"] += f" ({row['environment']})"
    kernels = dict.fromkeys(row["kernel"] for row in rows)
    cells = {
        kernel: [
            _scene_cell(
                [
                    row
                    for row in rows
                    if (row["kernel"], row["call.model"], row["call.phase"]) == key
                ],
                column,
            )
            for model, phase, column in scenes.values()
            if (key := (kernel, model, phase))
        ]
        for kernel in kernels
    }
    fastest_first = sorted(cells, key=lambda kernel: -_number(cells[kernel][1]))
    lines = {kernel: cells[kernel] for kernel in fastest_first}
    return markdown_table(["kernel", *scenes], lines) + machine_line(rows)


def by_shape(
    file: str,
    *,
    cores: bool = False,
    errors: bool = False,
) -> str:
    """List TFLOPS by shape, but ms for memory-bound decode, both of the drop-in.

    Args:
        cores: list the TFLOPS of cores as well, in brackets.
        errors: list the relative L1 of the output as well.
    """
    rows = _each_kernel_once(results.DIRECTORY / file)
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    shapes: dict[str, dict[str, str]] = {}
    for row in rows:
        cells = shapes.setdefault(shape(row) + (" (ms)" if _is_decode(row) else ""), {})
        cells[row["kernel"]] = _shape_cell(row)
        if cores and row["core_time_ms.p50"]:
            faster = float(row["time_ms.p50"]) / float(row["core_time_ms.p50"])
            cells[row["kernel"]] += f" [{float(row['tflops']) * faster:.0f}]"
        if errors:
            error = float(row["accuracy.reference.relative_l1"])
            cells[row["kernel"]] += f" ({100 * error:.2f} %)"
    lines = {
        shape: [cells.get(kernel, "") for kernel in kernels] for shape, cells in shapes.items()
    }
    return markdown_table(["B×H×S×D", *kernels], lines) + machine_line(rows)


def by_call(path: Path) -> str:
    """List ms of the drop-in by call and kernel; cells of unsupported calls are empty."""
    rows = _each_kernel_once(path)
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    calls: dict[str, dict[str, str]] = {}
    for row in rows:
        cells = calls.setdefault(row["call.name"], {})
        supported = row["status"] != "unsupported"
        cells[row["kernel"]] = _scene_cell([row], "time_ms.p50") if supported else ""
    lines = {name: [cells.get(each, "") for each in kernels] for name, cells in calls.items()}
    return markdown_table(["ms", *kernels], lines) + machine_line(rows)


def backward(path: Path) -> str:
    """List TFLOPS of the backward pass by head dimension and length; the most are in bold."""
    rows = [row for row in results.read(path) if row["kind"] != "errors"]
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    calls: dict[str, dict[str, int]] = {}
    for row in rows:
        tokens = f"{row['length']} tokens"
        if row["kind"] == "packed":
            tokens = "packed sequences of 82 to 8192 tokens"
        name = f"head_dim {row['head_dim']}, {tokens}"
        name += ", causal" if row["is_causal"] == "True" else ""
        name += ", soft cap" if row["kind"] == "soft cap" else ""
        calls.setdefault(name, {})[row["kernel"]] = round(float(row["tflops"]))
    lines = {
        name: [
            f"**{each}**" if each == max(found.values()) else str(each or "")
            for each in (found.get(kernel, 0) for kernel in kernels)
        ]
        for name, found in calls.items()
    }
    return markdown_table(["TFLOPS", *kernels], lines) + machine_line(rows)


def engine_kernels(path: Path) -> str:
    """List milliseconds of our kernels and of FlashAttention 3 on batches of engines."""
    columns = {"ours": "ours", "bf16": "ours", "ours, fp8": "ours, FP8", "fp8": "ours, FP8"}
    columns |= {"fa3": "FlashAttention 3", "fa3, fp8": "FlashAttention 3, FP8"}
    rows = results.read(path)
    cases: dict[str, dict[str, str]] = {}
    for row in rows:
        cell = f"{float(row['ms']):.3f}"
        if row["floor / time"]:
            cell += f" ({float(row['floor / time']):.2f})"
        cases.setdefault(row["case"], {})[columns.get(row["kernel"], "")] = cell
    names = list(dict.fromkeys(columns.values()))
    lines = {case: [found.get(name, "") for name in names] for case, found in cases.items()}
    return markdown_table(["ms (share of a copy's speed)", *names], lines) + machine_line(rows)


def per_pair(path: Path) -> str:
    """List the time per visible (query, key) pair, relative to a plain call.

    The drop-in's figure comes first, then any core's figure in square brackets.
    """
    rows = results.read(path)
    cells = {
        (row["call"], row["kernel"], row["part"]): f"{float(row['time per pair']):.2f}"
        for row in rows
    }
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    lines: dict[str, list[str]] = {}
    for name, beside in dict.fromkeys((row["call"], row["beside"]) for row in rows):
        lines[f"{name} / {beside}"] = [
            cells.get((name, kernel, "drop-in"), "")
            + (f" [{core}]" if (core := cells.get((name, kernel, "core"))) else "")
            for kernel in kernels
        ]
    return markdown_table(["time per visible pair", *kernels], lines) + machine_line(rows)


def decode(path: Path) -> str:
    """List ms of decode by cache, and in brackets the share that reading the memory needs."""
    rows = results.read(path)
    caches = list(dict.fromkeys(row["cache"] for row in rows))
    caches.sort(
        key=lambda name: (not name.startswith("16"), name.partition(" ")[0] not in IN_8_BITS)
    )
    lines: dict[str, list[str]] = {row["case"]: [""] * len(caches) for row in rows}
    for row in rows:
        cell = f"{float(row['ms']):.3f} ({float(row['floor / time']):.0%})".replace("%", " %")
        lines[row["case"]][caches.index(row["cache"])] = cell
    return markdown_table(["ms", *caches], lines) + machine_line(rows)


def cold_cache(path: Path) -> str:
    """List µs after each way to fill the cache, as multiples of the time after a layer."""
    rows = results.read(path)
    lines: dict[str, list[str]] = {}
    for row in rows:
        cells = [f"{float(row[f'{name} / layer']):.2f}" for name in ("written", "read")]
        lines[f"{row['call']}: {row['kernel']}"] = [f"{float(row['layer, µs']):.1f}", *cells]
    heading = ["call", "behind a layer, µs", "behind writes", "behind reads"]
    return markdown_table(heading, lines) + machine_line(rows)


def narrow_heads(path: Path) -> str:
    """List ms of calls with head_dim 64, and of each number of consumers; the chosen number is in
    bold."""
    rows = results.read(path)
    counts = [name.partition(" ")[0] for name in rows[0] if name.endswith(" consumers, ms")]
    lines: dict[str, list[str]] = {}
    for row in rows:
        heads = dict.fromkeys((row["q_heads"], row["kv_heads"]))
        lengths = dict.fromkeys((row["q_len"], row["kv_len"]))
        shape = f"{row['batch']}×{'/'.join(heads)}×{'/'.join(lengths)}"
        shape += " causal" if row["is_causal"] == "True" else ""
        cudnn, ours = float(row["torch-cudnn, ms"]), float(row["triton-fa3, ms"])
        consumers = [f"{float(row[f'{each} consumers, ms']):.3f}" for each in counts]
        taken = counts.index(row["consumers"])
        consumers[taken] = f"**{consumers[taken]}**"
        times = [f"{cudnn:.3f}", f"{ours:.3f}", f"{cudnn / ours:.2f}", *consumers]
        lines[f"{row['call']}: {shape}"] = times
    heading = [
        "ms",
        "torch-cudnn",
        "triton-fa3",
        "faster",
        *(f"{each} consumers" for each in counts),
    ]
    return markdown_table(heading, lines) + machine_line(rows)


def precisions(path: Path) -> str:
    """List times in 8 bits relative to the exact kernel, for self-attention by length; where
    `precision="fastest"` takes FP8, the ratio is in bold."""
    rows = [row for row in results.read(path) if row["q_len"] == row["kv_len"]]
    lengths = sorted({int(row["q_len"]) for row in rows})
    lines: dict[str, list[str]] = {}
    for row in rows:
        about = f"head_dim {row['head_dim']}, heads {row['q_heads']}/{row['kv_heads']}"
        about += ", causal" if row["is_causal"] == "True" else ""
        for name in ("fp8", "int8"):
            ratio = f"{float(row[f'{name} / exact']):.2f}"
            is_taken = name == "fp8" and row["fastest"] == "1"
            cells = lines.setdefault(f"{name}, {about}", [""] * len(lengths))
            cells[lengths.index(int(row["q_len"]))] = f"**{ratio}**" if is_taken else ratio
    heading = ["time / exact", *(f"{length // 1024}K" for length in lengths)]
    return markdown_table(heading, dict(sorted(lines.items()))) + machine_line(rows)


def invariance(path: Path) -> str:
    """List the price of invariance, with its interval, and of decoding with the bits of prefill."""
    rows = results.read(path)
    lines = {}
    for row in rows:
        of = (row["q_heads"], row["kv_heads"], row["q_len"], row["kv_len"], row["head_dim"])
        about = "{}×{}/{}×{}/{}×{}".format(row["batch"], *of)
        about += " causal" if row["is_causal"] == "True" else ""
        ratio, low, high, alike = (
            f"{float(row[name]):.2f}" if row[name] else ""
            for name in ("invariant / plain", "low", "high", "with prefill's bits / plain")
        )
        lines[about] = [f"{ratio} ({low}-{high})", alike]
    heading = ["B×H×S×D, time / plain", "invariant", "decode with prefill's bits"]
    return markdown_table(heading, lines) + machine_line(rows)


def block_sparse(path: Path) -> str:
    """List the time of block-sparse attention, and its speed for each block that it visits."""
    rows = results.read(path)
    lines: dict[str, list[str]] = {}
    for row in rows:
        key = f"{row['call']}, {row['policy']}, {row['kernel']}"
        cells = lines.setdefault(key, [f"{100 * float(row['visited']):.0f} %", *[""] * 6])
        cells[1] = f"{float(row['dense, ms']):.3g}"
        place = {"core": 2, "drop-in": 4, "choice": 6}[row["part"]]
        cells[place] = f"{float(row['ms']):.3g}"
        if row["part"] == "choice":
            continue
        cells[place + 1] = f"{float(row['speed per block']):.2f} ({_range(row)})"
    headings = ["call, policy, kernel", "visited", "dense, ms", "core, ms", "core, per block"]
    headings += ["drop-in, ms", "drop-in, per block", "choice, ms"]
    return markdown_table(headings, lines) + machine_line(rows)


def _range(row: dict[str, str]) -> str:
    return "-".join(f"{float(row[end]):.2f}" if row[end] else "" for end in ("low", "high"))


def power_limit() -> str:
    """List the times of kernels that were each measured in three ways."""
    with (results.DIRECTORY / "power_limit.csv").open(newline="") as file:
        heading, *lines = csv.reader(file)
    text = [f"| {' | '.join(cell.strip() for cell in heading[:-1])} |"]
    text.append(f"|---|---|{'---:|' * (len(heading) - 3)}")
    text += [f"| {' | '.join(line[:-1])} |" for line in lines]
    return "\n".join(text) + f"\n\n{lines[0][-1]}.\n"


def _each_kernel_once(path: Path) -> list[dict[str, str]]:
    """Return a file's rows, with PyTorch's kernels from the replaying environment only."""
    return [
        row
        for row in results.read(path)
        if row["environment"] == "this" or not row["kernel"].startswith("torch-")
    ]


def _is_decode(row: dict[str, str]) -> bool:
    return row["call.shape.q_len"] == "1"


def _shape_cell(row: dict[str, str]) -> str:
    return _scene_cell([row], "time_ms.p50" if _is_decode(row) else "tflops")


def _scene_cell(rows: list[dict[str, str]], column: str) -> str:
    """Format the median over the calls, or the statuses if there is no time."""
    values = sorted(float(row[column]) for row in rows if row["status"] == "ok" and row[column])
    if values:
        value = values[len(values) // 2]
        return f"{value:.0f}" if column == "tflops" else f"{value:.3f}"
    return " ".join(sorted({row["status"] for row in rows}))


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return 0.0


def shape(row: dict[str, str]) -> str:
    size = {name: row[f"call.shape.{name}"] for name in results.SIZES}
    heads, lengths = size["q_heads"], size["q_len"]
    if size["kv_heads"] != heads:
        heads += f"/{size['kv_heads']}"
    if size["kv_len"] != lengths:
        lengths += f"/{size['kv_len']}"
    dims = size["head_dim"]
    if size["v_head_dim"] != dims:
        dims += f"/{size['v_head_dim']}"
    causal = " causal" if row["call.is_causal"] == "True" else ""
    return f"{size['batch']}×{heads}×{lengths}×{dims}{causal}"
