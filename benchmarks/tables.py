"""Writes the tables in the docs from `benchmarks/results/` and the code's own field list.

python -m benchmarks.tables            rewrite the marked blocks of README.md and docs/*.md
python -m benchmarks.tables --check    exit 1 if any is out of date
"""

from __future__ import annotations

import csv
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import get_args, get_type_hints

from benchmarks import results
from capture.variant import FEATURES
from replay.accuracy.thresholds import Thresholds
from replay.kernels.registry import catalogue
from replay.rows.fields import COLUMNS, FIELDS
from replay.rows.meaning import OVER_CALLS
from replay.workloads.distributions import DISTRIBUTIONS

REPOSITORY = Path(__file__).parent.parent
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    written = {page: page.read_text(encoding="utf-8") for page in PAGES}
    wanted = {page: with_tables(text) for page, text in written.items()}
    stale = [page for page in PAGES if written[page] != wanted[page]]
    if "--check" in sys.argv[1:]:
        names = ", ".join(str(page.relative_to(REPOSITORY)) for page in stale)
        sys.exit(f"{names}: run `python -m benchmarks.tables`" if stale else 0)
    for page in stale:
        page.write_text(wanted[page], encoding="utf-8")


def with_tables(text: str) -> str:
    """Rewrite the marked blocks of a page."""
    return BLOCK.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[3]}", text)


def glossary() -> str:
    """List every column of `replay --metric all`, with the meaning of its field."""
    meaning = {item.path: item.meaning for item in FIELDS}
    lines = ["| column | meaning | over several calls |", "|---|---|---|"]
    for path, column in COLUMNS.items():
        over_calls = OVER_CALLS[column.over_calls]
        lines.append(f"| {column.heading} | {_escaped(meaning[path])} | {over_calls} |")
    return "\n".join(lines) + "\n"


def fields() -> str:
    """List every field of a row; the five sets of errors are listed once."""
    lines = ["| field | unit | meaning |", "|---|---|---|"]
    for item in FIELDS:
        path, meaning = item.path, item.meaning
        if path.startswith("accuracy.") and not path.startswith("accuracy.where."):
            if not path.startswith("accuracy.reference."):
                continue
            path = path.replace("reference", "{reference,captured,kernel,noise_floor,chosen}")
            meaning = meaning.partition(";")[0]
        lines.append(f"| `{path}` | {item.unit} | {_escaped(meaning)} |")
    return "\n".join(lines) + "\n"


def distributions() -> str:
    """List the values that `replay --random --distribution` takes."""
    lines = ["| `--distribution` | what it provokes |", "|---|---|"]
    lines += [f"| `{name}` | {each.provokes} |" for name, each in DISTRIBUTIONS.items()]
    return "\n".join(lines) + "\n"


def thresholds() -> str:
    """List the constants that `replay --tolerances` changes, with their defaults."""
    lines = ["| table | key | default | meaning |", "|---|---|---:|---|"]
    for table, values in vars(Thresholds()).items():
        hints = get_type_hints(type(values), include_extras=True)
        for key, value in vars(values).items():
            meaning = get_args(hints[key])[1]
            lines.append(f"| `[{table}]` | `{key}` | {value:g} | {meaning} |")
    return "\n".join(lines) + "\n"


def full_size() -> str:
    """List TFLOPS by kernel on calls of full-size models; memory-bound decode in ms."""
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
    return _table(["kernel", *scenes], {kernel: cells[kernel] for kernel in fastest_first}) + (
        _machine(rows)
    )


def by_shape(file: str, *, decode: bool | None = None) -> str:
    """List TFLOPS by shape; memory-bound decode in ms, drop-in time first, then core time.

    Every environment times PyTorch's kernels; only those of the replaying one are listed.

    Args:
        decode: list only decode shapes (True), only the others (False), or all (None).
    """
    rows = [
        row
        for row in results.read(results.DIRECTORY / file)
        if row["environment"] == "this" or not row["kernel"].startswith("torch-")
        if decode is None or decode == _is_decode(row)
    ]
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    shapes: dict[str, dict[str, str]] = {}
    for row in rows:
        cells = shapes.setdefault(_shape(row) + (" (ms)" if _is_decode(row) else ""), {})
        cells[row["kernel"]] = _decode_cell(row) if decode else _shape_cell(row)
    lines = {
        shape: [cells.get(kernel, "") for kernel in kernels] for shape, cells in shapes.items()
    }
    return _table(["B×H×S×D", *kernels], lines) + _machine(rows)


