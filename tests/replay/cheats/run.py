"""Replays cheats together with honest kernels, and tells which of them fooled the replay.

python tests/replay/cheats/run.py [CHEAT …]      functions of outputs.py and alone.py
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NEIGHBOURS = ("torch-default", "torch-math", f"{HERE / 'honest.py'}:honest")
CALL = ["-b", "1", "-hq", "4", "-sq", "192", "-d", "64", "--dtype", "fp32"]
OPTIONS = ["--rounds", "8", "--max-seconds", "0.1", "--timeout", "60"]
SECONDS = 300
TOO_MUCH = 1.3
"""Speed-up that no cheat may get."""

Rows = dict[str, list[dict[str, Any]]]


def names(file: str) -> list[str]:
    """Return the names of a file's cheats."""
    return re.findall(r"^def ([a-z]\w+)", (HERE / f"{file}.py").read_text(), re.MULTILINE)


def replay(*cheats: str) -> Rows:
    """Return the rows of cheats and their neighbours, which one command replays."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{HERE / 'outputs.py'}:{name}" for name in names("outputs") if name in cheats]
        for name in (each for each in names("alone") if each in cheats):
            shutil.copy(HERE / "alone.py", f"{folder}/{name}.py")
            paths.append(f"{folder}/{name}.py:{name}")
        file = Path(folder, "rows.jsonl")
        kernels = ",".join((*NEIGHBOURS[:2], *paths[:1], *NEIGHBOURS[2:], *paths[1:]))
        environment = {
            "OMP_NUM_THREADS": "1",
            "CHEATS_NEIGHBOURS": ",".join(NEIGHBOURS),
            "PYTHONPATH": f"{HERE.parents[2]}:{HERE}",
        }
        command = [sys.executable, "-m", "replay", "random", *CALL, *OPTIONS]
        command += ["--kernels", kernels, "--json", str(file)]
        subprocess.run(command, env={**os.environ, **environment}, timeout=SECONDS)
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {
        name: [row for row in rows if row["kernel"].rpartition(":")[2] == name.rpartition(":")[2]]
        for name in (*cheats, *NEIGHBOURS)
    }


def fooled(cheat: str, found: Rows) -> str:
    """Return how a cheat fooled the replay; empty if it did not."""
    for name in NEIGHBOURS:
        facts = [(row["status"], row["changed_inputs"]) for row in found[name]]
        if facts != [("ok", [])]:
            return f"rows of {name}: {facts}"
    if len(rows := found[cheat]) != 1:
        return f"{len(rows)} rows"
    # A speed-up of an `ok` row comes from its blocks; without one, no kernel is compared with it.
    speedup = rows[0]["status"] == "ok" and rows[0]["speedup"]
    low = speedup and speedup["low"]
    return f"a speed-up of {low} or more" if low and low > TOO_MUCH else ""


def main() -> None:
    for cheat in sys.argv[1:] or [*names("outputs"), *names("alone")]:
        found = replay(cheat)
        rows = [(row["status"], row["reason"][:60], row["flags"]) for row in found[cheat]]
        print(f"{cheat}: {fooled(cheat, found) or 'not fooled'} {rows}", flush=True)


if __name__ == "__main__":
    main()
