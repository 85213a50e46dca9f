"""Cheats that only a GPU allows are found, and honest kernels are not accused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from replay.cli.main import main

FILE = Path(__file__).with_name("cheats.py")
CHEATS = ("kept_by_pointer", "replays_a_graph_of_old_inputs", "replays_a_graph_that_lost_a_launch")
RACES = (
    "on_a_stream_that_nobody_joins",
    "on_two_streams_of_which_one_is_joined",
    "from_a_thread",
)
"""Kernels whose outputs are right if the host takes longer than the GPU."""
LIARS = ("with_a_clock_of_its_own", "records_the_timers_event_again")
"""Cheats with false times, each in a worker of its own: in one process nothing contradicts them."""
HONEST = ("waits_inside", "replays_a_graph")


@pytest.mark.parametrize("mode", [(), ("--in-process",)], ids=["worker", "in-process"])
@pytest.mark.parametrize("sizes", [(24, 4608, 128), (8, 512, 128)], ids=str)
def test_cheats_cost_their_own_row_and_no_other(
    tmp_path: Path, sizes: tuple[int, int, int], mode: tuple[str, ...]
) -> None:
    rows = tmp_path / "rows.jsonl"
    heads, length, dim = map(str, sizes)
    kernels = [f"{FILE}:{name}" for name in (*CHEATS, *RACES, *HONEST)]
    for name in () if mode else LIARS:
        copied = shutil.copy(FILE, tmp_path / f"{name}.py")
        kernels.append(f"{copied}:{name}")
    arguments = ["random", "-hq", heads, "-sq", length, "-d", dim, *mode, "--json", str(rows)]
    with pytest.raises(SystemExit):
        main([*arguments, "--kernels", ",".join(("torch-default", "torch-flash", *kernels))])
    found: dict[str, dict[str, Any]] = {}
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        found[row["kernel"].rpartition(":")[2]] = row
    told = {name: (row["status"], row["reason"], row["flags"]) for name, row in found.items()}
    for name in CHEATS:
        assert found[name]["status"] in ("error", "inaccurate"), told
    for name in (*RACES, *(() if mode else LIARS)):
        # A call that launches limit is compared by its blocks, whose times are true.
        speedup = found[name]["speedup"]
        assert found[name]["status"] != "ok" or not speedup or (speedup["low"] or 0) < 1.3, told
    for name in ("torch-default", "torch-flash", *HONEST):
        assert found[name]["status"] == "ok", told
