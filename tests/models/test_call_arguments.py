"""`--set NAME=VALUE` reaches the pipeline or `generate`, and mistakes are named."""

from pathlib import Path
from typing import Any

import pytest
import torch

import models
from capture import load
from capture.cli.main import main
from models.call_arguments import for_call, for_generate
from models.errors import ModelError
from tests.in_this_process import runner


def call(
    prompt: str | list[str],
    height: int | None = None,
    scale: float = 5.0,
    sizes: list[int] | None = None,
    negative: str | None = None,
    flag: bool = False,
    latents: torch.Tensor | None = None,
    anything: Any = None,
) -> None: ...


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("height", "256", 256),
        ("height", "null", None),
        ("scale", "3", 3.0),
        ("sizes", "[1, 2]", [1, 2]),
        ("negative", "256", "256"),
        ("flag", "True", True),
        ("anything", '{"a": 1}', {"a": 1}),
        ("anything", "text", "text"),
    ],
)
def test_value_has_the_type_of_the_parameter(name: str, text: str, value: object) -> None:
    found = for_call({name: text}, call, "model")
    assert found == {name: value}
    assert type(found[name]) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("hieght", "1", "takes no argument hieght: did you mean height?"),
        ("height", "1.5", "--set height='1.5' must be int or null"),
        ("flag", "1", "--set flag='1' must be true or false"),
        ("latents", "[1]", "latents cannot be given as text"),
        ("num_inference_steps", "3", "use --steps instead of --set num_inference_steps"),
    ],
)
def test_mistake_is_named(name: str, text: str, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        for_call({name: text}, call, "model")
    assert message in str(caught.value)


def test_command_sets_the_size(
    cogvideo_directory: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    size = ["--set", "height=64", "--set", "width=64", "--set", "num_frames=5"]
    options = ["--steps", "1", "--max", "1", "--device", "cpu", "--out", str(tmp_path / "d")]
    run_cli = runner(main, capsys)
    code, _, errors = run_cli("--model", str(cogvideo_directory), *options, *size)
    assert (code, "5 frames of 64×64 pixels, 1 step, float32 on cpu" in errors) == (0, True)
    [recorded], [capture] = load(tmp_path / "d"), load(tmp_path / "d").captures
    assert recorded.shape.q_len < 9 * 12 * 16 // 4
    given = capture.settings["given"]["arguments"]
    assert given == {"height": "64", "width": "64", "num_frames": "5"}


def test_arguments_of_generate_are_those_of_its_configuration(llama_directory: Path) -> None:
    loaded = models.load(str(llama_directory), steps=1, device="cpu", arguments={"num_beams": "2"})
    assert loaded.run().beam_indices is not None
    with pytest.raises(ModelError, match=r"no argument num_beam: did you mean num_beams\?"):
        for_generate({"num_beam": "2"}, "llama")
    with pytest.raises(ModelError, match=r"--set has no effect on own\.py:build"):
        models.load("own.py:build", arguments={"height": "2"})
