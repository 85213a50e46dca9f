"""`replay verify` measures changes of videos, pictures and texts of the built-in models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from capture.cli.main import main as capture
from replay.cli.main import main

from .conftest import KERNELS


def checked(model: str, steps: int, place: Path, *options: str) -> dict[str, Any]:
    """Return the result of `replay verify` for a kernel whose output is 0.1 % too large."""
    (place / "kernels.py").write_text(KERNELS)
    recorded, told = str(place / "recorded"), place / "told.jsonl"
    few = ["--size", "tiny", "--steps", str(steps), "--max", "2", "--device", "cpu"]
    with pytest.raises(SystemExit) as stopped:
        capture(["--model", model, *few, "--out", recorded])
    assert stopped.value.code == 0
    kernels = ["--kernels", f"{place}/kernels.py:wrong", "--checks", str(told)]
    quick = ["--device", "cpu", "--rounds", "3", "--model-rounds", "1"]
    with pytest.raises(SystemExit) as stopped:
        main(["verify", "--dir", recorded, *kernels, *quick, *options])
    assert stopped.value.code == 0
    own, wrong = (json.loads(line) for line in told.read_text().splitlines())
    assert own["weights"].startswith("built-in, trained")
    assert wrong["status"] == "ok"
    assert (wrong["hits"], wrong["fallbacks"]) == (own["own_calls"], {})
    assert wrong["measured"]["run"]["speedup"]["ratio"] > 0
    # An error of 0.1 % is far too large for float32, and a wrong kernel gets no prediction.
    assert wrong["prediction"]["run"]["reason"].startswith("inaccurate")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(("model", "frames"), [("cogvideo", 9), ("flux", 1)])
def test_pictures_survive_a_slight_error(tmp_path: Path, model: str, frames: int) -> None:
    drift = checked(model, 1, tmp_path, "--save-output", str(tmp_path / "shown"))["drift"]
    assert drift["frames"] == frames
    assert 30 < drift["psnr"] < 90
    assert 0.9 < drift["ssim"] < 1
    assert 0 < drift["relative_l1"] < 0.05
    assert drift["black_frames"] == drift["nan_count"] == 0
    assert len(list((tmp_path / "shown").rglob("*.png"))) >= 2 * frames


@pytest.mark.slow
def test_a_text_survives_a_slight_error(tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text("def add(left: int, right: int) -> int:\n    return left + right\n" * 4)
    drift = checked("llama", 3, tmp_path, "--text", str(text))["drift"]
    assert 0 < drift["kl"] < 0.01
    assert drift["top1_agreement"] > 0.9
    assert drift["perplexity"] == pytest.approx(drift["baseline_perplexity"], rel=0.01)
    assert drift["perplexity"] != drift["baseline_perplexity"]
    assert drift["generated_tokens"] == 3


@pytest.mark.slow
def test_a_spoilt_cache_shows_in_the_text_alone(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(KERNELS)
    told = tmp_path / "told.jsonl"
    few = ["--size", "tiny", "--max", "4", "--device", "cpu", "--out", str(tmp_path / "recorded")]
    with pytest.raises(SystemExit):
        capture(["--model", "llama", *few])
    names = ",".join(
        f"{tmp_path}/kernels.py:{name}" for name in ("overwrites_cache", "spares_cache")
    )
    quick = ["--device", "cpu", "--rounds", "3", "--model-rounds", "3"]
    rows = tmp_path / "rows.jsonl"
    files = ["--json", str(rows), "--checks", str(told)]
    with pytest.raises(SystemExit) as stopped:
        main(["verify", "--dir", str(tmp_path / "recorded"), "--kernels", names, *quick, *files])
    assert stopped.value.code == 0
    assert {json.loads(line)["status"] for line in rows.read_text().splitlines()} == {"ok"}
    _, spoils, spares = (json.loads(line) for line in told.read_text().splitlines())
    assert spoils["changed_inputs"] == ["key"]
    assert spoils["drift"]["generated_kl"] > 0.1
    assert spoils["drift"]["first_diverging_token"] is not None
    assert spares["changed_inputs"] == []
    assert spares["drift"]["generated_kl"] < 1e-6
    assert spares["drift"]["first_diverging_token"] is None
