"""`replay verify` measures changes of pictures and texts of the built-in models."""

import json
from pathlib import Path
from typing import Any

import pytest

import attention_replay as ar
from capture.cli.main import main as capture
from replay.cli.main import main
from tests.in_this_process import exit_code

from .conftest import KERNELS

pytestmark = pytest.mark.slow


def checked(place: Path, model: str, kernels: str, few: str, *options: str) -> list[dict[str, Any]]:
    """Return the results of `replay verify`: the model's own, then each kernel's."""
    (place / "kernels.py").write_text(KERNELS)
    recorded, told = str(place / "recorded"), place / "told.jsonl"
    arguments = ["--model", model, "--size", "tiny", *few.split(), "--device", "cpu"]
    assert exit_code(capture, *arguments, "--out", recorded) == 0
    names = [f"{place}/kernels.py:{name}" for name in kernels.split(",")]
    here = {"workers": False, "device": "cpu", "rounds": 3, "progress": False}
    rows = ar.replay(recorded, kernels=names, for_model=True, **here)
    rows.write(place / "rows.jsonl")
    files = ["--checks", str(told), "--rows", str(place / "rows.jsonl")]
    command = ["verify", "--dir", recorded, "--kernels", ",".join(names), *files, "--device", "cpu"]
    assert exit_code(main, *command, "--model-rounds", "1", *options) == 0
    own, wrong, *others = (json.loads(line) for line in told.read_text().splitlines())
    assert own["weights"].startswith("built-in, trained")
    assert wrong["status"] == "ok"
    assert (wrong["hits"], wrong["fallbacks"]) == (own["own_calls"], {})
    assert wrong["measured"]["run"]["speedup"]["ratio"] > 0
    # An error of 0.1 % is far too large for float32, and a wrong kernel gets no prediction.
    assert wrong["prediction"]["run"]["reason"].startswith("inaccurate")
    return [own, wrong, *others]


def test_picture_survives_a_slight_error(tmp_path: Path) -> None:
    few = "--steps 1 --max 2"
    shown = ("--save-output", str(tmp_path / "shown"))
    drift = checked(tmp_path, "flux", "wrong", few, *shown)[1]["drift"]
    assert drift["frames"] == 1
    assert 30 < drift["psnr"] < 90
    assert 0.9 < drift["ssim"] < 1
    assert 0 < drift["relative_l1"] < 0.05
    assert drift["black_frames"] == drift["nan_count"] == 0
    assert len(list((tmp_path / "shown").rglob("*.png"))) >= 2


def test_text_survives_a_slight_error_but_no_spoilt_cache(tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text("def add(left: int, right: int) -> int:\n    return left + right\n" * 4)
    kernels = "wrong,overwrites_cache,spares_cache"
    _, wrong, spoils, spares = checked(tmp_path, "llama", kernels, "--max 4", "--text", str(text))
    drift = wrong["drift"]
    assert 0 < drift["kl"] < 0.01
    assert drift["top1_agreement"] > 0.9
    assert drift["perplexity"] == pytest.approx(drift["baseline_perplexity"], rel=0.01)
    assert drift["perplexity"] != drift["baseline_perplexity"]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {row["status"] for row in rows if row["kernel"].endswith("_cache")} == {"ok"}
    assert spoils["changed_inputs"] == ["key"]
    assert spoils["drift"]["generated_kl"] > 0.1
    assert spoils["drift"]["first_diverging_token"] is not None
    assert spares["changed_inputs"] == []
    assert spares["drift"]["generated_kl"] < 1e-6
    assert spares["drift"]["first_diverging_token"] is None
