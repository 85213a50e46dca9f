"""Every torch kernel on calls recorded from full-size models with random weights (a GPU's work).

    python -m benchmarks.full_size [--kernels all] [--models cogvideo,flux,llama]

Captures CogVideoX-2b (17,776 tokens), FLUX.1-dev (1024²) and Llama-2-7b (4096-token prefill and
decode) as their pipelines call attention, four calls each, and replays them. Writes
`benchmarks/results/full_size.csv`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--kernels", default="all")
    parser.add_argument("--models", default="cogvideo,flux,llama")
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "full_size.csv")
    parser.add_argument("--max-seconds", default="2", help="sampling time of a kernel on a call")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        recorded, rows = Path(scratch) / "captured", Path(scratch) / "rows.jsonl"
        for model in arguments.models.split(","):
            run(
                "capture",
                "--model",
                model,
                "--size",
                "full",
                "--weights",
                "random",
                "--steps",
                "3",
                "--max",
                "4",
                "--out",
                str(recorded),
            )
        run(
            "replay",
            "--dir",
            str(recorded),
            "--metric",
            "all",
            "--json",
            str(rows),
            "--kernels",
            arguments.kernels,
            "--max-seconds",
            arguments.max_seconds,
        )
        results.write(results.read_jsonl(rows), arguments.out)


def run(module: str, *arguments: str) -> None:
    print("$", module, *arguments, flush=True)
    subprocess.run([sys.executable, "-m", module, *arguments], check=True)


if __name__ == "__main__":
    main()
