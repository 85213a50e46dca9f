"""The command line shared by the three scripts."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from benchmarks.training.loop import Stage

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Options:
    """Where to write, what to run on, and for how long.

    ``smoke`` runs everything on small data for a few steps; ``seconds`` is divided among the stages
    in proportion to their own limits.
    """

    out: Path
    work: Path
    seed: int
    device: torch.device
    smoke: bool
    seconds: float | None
    compile: bool
    library: Path | None

    def limited(self, stages: list[Stage]) -> list[Stage]:
        if self.seconds is None:
            return stages
        share = self.seconds / sum(stage.seconds for stage in stages)
        return [replace(stage, seconds=stage.seconds * share) for stage in stages]


def parse(name: str, description: str | None, arguments: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.training.{name}", description=description
    )
    parser.add_argument("--out", type=Path, help="for weights and card (default models/pretrained)")
    parser.add_argument("--work", type=Path, help="for checkpoints, to resume a stopped run")
    parser.add_argument("--restart", action="store_true", help="delete the checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, help="training time of all stages together")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--library", type=Path, help="another Python's lib/python3.x (llama)")
    parser.add_argument("--smoke", action="store_true", help="a few steps on small data")
    given = parser.parse_args(arguments)
    runs = ROOT / "benchmarks" / "training" / "runs"
    work = given.work or runs / (f"{name}-smoke" if given.smoke else name)
    # The output of a smoke run must not pass for real weights.
    out = given.out or (work / "weights" if given.smoke else ROOT / "models" / "pretrained" / name)
    if given.restart:
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(given.seed)
    for library in (diffusers_logging, transformers_logging):
        library.disable_progress_bar()  # ours is the only one
        library.set_verbosity_error()
    return Options(
        out=out,
        work=work,
        seed=given.seed,
        device=torch.device(given.device),
        smoke=given.smoke,
        seconds=given.seconds,
        compile=given.compile,
        library=given.library,
    )
