"""Outputs are written to files, whatever the names of model and kernel."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from replay.end_to_end.saved_outputs import keep, safe_name


def levels(path: Path) -> Tensor:
    return torch.from_numpy(np.array(Image.open(path)))


def test_images_come_back_as_they_were(tmp_path: Path) -> None:
    images = torch.randint(256, (2, 3, 5, 7)).div(255)
    files = keep({"images": images, "latents": images}, tmp_path, model="flux", kernel="fa2")
    assert files == [tmp_path / "flux" / "fa2" / f"image-00{index}.png" for index in range(2)]
    for file, image in zip(files, images, strict=True):
        assert torch.equal(levels(file), (image * 255).round().byte().permute(1, 2, 0))


def test_values_outside_a_picture_are_clamped(tmp_path: Path) -> None:
    image = torch.tensor([float("nan"), -1.0, 2.0, 0.5], dtype=torch.bfloat16)
    (file,) = keep({"images": image.view(1, 1, 2, 2)}, tmp_path, model="m", kernel="k")
    assert levels(file).flatten().tolist() == [0, 0, 255, 128]


def test_frames_and_a_moving_picture(tmp_path: Path) -> None:
    frames = torch.rand(4, 3, 16, 16)
    *stills, moving = keep({"frames": frames}, tmp_path, model="cogvideo", kernel="sage1")
    assert [still.name for still in stills] == [f"frame-00{index}.png" for index in range(4)]
    assert moving.name == "video.webp"
    with Image.open(moving) as video:
        assert video.n_frames == 4  # type: ignore[attr-defined]
        assert video.size == (16, 16)


def test_texts_with_and_without_a_tokenizer(tmp_path: Path) -> None:
    outputs = {"sequences": torch.tensor([[104, 105]]), "logits": torch.zeros(1, 200)}
    (file,) = keep(outputs, tmp_path, model="llama", kernel="default")
    assert file == tmp_path / "llama" / "default" / "text.txt"
    assert file.read_text() == "104 105\n"
    keep(
        outputs,
        tmp_path,
        model="llama",
        kernel="default",
        decode=lambda ids: "".join(map(chr, ids[0].tolist())),
    )
    assert file.read_text() == "hi\n"


def test_names_stay_inside_the_directory_and_apart(tmp_path: Path) -> None:
    for plain in ("torch-flash", "llama-3.1-8b", "sage1@mine", "fa2_tuned"):
        assert safe_name(plain) == plain
    names = [
        "mine/attention.py:fast",
        "mine-attention.py-fast",
        "mine/attention.py/fast",
        "../../etc",
        "..",
        "/",
        "",
        "hub:org/name",
        "C:\\attention.py:fast",
        "模型" * 100,
        "x" * 400,
        "y/" + "x" * 400,
    ]
    safe = [safe_name(name) for name in names]
    assert len({*safe}) == len(names)
    for name in safe:
        assert len(name) <= 110
        (tmp_path / name).mkdir()
    assert len(list(tmp_path.iterdir())) == len(names)
    assert safe[0].startswith("mine-attention.py-fast-")
    assert safe_name(names[0]) == safe[0]