def by_call(path: Path) -> str:
    """List ms of the drop-in by call and kernel; nothing where it is not supported."""
    rows = results.read(path)
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    calls: dict[str, dict[str, str]] = {}
    for row in rows:
        cells = calls.setdefault(row["call.name"], {})
        supported = row["status"] != "unsupported"
        cells[row["kernel"]] = _scene_cell([row], "time_ms.p50") if supported else ""
    lines = {name: [cells.get(each, "") for each in kernels] for name, cells in calls.items()}
    return _table(["ms", *kernels], lines) + _machine(rows)


def _is_decode(row: dict[str, str]) -> bool:
    return row["call.shape.q_len"] == "1"


def _shape_cell(row: dict[str, str]) -> str:
    return _scene_cell([row], "time_ms.p50" if _is_decode(row) else "tflops")


def _decode_cell(row: dict[str, str]) -> str:
    core = row["core_time_ms.p50"]
    return _shape_cell(row) + (f" ({float(core):.3f})" if core else "")


UNSMOOTHED = "[smooth_k=off]"

WIDE = 0.05
"""The interval of a measured speed-up is shown if it is wider than this share of it."""

SCENES = {
    ("cogvideo", "denoise"): "CogVideoX-2b, a denoising step",
    ("flux", "denoise"): "FLUX.1-dev, a denoising step",
    ("llama", "prefill"): "Llama-2-7b, prefill of 4,096 tokens",
    ("llama", "decode"): "Llama-2-7b, a decoded token",
}


def end_to_end(kernels: Sequence[str] = ()) -> str:
    """List predicted / measured speed-ups of a step and the prediction error, for all kernels by
    default.
    """
    rows = results.read(results.DIRECTORY / "end_to_end.csv")
    found = {(row["model"], row["span"], row["kernel"]): row for row in rows}
    scenes = [scene for scene in SCENES if any(key[:2] == scene for key in found)]
    lines = {
        "*the model's own attention*": [_own_cell(rows, *scene) for scene in scenes],
        **{
            kernel: [_speedup_cell(found, *scene, kernel) for scene in scenes]
            for kernel in dict.fromkeys(
                row["kernel"] for row in rows if row["predicted.speedup.low"]
            )
            if not kernels or kernel in kernels
        },
    }
    return _table(["kernel", *(SCENES[scene] for scene in scenes)], lines) + _machine(rows)


def end_to_end_printed() -> str:
    """Quote what `replay --e2e` printed for the built-in CogVideoX, up to the legend."""
    printed = (results.DIRECTORY / "end_to_end_demo.txt").read_text().splitlines()
    start = next(n for n, line in enumerate(printed) if line.startswith("cogvideo end to end"))
    end = next(n for n in range(start, len(printed)) if printed[n].startswith("predicted: "))
    return "\n".join(("```", *(line.rstrip() for line in printed[start:end]), "```", ""))


def _own_cell(rows: list[dict[str, str]], model: str, span: str) -> str:
    """Format the model's own time and attention's share of it."""
    mine = [row for row in rows if (row["model"], row["span"]) == (model, span)]
    shares = [
        float(row["predicted.attention_share"]) for row in mine if row["predicted.speedup.low"]
    ]
    if not mine or not shares:
        return ""
    return f"{float(mine[0]['measured.ms.p50']):.4g} ms, attention {100 * shares[0]:.0f} %"


