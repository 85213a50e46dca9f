"""On a GPU, capture the built-in models, verify the recordings, and replay every torch kernel."""

from pathlib import Path

import pytest
import torch

import attention_replay as ar
import capture.cli.main
from capture import load
from tests.gpu.replayed_rows import replayed_rows


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("diffusers", reason="two of the models need diffusers")
    out = tmp_path_factory.mktemp("captured")
    for model in ("cogvideo", "flux", "llama"):
        arguments = ["--model", model, "--size", "tiny", "--max", "2", "--out", str(out)]
        run_capture(arguments)
    return out


def run_capture(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        capture.cli.main.main(arguments)
    assert exit_.value.code == 0


def test_bfloat16_is_recorded_on_the_gpu_and_reproduced(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = load(recorded)
    assert len(dataset) == 6
    assert {entry.header.dtype for entry in dataset.entries} == {"bfloat16"}
    assert all(entry.origin.device.startswith("cuda (") for entry in dataset.entries)
    run_capture(["check", str(recorded)])
    assert "6 of 6 files passed" in capsys.readouterr().out


def test_every_eager_torch_kernel_is_replayed(recorded: Path, tmp_path: Path) -> None:
    # Installed libraries are left out, because some compile for minutes.
    kernels = "torch-default,torch-math,torch-flash,torch-efficient,torch-cudnn,flex"
    arguments = ["--dir", str(recorded), "--rounds", "5", "--kernels", kernels]
    rows = replayed_rows(tmp_path, *arguments)
    ran = {row["kernel"] for row in rows if row["status"] == "ok"}
    assert {"torch-math", "torch-flash", "torch-cudnn", "torch-default", "flex"} <= ran
    bad = [(row["kernel"], row["reason"]) for row in rows if row["status"] == "inaccurate"]
    assert not bad
    assert {row["process"] for row in rows} == {""}  # no kernel disturbs the others
    timed = [row for row in rows if row["status"] == "ok"]
    assert all(row["peak_bytes"] > 0 and row["host_ms"] > 0 for row in timed)


def test_compiled_kernels_run_the_backend_they_name(tmp_path: Path) -> None:
    query, key, value = (torch.randn(1, 8, 512, 64, dtype=torch.bfloat16) for _ in range(3))
    kernels = "torch-flash,torch-flash-compiled,torch-flash-autotuned,torch-cudnn-compiled"
    outputs = tmp_path / "outputs"
    call = ar.AttentionCall(query, key, value)
    ar.replay([call], kernels=kernels, rounds=5, save_output=outputs)
    from safetensors.torch import load_file

    saved = {path.stem: load_file(path)["output"] for path in outputs.rglob("*.safetensors")}
    assert torch.equal(saved["torch-flash"], saved["torch-flash-compiled"])
    assert torch.equal(saved["torch-flash"], saved["torch-flash-autotuned"])
    assert not torch.equal(saved["torch-flash"], saved["torch-cudnn-compiled"])


def test_unwritten_output_is_found() -> None:
    from replay.bench.runner import replay_here as run
    from replay.bench.settings import Settings
    from replay.kernels import registry
    from replay.workloads.random_calls import Spec
    from replay.workloads.workload import random_workloads

    @registry.register_kernel("lazy")
    def lazy(query, key, value, *args, **kwargs):  # type: ignore[no-untyped-def]
        return torch.empty_like(query)

    try:
        spec = Spec(2, 8, 8, 1024, 1024, 64, 64)
        device = torch.device("cuda")
        settings = Settings(device, "cold", rounds=3)
        kernels = [registry.catalogue()["lazy"]]
        rows = list(run(random_workloads("random", [spec], 0), kernels, settings))
    finally:
        registry._kernels.pop("lazy")
    row = next(row for row in rows if row.kernel == "lazy")
    assert row.status == "inaccurate"
    assert row.speedup is None
