"""The model card and its figures show the measured values."""

from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file

from benchmarks.training import card, figures


def test_rates_are_percentages_and_missing_parts_are_empty() -> None:
    table = card.rates_table({"drawn": {"colours": 0.876, "all": 0.5}, "chance": {"colours": 0.0}})
    assert table.splitlines() == [
        "|  | colours | all |",
        "| --- | --- | --- |",
        "| drawn | 88 % | 50 % |",
        "| chance | 0 % |  |",
    ]


def test_sizes_count_parameters_and_all_bytes(tmp_path: Path) -> None:
    (tmp_path / "vae").mkdir()
    weights = {"a": torch.zeros(300, 1000), "b": torch.zeros(50_000)}
    save_file(
        {name: value.bfloat16() for name, value in weights.items()},
        tmp_path / "vae" / "w.safetensors",
    )
    (tmp_path / "config.json").write_bytes(b"x" * 400_000)
    lines = card.sizes(tmp_path).splitlines()
    assert lines[2] == "| vae | 0.35 million | 0.70 MB |"
    assert lines[3] == "| everything in this directory |  | 1.10 MB |"


def test_loss_curve_is_drawn_of_a_single_point_and_of_none_too(tmp_path: Path) -> None:
    curves = {"training": [(1, 8.0), (10, 4.0)], "one": [(1, 2.0)], "none": []}
    figures.loss_curve(tmp_path / "loss.png", curves, "a title")
    width, height = Image.open(tmp_path / "loss.png").size
    assert width > 640
    assert height > 300


def test_contact_sheet_places_pictures_in_order(tmp_path: Path) -> None:
    red, green, blue = (torch.eye(3)[index][:, None, None].expand(3, 16, 24) for index in range(3))
    path = tmp_path / "sheet.png"
    figures.contact_sheet(
        path, [[red, green], [blue, red], [green, blue]], ["a", "b", "c"], columns=2
    )
    sheet = Image.open(path).convert("RGB")
    assert sheet.size == (2 * (2 * 24 + 6), 2 * (16 + 22))
    centres = {"first": (12, 8), "its second": (36, 8), "beside": (66, 8), "below": (12, 46)}
    seen = {name: sheet.getpixel(place) for name, place in centres.items()}
    assert seen == {
        "first": (255, 0, 0),
        "its second": (0, 255, 0),
        "beside": (0, 0, 255),
        "below": (0, 255, 0),
    }