def _speedup_cell(
    found: dict[tuple[str, str, str], dict[str, str]], model: str, span: str, kernel: str
) -> str:
    row = found.get((model, span, kernel)) or found.get((model, "", kernel))
    if row is None:
        return ""
    if row["status"] != "ok":
        return row["status"]
    if not row["measured.speedup.ratio"]:
        return ""
    ratio, low, high = (float(row[f"measured.speedup.{name}"]) for name in ("ratio", "low", "high"))
    measured = f"{ratio:.2f}×"
    if high - low > WIDE * ratio:
        measured += f" [{low:.2f}-{high:.2f}]"
    if not row["prediction_error"]:
        return f"- / {measured}"
    error = 100 * float(row["prediction_error"])
    return f"{float(row['predicted.speedup.value']):.2f}× / {measured} ({error:+.1f} %)"


def attention_structure() -> str:
    """List the mean over the layers of each built-in model; the file has a line per layer."""
    text = (results.DIRECTORY / "attention_structure.md").read_text()
    printed, _, where = text.strip().rpartition("\n\n")
    heading, rule, *lines = [line.split("|") for line in printed.splitlines()]
    of_models = [line for line in lines if line[2].strip() == "all layers"]
    rows = ["|".join(line[:2] + line[3:]) for line in (heading, rule, *of_models)]
    return "\n".join((*rows, "", where, ""))


def trained_weights() -> str:
    """List errors by kind of values, and the drift of the trained model's output."""
    rows = results.read(results.DIRECTORY / "trained_weights.csv")
    kinds = ("trained weights", "random weights", "random values")
    found = {(row["model"], row["phase"], row["kernel"], row["values"]): row for row in rows}
    headings = ["kernel", kinds[0], "K not smoothed", *kinds[1:], "trained model's output"]
    lines: dict[str, list[str]] = {}
    for model, phase, kernel in dict.fromkeys(key[:3] for key in found):
        if kernel in ("torch-default", "torch-cudnn") or kernel.endswith(UNSMOOTHED):
            continue  # the model's own attention; and variants, which have their own column
        trained, *others = [found.get((model, phase, kernel, kind)) for kind in kinds]
        plain = found.get((model, phase, kernel + UNSMOOTHED, kinds[0]))
        drift = _drift_cell(trained, phase) if trained else ""
        lines[f"{kernel}, {model} {phase}"] = [*map(_error_cell, (trained, plain, *others)), drift]
    return _table(headings, lines) + _machine(rows)


def _error_cell(row: dict[str, str] | None) -> str:
    if row is None:
        return ""
    median, worst = (float(row[f"relative_l1.{name}"]) for name in ("median", "worst"))
    return f"{median:.2g} ({worst:.2g})"


def _drift_cell(row: dict[str, str], phase: str) -> str:
    if phase == "decode":
        kl, tokens = row["drift.generated_kl"], row["drift.generated_compared"]
        return f"KL {float(kl):.2g} over {tokens} token{'s' * (tokens != '1')}" if kl else ""
    if row["drift.perplexity"]:
        before, after = (float(row[f"drift.{name}perplexity"]) for name in ("baseline_", ""))
        return f"perplexity {before:.3f} → {after:.3f}"
    if row["drift.psnr"]:
        return f"PSNR {float(row['drift.psnr']):.1f} dB, SSIM {float(row['drift.ssim']):.3f}"
    return ""


def misleading_inputs() -> str:
    """List, by size and machine, figures on recorded calls and what random values make of them."""
    tables: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for row in results.read(results.DIRECTORY / "misleading_inputs.csv"):
        tables[row["size"], row["machine.device"]].append(row)
    text = []
    for (size, _), rows in tables.items():
        lines = {
            f"{row['kernel'].rpartition('/')[2]}, {row['model']} {row['phase']}": [
                _misled_cell(row, "time", ".4g", " ms"),
                _misled_cell(row, "speedup", ".2f", "×"),
                _misled_cell(row, "error", ".1e", ""),
                _misled_cell(row, "power", ".0f", " W"),
            ]
            for row in rows
        }
        headings = [f"{size} models", "time", "speed-up", "relative L1", "power"]
        text.append(_table(headings, lines) + _machine(rows))
    return "\n".join(text)


def _misled_cell(row: dict[str, str], figure: str, form: str, unit: str) -> str:
    """`9.15 ms (0.98×, 0.99×)`: on recorded calls, and multiples on random and matched values."""
    recorded, *twins = (row[f"{figure}.{values}"] for values in ("recorded", "random", "matched"))
    if not recorded:
        return ""
    multiples = ", ".join(f"{float(twin) / float(recorded):.2f}×" for twin in twins if twin)
    return f"{float(recorded):{form}}{unit} ({multiples})"


