"""Draws videos of the trained CogVideoX with tuned sparse attention beside dense attention.

    python -m benchmarks.sparse_pictures [--budgets psnr=35,psnr=25]     (no GPU needed; 10 minutes)

Writes `docs/pictures/sparse_attention.png`. Plans are tuned on the first prompt, with the kernel of
`emulated_block_sparse.py`, and run on two.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import attention_replay as ar
from benchmarks.emulated_block_sparse import EMULATED
from benchmarks.picture import PICTURES
from benchmarks.trained_runs import trained_runs
from benchmarks.training.figures import contact_sheet
from replay.api.tuning_stages import Stages
from replay.distribution.time_limit import TimeLimit
from replay.end_to_end.model_process import OWN
from replay.plan.plan import DENOISE, Plan
from replay.tune.directory import TuningDirectory
from replay.tune.judged_runs import JudgedRuns
from replay.tune.outputs import named_tensors
from replay.tune.quality import parse_quality
from replay.tune.tuning import Tuning

FRAMES = (0, 4, 8)
ROUNDS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--budgets", default="psnr=35,psnr=25")
    parser.add_argument("--out", type=Path, default=PICTURES / "sparse_attention.png")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runnable, runs = trained_runs("cogvideo", 2)
    judged = JudgedRuns(runnable, [runs[0]])
    plans: dict[str, Plan | None] = {"dense attention": None}
    with tempfile.TemporaryDirectory() as scratch:
        files = TuningDirectory(Path(scratch) / "plan.json.tuning", {})
        with files.held():
            for text in arguments.budgets.split(","):
                where = files, OWN, ROUNDS, TimeLimit(None), False
                best = Stages(runnable, parse_quality(text), *where, judged, EMULATED).best()
                if isinstance(best, Tuning):
                    raise SystemExit(best.sentence)
                plans[f"tuned for {text}"] = best.trial.plan
    rows, captions = [], []
    own = [frames(run()) for run in runs]
    for name, plan in plans.items():
        for number, run in enumerate(runs):
            found, caption = own[number], f"prompt {number + 1}, {name}"
            if plan is not None:
                with ar.use_plan(plan, runnable.roots):
                    found = frames(run())
                mse = float((found - own[number]).square().mean())
                psnr = -10 * math.log10(mse)
                caption += f": {share(plan):.0%} of the blocks, PSNR {psnr:.1f} dB"
            rows.append([found[frame] for frame in FRAMES])
            captions.append(caption)
    contact_sheet(arguments.out, rows, captions, columns=len(runs))


def frames(result: object) -> Tensor:
    """Return the frames of a run, (F, 3, H, W) in 0…1."""
    found = named_tensors(result)["frames"]
    return found.reshape(-1, *found.shape[-3:])


def share(plan: Plan) -> float:
    """Return the share of the blocks that a plan visits in the denoiser, from its times."""
    choices = [each for each in plan.choices if each.phase == DENOISE]
    whole = sum(each.calls * (each.baseline_ms or 0.0) for each in choices)
    return 1 - sum(each.saved_ms for each in choices) / whole


if __name__ == "__main__":
    main()
