"""Replays calls of full-size models with random weights through every kernel (needs a GPU).

    python -m benchmarks.full_size [--kernels all] [--models cogvideo,flux] [--env NAME=PYTHON]

Captures CogVideoX-2b (17,776 tokens), FLUX.1-dev (1024²) and Llama-2-7b (4096-token prefill and
decode) in their pipelines, four attention calls each, and replays these calls. Writes
`benchmarks/results/full_size.csv`.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import results
from benchmarks.gpu import gpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--kernels", default="all")
    parser.add_argument("--models", default="cogvideo,flux,llama")
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "full_size.csv")
    parser.add_argument("--max-seconds", default="2", help="sampling time per kernel and call")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=PYTHON")
    arguments = parser.parse_args()
    gpu()
    environments = " ".join(f"--env {each}" for each in arguments.env)
    with tempfile.TemporaryDirectory() as scratch:
        recorded, rows = Path(scratch) / "captured", Path(scratch) / "rows.jsonl"
        for model in arguments.models.split(","):
            run(
                f"capture --model {model} --size full --weights random --steps 3 --max 4 "
                f"--out {recorded}"
            )
        run(
            f"replay --dir {recorded} --metric all --json {rows} --kernels {arguments.kernels} "
            f"--max-seconds {arguments.max_seconds} {environments}"
        )
        ran = [row for row in results.read_jsonl(rows) if row["status"] != "unavailable"]
        results.write(ran, arguments.out)


def run(command: str) -> str:
    """Run one of our commands, written as in a shell, and return its output."""
    print("$", command, flush=True)
    words = [sys.executable, "-m", *shlex.split(command)]
    printed = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(printed, flush=True)
    return printed


if __name__ == "__main__":
    main()