def demo() -> str:
    """Quote the first block and the summary that `make demo` printed."""
    head, first, *others = (results.DIRECTORY / "demo.txt").read_text().rstrip().split("\n\n")
    return "\n\n".join(("```\n" + head, first, "[…]", others[-1] + "\n```\n"))


def power_limit() -> str:
    """List the same kernels measured three ways."""
    with (results.DIRECTORY / "power_limit.csv").open(newline="") as file:
        heading, *lines = csv.reader(file)
    text = [f"| {' | '.join(cell.strip() for cell in heading[:-1])} |"]
    text.append(f"|---|---|{'---:|' * (len(heading) - 3)}")
    text += [f"| {' | '.join(line[:-1])} |" for line in lines]
    return "\n".join(text) + f"\n\n{lines[0][-1]}.\n"


def coverage() -> str:
    """List how often the verdicts of speed are right, by number of rounds."""
    rows = results.read(results.DIRECTORY / "coverage.csv")
    headings = ["machine", "rounds", "pairs", "A/A tied", "3 % more work found"]
    lines = [f"| {' | '.join(headings)} |", f"|---|{'---:|' * (len(headings) - 1)}"]
    for row in rows:
        machine = f"{row['device']}, torch {row['machine.torch']}"
        if row["threads"]:
            threads = "one thread" if row["threads"] == "1" else f"{row['threads']} threads"
            machine += f", {threads}, load average {row['load']}"
        shares = [
            f"{100 * float(row[f'{name}.share']):.1f} % ({100 * float(row[f'{name}.low']):.1f}-"
            f"{100 * float(row[f'{name}.high']):.1f})"
            for name in ("ties", "found")
        ]
        lines.append(f"| {machine} | {row['rounds']} | {row['pairs']} | {' | '.join(shares)} |")
    return "\n".join(lines) + "\n"


def defence_overhead() -> str:
    """List what judging what is timed adds to a replay, and the judge's process alone."""
    rows = results.read(results.DIRECTORY / "defence_overhead.csv")
    arms: dict[tuple[str, ...], dict[str, dict[str, str]]] = defaultdict(dict)
    for row in rows:
        names = ("device", "machine.torch", "threads", "calls", "rows", "load")
        key = tuple(row[name] for name in names)
        arms[key][row["arm"]] = row
    lines = [
        "| machine | calls | rows | without, wall | without, CPU | all of it, wall | CPU "
        "| the judge's process alone, wall | CPU | load |",
        f"|---|{'---:|' * 9}",
    ]
    for (device, torch, threads, calls, count, load), found in arms.items():
        without = [f"{float(found['without'][name]):.1f} s" for name in ("wall_s", "cpu_s")]
        added = [
            f"{float(found[arm][name]):+.0%}".replace("%", " %")
            for arm in ("as it is", "without, and a judge")
            for name in ("wall", "cpu")
        ]
        machine = f"{device}, torch {torch}" + (f", threads: {threads}" if threads else "")
        cells = [machine, calls, count, *without, *added, load]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def many_calls() -> str:
    """List what sharing calls out costs, by the number of rows, kernels and devices."""
    rows = results.read(results.DIRECTORY / "many_calls.csv")
    devices = list(dict.fromkeys(row["devices"] for row in rows))
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for row in rows:
        case = row["kernels"], row["forms"], row["rows"]
        found[case].append(f"{1e3 * float(row['cpu_seconds']) / int(row['rows']):.2f} ms")
    named = [f"{count} device{'s' * (count != '1')}" for count in devices]
    lines = [
        f"| kernels per call | forms of call | rows | {' | '.join(named)} |",
        f"|---:|---|---:|{'---:|' * len(named)}",
    ]
    for case, cells in found.items():
        lines.append(f"| {' | '.join((*case, *cells))} |")
    return "\n".join(lines) + f"\n\n{rows[0]['machine.device']}.\n"


