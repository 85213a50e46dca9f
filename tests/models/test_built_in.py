"""A model is one file in `models/built_in/`; a new model needs no other change."""

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import models
from capture.cli.main import main as capture
from models.built_in import families, llama

NEW_FILE = '''
"""A family of one linear layer."""

NAMES = {"linear": "One linear layer", "linear-wide": "A wider one"}
NEEDS = {"transformers": (4, 0)}


def build(request):
    from torch import nn, ones

    from ..outputs import of_anything
    from ..runnable import Runnable

    width = 8 if request.name == "linear-wide" else 4
    layer = nn.Linear(width, 1)
    return Runnable(
        name=request.name,
        roots={"": layer},
        run=lambda: layer(ones(2, width)),
        outputs=of_anything,
        weights="random",
        settings=request.settings(),
    )
'''


@pytest.fixture
def copy_with_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Copy of our package under another name, with one additional file."""
    folder = tmp_path / "copy_of_models"
    shutil.copytree(
        Path(models.__file__).parent,
        folder,
        ignore=shutil.ignore_patterns("pretrained", "__pycache__"),
    )
    (folder / "built_in" / "layers.py").write_text(NEW_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("copy_of_models")
    for name in [name for name in sys.modules if name.startswith("copy_of_models")]:
        del sys.modules[name]


def test_a_new_model_is_one_new_file(copy_with_a_file: ModuleType) -> None:
    ours = copy_with_a_file
    assert ours.NAMES == {
        **models.NAMES,
        "linear": "One linear layer",
        "linear-wide": "A wider one",
    }
    runnable = ours.load("linear-wide", device="cpu")
    assert isinstance(runnable, ours.Runnable)
    assert runnable.outputs(runnable.run()).tensors["output"].shape == (2, 1)
    assert runnable.settings["weights"] == "random"
    with pytest.raises(ours.ModelError, match="did you mean linear"):
        ours.load("lineal", device="cpu")


def test_declared_versions(copy_with_a_file: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = importlib.import_module("copy_of_models.built_in.layers")
    monkeypatch.setattr(layers, "NEEDS", {"transformers": (99, 0)})
    with pytest.raises(copy_with_a_file.ModelError, match=r"linear needs transformers 99\.0 or"):
        copy_with_a_file.load("linear", device="cpu")


def test_no_two_files_declare_a_name() -> None:
    files = dict.fromkeys(families().values())
    assert sum(len(family.NAMES) for family in files) == len(models.NAMES)


def test_help_and_the_page_name_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        capture(["--help"])
    without_line_breaks = "".join(capsys.readouterr().out.split())
    assert ",".join(models.NAMES) in without_line_breaks
    page = Path(models.__file__).parents[1] / "docs" / "recording.md"
    names = ", ".join(f"`{name}`" for name in models.NAMES)
    assert names in page.read_text(encoding="utf-8")


def let_llama_raise(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(_: object) -> None:
        raise error

    monkeypatch.setattr(llama, "build", build)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ModuleNotFoundError("No module named 'PIL'", name="PIL"), "pip install pillow"),
        (ImportError("cannot import name 'Gone'"), "cannot be imported together here"),
        (
            RuntimeError("Failed to import diffusers.models because of"),
            "install versions released at the same time",
        ),
    ],
)
def test_failed_import(monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str) -> None:
    let_llama_raise(error, monkeypatch)
    with pytest.raises(models.ModelError, match=sentence):
        models.load("llama", size="tiny", device="cpu")


def test_other_error_of_a_builder_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    let_llama_raise(RuntimeError("CUDA out of memory"), monkeypatch)
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        models.load("llama", size="tiny", device="cpu")
