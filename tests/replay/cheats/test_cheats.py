"""Cheats found by hostile reviewers, and five drawn at random, are replayed by the whole command.

Each cheat runs together with PyTorch's kernel and an honest kernel, in worker processes and in one
process. `run.py` defines success; times count only if a busy machine cannot explain them.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import replay

RUN = Path(__file__).with_name("run.py")
REPOSITORY = Path(replay.__file__).resolve().parent.parent
MODES: dict[str, list[str]] = {"workers": [], "one process": ["--in-process"]}

CAUGHT = (
    "caches.by_address_cloned",
    "caches.by_few_elements",
    "caches.of_half_of_the_heads",
    "timers.names_like_a_benchmark",
    "timers.in_calls_two_to_four",
    "lazy.on_dispatch",
    "lazy.on_function",
    "peeking.in_the_callers",
    "patching.slow_clock",
    "patching.frozen_judge",
    "patching.timer_methods",
    "patching.equal",
    "kinds.float64",
    "inputs.scales_query",
    "import_flash.kernel",
    "state.seeds",
    "state.nice_and_pinned",
    "manners.unspeakable",
    "manners.leaves",
    "declared.one_head_lost",
    "declared.last_row_turned",
    "declared.last_keys_skipped",
    "declared.keys_kept",
    "outsiders.library_makes_others_slow",
    "outsiders.no_samples",
    "outsiders.known_draws",
    "outsiders.code_of_the_timer",
)
HARMLESS = (
    "caches.by_sum",
    "timers.gc_is_off",
    "timers.unless_drawn",
    "peeking.rows_to_be_judged",
    "manners.closes_stdout",
    "kinds.in_inference_mode",
)
"""Cheats that do no harm, or have no effect on this machine."""
BY_CHANCE = ("poison.only_over_nan",)
"""Cheats whose errors depend on the content of memory. In one run of ten, such a cheat is almost
always right, and then not faster.
"""
OPEN = {
    "poison.*": "is sometimes wrong in few calls, and then wins no time",
    "timers.between_calls_8_and_38": "is wrong only during the warm-up",
    "outsiders.start_in_*": "changes a number in memory; found in calls of a tenth of a second",
}
"""Cheats that docs/method.md lists as not found."""
OPEN_IN_ONE_PROCESS = {"manners.*": "no row outlives its process, and what is printed is shown"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]


def verdicts(*options: str) -> dict[tuple[str, str], str]:
    """Return the verdicts of one run of `run.py` by cheat and call, and print the run's table."""
    command = [sys.executable, str(RUN), "--quick", "--jobs", "2", *options]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    print(shlex.join(command), done.stderr, done.stdout, sep="\n")
    assert done.returncode == 0
    lines = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if "." in line]
    return {(cells[0], cells[1]): cells[-1] for cells in lines}


@pytest.mark.parametrize("mode", MODES)
def test_cheats_of_reviewers_are_found(mode: str) -> None:
    names = ",".join((*CAUGHT, *HARMLESS, *BY_CHANCE))
    found = verdicts("--only", names, "--call", "prefill", *MODES[mode])
    verdict = {name: found[name, "prefill"] for name in (*CAUGHT, *HARMLESS, *BY_CHANCE)}
    assert {name: verdict[name] for name in CAUGHT if verdict[name] != "caught"} == {}
    assert {name: verdict[name] for name in HARMLESS if "fooled" in verdict[name]} == {}
    assert {name: verdict[name] for name in BY_CHANCE if "time" in verdict[name]} == {}


@pytest.mark.parametrize("mode", MODES)
def test_five_random_cheats_are_found(mode: str) -> None:
    """The command and its seed are printed, so that `--seed …` repeats the draw."""
    left_out = [*OPEN, *(OPEN_IN_ONE_PROCESS if mode == "one process" else ())]
    found = verdicts("--draw", "5", "--leave-out", ",".join(left_out), *MODES[mode])
    assert len(found) == 10
    assert {at: verdict for at, verdict in found.items() if "fooled" in verdict} == {}