def overhead(file: str) -> str:
    """List what recording or a replay costs, by figure."""
    rows = results.read(results.DIRECTORY / file)
    lines = ["| figure | median | runs |", "|---|---:|---:|"]
    for row in rows:
        value = f"{float(row['p50']):.4g}"
        unit = f" {row['unit']}" if row["unit"] not in ("", "×") else row["unit"]
        lines.append(f"| {row['figure']} | {value}{unit} | {row['n']} |")
    first = rows[0]
    machine = f"{first['model']}, {first['weights']}; {first['machine.device']}"
    return "\n".join(lines) + f"\n\n{machine}, torch {first['machine.torch']}.\n"


def launch_cost() -> str:
    """List what a call of each kernel costs the host, by call."""
    rows = results.read(results.DIRECTORY / "launch_cost.csv")
    calls = list(dict.fromkeys(row["call"] for row in rows))
    lines: dict[str, list[str]] = {}
    for row in rows:
        name = row["kernel"] + " core" * (row["part"] == "core")
        alone, among = (float(row[f"{how}, µs"]) for how in ("back to back", "among other work"))
        lines.setdefault(name, [""] * len(calls))[calls.index(row["call"])] = (
            f"{alone:.0f}, {among:.0f}"
        )
    return _table(["µs: back to back, among other work", *calls], lines) + _machine(rows)


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


def _shape(row: dict[str, str]) -> str:
    size = {name: row[f"call.shape.{name}"] for name in results.SIZES}
    heads, lengths = size["q_heads"], size["q_len"]
    if size["kv_heads"] != heads:
        heads += f"/{size['kv_heads']}"
    if size["kv_len"] != lengths:
        lengths += f"/{size['kv_len']}"
    causal = " causal" if row["call.is_causal"] == "True" else ""
    warm = " warm" if "warm" in row["call.name"] else ""
    return f"{size['batch']}×{heads}×{lengths}×{size['head_dim']}{causal}{warm}"


def features() -> str:
    """List what each kernel knows beyond SDPA; those that know nothing of it are left out."""
    lines = {
        f"`{name}`": ["yes" if feature in kernel.features else "" for feature in FEATURES]
        for name, kernel in catalogue().items()
        if kernel.features
    }
    return _table(["kernel", *FEATURES.values()], lines)


def other_gpus() -> str:
    """List, by kernel and compute capability, the head dimensions that a kernel compiles for."""
    rows = results.read(results.DIRECTORY / "other_gpus.csv")
    capabilities = list(dict.fromkeys(row["compute capability"] for row in rows))
    lines: dict[str, list[str]] = {}
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        lines[f"`{kernel}`"] = [
            ", ".join(
                row["head_dim"]
                for row in rows
                if (row["kernel"], row["compute capability"], row["result"])
                == (kernel, capability, "compiles")
            )
            for capability in capabilities
        ]
    return _table(["kernel", *capabilities], lines) + f"\nTriton {rows[0]['triton']}.\n"


def capture_faults() -> str:
    """List what happened after each fault while recording, and how often it was tried."""
    with (results.DIRECTORY / "capture_faults.csv").open(newline="") as file:
        lines = {row["fault"]: [row["tried"], row["outcome"]] for row in csv.DictReader(file)}
    return _table(["fault", "tried", "what happened"], lines)


def doctor_score() -> str:
    """List, by cause, how many planted faults `replay doctor` named right, and its false alarms."""
    rows = results.read(results.DIRECTORY / "doctor_score.csv")
    *causes, healthy = rows
    lines = {
        row["cause"]: [
            row["planted"],
            *(row[f"{part}.right"] for part in ("cause", "layer")),
            *(
                f"{row[f'{part}.right']} of {row[f'{part}s']}" if row[f"{part}s"] != "0" else ""
                for part in ("step", "head")
            ),
        ]
        for row in causes
    }
    planted, right = (sum(int(row[name]) for row in causes) for name in ("planted", "right"))
    summary = (
        f"\nCause and layer are right in {right} of {planted}; "
        f"{healthy['findings']} findings in {healthy['calls']} calls of kernels without a fault.\n"
    )
    headings = [
        "planted fault",
        "planted",
        "cause right",
        "layer right",
        "step right",
        "head right",
    ]
    machine = f"\n{healthy['machine.device']}, torch {healthy['machine.torch']}.\n"
    return _table(headings, lines) + summary + machine


