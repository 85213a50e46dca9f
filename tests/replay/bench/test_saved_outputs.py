"""`--save-output` writes one file for each kernel into the given directory."""

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from replay.bench.output_check import OutputNotSaved
from tests.factories import random_call
from tests.replay.bench.small_kernels import Register, Replayed, sdpa


def test_outputs_are_saved(replayed: Replayed, kernels: Register, tmp_path: Path) -> None:
    call = random_call(dtype=torch.bfloat16)
    transposed = kernels("mine", lambda **a: sdpa(**a).transpose(1, 2).contiguous().transpose(1, 2))
    replayed(call, transposed, save_output=tmp_path)
    saved = load_file(tmp_path / "call" / "mine.safetensors")["output"]
    assert torch.equal(saved, sdpa(**call.arguments()))
    assert (tmp_path / "call" / "torch-default.safetensors").is_file()


@pytest.mark.parametrize(
    "name", ["../../up", "a/b.py:f", "x" * 300, "/etc/x", "[red]", "=1+1", ".."]
)
def test_output_file_stays_in_the_folder_for_any_kernel_name(
    replayed: Replayed, kernels: Register, tmp_path: Path, name: str
) -> None:
    kept = tmp_path / "in" / "kept"
    replayed(random_call(), kernels(name, sdpa), save_output=kept)
    assert len(list(kept.glob("call/*"))) == 2
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 2


def test_unwritable_folder_ends_the_replay(replayed: Replayed, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        replayed(random_call(), save_output=tmp_path / "file")


def test_output_that_has_no_room_leaves_no_file(
    replayed: Replayed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("replay.bench.output_check.save_file", fail)
    with pytest.raises(OutputNotSaved, match=r"^cannot write .*No space left .*: make room$"):
        replayed(random_call(), save_output=tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))
