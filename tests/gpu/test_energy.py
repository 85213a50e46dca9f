"""The GPU's own counter measures the energy of back-to-back calls."""

from pathlib import Path

import pytest

from tests.gpu.replayed_rows import replayed_rows


def test_energy_is_power_times_time_and_the_block_is_judged(tmp_path: Path) -> None:
    shape = ["random", "-b", "1", "-hq", "24", "-sq", "4608", "-d", "128"]
    kernels = "torch-default,torch-flash"
    options = ["--kernels", kernels, "--metric", "energy"]
    found = replayed_rows(tmp_path, *shape, *options)
    assert [row["status"] for row in found] == ["ok", "ok"]
    if any("no energy" in flag for row in found for flag in row["flags"]):
        pytest.skip(str(found[0]["flags"]))
    for row in found:
        energy = row["energy"]
        assert energy["seconds"] > 0
        assert 20 < energy["power_w"] < 2000
        flop = 4 * 24 * 4608**2 * 128
        assert energy["tflops_per_w"] == pytest.approx(flop / energy["mj"] / 1e9, rel=1e-3)
        # Other programs on the GPU change times, but not 1,000 times, as a wrong unit would.
        ratio = energy["mj"] / energy["power_w"] / row["time_ms"]["p50"]
        assert 0.05 < ratio < 20