def public_tests() -> str:
    """List how many comparisons of other libraries' tests each kernel passed, if there are any."""
    path = results.DIRECTORY / "public_tests.csv"
    if not path.is_file():
        return ""
    rows = results.read(path)
    columns = ("FlashAttention 2", "FlashAttention 3", "FlashInfer", "FlashInfer, with itself")
    lines: dict[str, list[str]] = {}
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        own = [row for row in rows if row["kernel"] == kernel]
        by_column = [[row for row in own if _tests_of(row) == name] for name in columns]
        passed, failed = (
            [sum(int(row[result]) for row in some) for some in by_column]
            for result in ("passed", "failed")
        )
        skipped = sum(int(row["skipped"]) for row in own)
        lines[f"`{kernel}`"] = [
            *(f"{n} of {n + m}" if n + m else "" for n, m in zip(passed, failed, strict=True)),
            str(skipped),
        ]
    versions = ", ".join(
        f"{library} {version}"
        for library, version in dict.fromkeys((row["library"], row["version"]) for row in rows)
    )
    table = _table(["passed", *columns, "skipped"], lines)
    return f"{table}{_machine(rows)[:-2]}; {versions}.\n"


def _tests_of(row: dict[str, str]) -> str:
    if row["library"] == "flash-attention":
        return f"FlashAttention {3 if row['file'].startswith('hopper/') else 2}"
    return "FlashInfer, with itself" if row["against"] == "itself" else "FlashInfer"


def _table(headings: list[str], lines: dict[str, list[str]]) -> str:
    text = [f"| {' | '.join(headings)} |", f"|---|{'---:|' * (len(headings) - 1)}"]
    text += [f"| {first} | {' | '.join(cells)} |" for first, cells in lines.items()]
    return "\n".join(text) + "\n"


def _machine(rows: list[dict[str, str]]) -> str:
    first = rows[0]
    versions = ", ".join(
        f"{name} {first[f'machine.{name}']}"
        for name in ("torch", "cuda", "triton")
        if first.get(f"machine.{name}")
    )
    return f"\n{first['machine.device']}, {versions}.\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


TABLES: dict[str, Callable[[], str]] = {
    "distributions": distributions,
    "demo": demo,
    "misleading_inputs": misleading_inputs,
    "power_limit": power_limit,
    "coverage": coverage,
    "capture_faults": capture_faults,
    "doctor_score": doctor_score,
    "capture_overhead": partial(overhead, "capture_overhead.csv"),
    "launch_cost": launch_cost,
    "many_gpus": partial(overhead, "many_gpus.csv"),
    "difficulty_overhead": partial(overhead, "difficulty_overhead.csv"),
    "calls_not_kept": partial(overhead, "calls_not_kept.csv"),
    "replay_overhead": partial(overhead, "replay_overhead.csv"),
    "defence_overhead": defence_overhead,
    "many_calls": many_calls,
    "public_tests": public_tests,
    "glossary": glossary,
    "fields": fields,
    "thresholds": thresholds,
    "full_size": full_size,
    "published_shapes": partial(by_shape, "published_shapes.csv"),
    "triton_prefill": partial(by_shape, "triton_kernels.csv", decode=False),
    "triton_decode": partial(by_shape, "triton_kernels.csv", decode=True),
    "quantised_decode": partial(by_shape, "quantised_decode.csv", decode=True),
    "end_to_end": end_to_end,
    "end_to_end_short": partial(
        end_to_end, ("torch-flash", "sage1", "triton-fa3", "triton-fp8", "fa4@fa4")
    ),
    "end_to_end_printed": end_to_end_printed,
    "attention_structure": attention_structure,
    "trained_weights": trained_weights,
    "features": features,
    "other_gpus": other_gpus,
    "variants": partial(by_call, results.DIRECTORY / "variants.csv"),
    "peers_from_source": partial(by_shape, "peers_from_source.csv"),
}

if __name__ == "__main__":
    main()
