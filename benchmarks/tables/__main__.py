"""Writes the tables in the docs from `benchmarks/results/` and the code's own field list.

python -m benchmarks.tables            rewrite the marked blocks of README.md and docs/*.md
python -m benchmarks.tables --check    exit 1 if any is out of date
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import results
from benchmarks.tables import (
    declared,
    end_to_end,
    inputs,
    options,
    overheads,
    plans,
    quoted,
    rivals,
    speed,
    trials,
)

REPOSITORY = Path(__file__).parents[2]
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


TABLES: dict[str, Callable[[], str]] = {
    "distributions": declared.distributions,
    "demo": quoted.demo,
    "energy": quoted.energy,
    "misleading_inputs": inputs.misleading_inputs,
    "power_limit": speed.power_limit,
    "busy_machine": trials.busy_machine,
    "coverage": trials.coverage,
    "capture_faults": trials.capture_faults,
    "doctor_score": trials.doctor_score,
    "capture_overhead": partial(overheads.by_figure, "capture_overhead.csv"),
    "recording_cost": partial(overheads.by_figure, "recording_cost.csv"),
    "launch_cost": overheads.launch_cost,
    "defence_overhead": overheads.defence_overhead,
    "public_tests": trials.public_tests,
    "options_of_capture": partial(options.options, "capture"),
    "options_of_replay": partial(options.options, "replay"),
    "glossary": declared.glossary,
    "fields": declared.fields,
    "thresholds": declared.thresholds,
    "full_size": speed.full_size,
    "hopper_kernels": partial(speed.by_shape, "hopper_kernels.csv", cores=True, errors=True),
    "rivals": rivals.rivals,
    "accumulation": trials.accumulation,
    "backward": partial(speed.backward, results.DIRECTORY / "backward.csv"),
    "engine_kernels": partial(speed.engine_kernels, results.DIRECTORY / "engine_kernels.csv"),
    "decode": partial(speed.decode, results.DIRECTORY / "decode.csv"),
    "cold_cache": partial(speed.cold_cache, results.DIRECTORY / "cold_cache.csv"),
    "end_to_end": end_to_end.speedups,
    "end_to_end_short": partial(
        end_to_end.speedups, ("torch-flash", "sage1", "triton-fa3", "triton-fp8", "fa4@fa4")
    ),
    "end_to_end_printed": quoted.end_to_end_printed,
    "attention_structure": quoted.attention_structure,
    "devices": quoted.devices,
    "trained_weights": inputs.trained_weights,
    "sparse_inputs": inputs.sparse_inputs,
    "plan_alternatives": plans.plan_alternatives,
    "tuning_budgets": plans.tuning_budgets,
    "foretold_drift": plans.foretold_drift,
    "sketched_tuning": plans.sketched_tuning,
    "sparse_tuning": plans.sparse_tuning,
    "features": declared.features,
    "other_gpus": trials.other_gpus,
    "per_pair": partial(speed.per_pair, results.DIRECTORY / "per_pair.csv"),
    "narrow_heads": partial(speed.narrow_heads, results.DIRECTORY / "narrow_heads.csv"),
    "invariance": partial(speed.invariance, results.DIRECTORY / "invariance.csv"),
    "precisions": partial(speed.precisions, results.DIRECTORY / "precisions.csv"),
    "masks": partial(speed.by_call, results.DIRECTORY / "masks.csv"),
    "block_sparse": partial(speed.block_sparse, results.DIRECTORY / "block_sparse.csv"),
    "peers_from_source": partial(speed.by_shape, "peers_from_source.csv"),
}


if __name__ == "__main__":
    main()
