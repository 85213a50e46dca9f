"""Names and versions of the installed commands, and their messages about missing packages."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import attention_replay
import models
from attention_replay import commands
from capture.cli.main import main as capture_main
from models import libraries
from replay.cli.random import parser as random_parser
from tests.capture.cli.test_main import USER_MODEL

REPOSITORY = Path(__file__).resolve().parents[2]

LIBRARIES = ("diffusers", "transformers", "accelerate", "huggingface_hub", "rich", "PIL")

WITHOUT = """
import importlib.metadata, sys

missing = set(sys.argv.pop(1).split(","))

class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing)
installed = importlib.metadata.version

def version(package):
    if package in missing:
        raise importlib.metadata.PackageNotFoundError(package)
    return installed(package)

importlib.metadata.version = version
"""
"""Beginning of a program that runs in an environment without some packages."""


def start(
    code: str, *arguments: str, path: Path | None = None, cwd: str | Path = "/", bare: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a program that can import `path` and this project; `bare` hides installed packages."""
    paths = [str(each) for each in (path, REPOSITORY) if each is not None]
    return subprocess.run(
        [sys.executable, *["-S"] * bare, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=cwd,
        check=False,
    )


@pytest.mark.parametrize("command", ["capture", "replay"])
def test_version_lists_the_versions_that_affect_figures(command: str) -> None:
    done = start(
        "import sys\nfrom attention_replay import commands\n"
        f"try:\n    commands.{command}()\n"
        "finally:\n    assert 'torch' not in sys.modules\n",
        "--version",
    )
    assert (done.returncode, done.stderr) == (0, "")
    torch = re.escape(importlib.metadata.version("torch"))
    assert re.fullmatch(
        rf"attention-replay {attention_replay.__version__} · torch {torch} · "
        r"triton (not installed|[\d.]+) · Python [\d.]+\n",
        done.stdout,
    )


@pytest.mark.parametrize(("made", "name"), [("replay.py", "replay"), ("capture", "capture")])
def test_file_that_hides_a_package_is_named(tmp_path: Path, made: str, name: str) -> None:
    path = tmp_path / made
    if path.suffix:
        path.write_text("print('mine')\n")
    else:
        path.mkdir()
        (path / "__init__.py").write_text("print('mine')\n")
    done = start("from attention_replay.commands import replay; replay()", "--help", path=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert str(path) in done.stderr
    assert f"hides the package '{name}' of attention-replay: rename it" in done.stderr


@pytest.mark.parametrize("command", ["capture", "replay"])
def test_ctrl_c_during_the_import(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    with pytest.raises(SystemExit) as stopped:
        getattr(commands, command)()
    assert stopped.value.code == 130
    assert capsys.readouterr().err == f"{command}: interrupted\n"


def test_another_package_of_the_same_name_is_named(tmp_path: Path) -> None:
    """Installing another package into the same directory overwrites our files."""
    shutil.copytree(REPOSITORY / "attention_replay", tmp_path / "attention_replay")
    for package in ("capture", "replay"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    record = tmp_path / "rival-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 1.0\n")
    (record / "top_level.txt").write_text("replay\n")
    done = start("from attention_replay.commands import replay; replay()", path=tmp_path, bare=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "rival, installed in the same environment, overwrote the package 'replay'" in done.stderr


@pytest.mark.slow
def test_recording_needs_torch_and_safetensors_alone(tmp_path: Path) -> None:
    code = f"""{WITHOUT}
import sys
import torch
from capture import load, record
from replay import use_kernel
print("torch._dynamo" in sys.modules)  # a second for programs that read recordings

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)

model, x = Model(), torch.randn(1, 2, 8, 16)
with record(model, out="out"):
    model(x)
print(len(load("out")))
with use_kernel("torch-math") as swap, torch.no_grad():
    model(x)
print(swap.hits)
"""
    done = start(code, ",".join(LIBRARIES), cwd=tmp_path)
    assert done.stdout.split() == ["False", "1", "1"], done.stderr


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        (
            "transformers",
            "capture: llama needs transformers, which is not installed: "
            "pip install 'transformers>=5.0'",
        ),
        pytest.param(
            "rich",
            "capture: rich is required but not installed: pip install rich",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_missing_library_is_one_sentence(tmp_path: Path, missing: str, sentence: str) -> None:
    code = f"{WITHOUT}\nfrom attention_replay.commands import capture\ncapture()\n"
    done = start(code, missing, "--model", "llama", "--size", "tiny", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip() == sentence


def test_missing_module_of_ours_is_not_a_missing_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(arguments: object, begun: object) -> int:
        raise ModuleNotFoundError("No module named 'capture.gone'", name="capture.gone")

    monkeypatch.setattr("capture.cli.record_command._record", broken)
    with pytest.raises(SystemExit, match="1"):
        capture_main(["--model", "llama"])
    assert "failed with ModuleNotFoundError" in capsys.readouterr().err


@pytest.mark.slow
def test_an_own_function_needs_neither_diffusers_nor_transformers(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(USER_MODEL)
    code = f"{WITHOUT}\nfrom attention_replay.commands import capture\ncapture()\n"
    done = start(code, "diffusers,transformers", "--model", "my.py:build", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("recorded 4 of 4")


@pytest.mark.parametrize(
    ("model", "library", "installed", "wanted"),
    [
        ("llama", "transformers", "4.57.6", "5.0"),
        ("flux", "transformers", "4.51.3", "5.0"),
        ("cogvideo-5b", "diffusers", "0.35.2", "0.36"),
    ],
)
def test_a_library_too_old_for_a_built_in_model(
    monkeypatch: pytest.MonkeyPatch, model: str, library: str, installed: str, wanted: str
) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: installed if name == library else real(name)
    )
    with pytest.raises(models.ModelError) as refused:
        models.load(model, size="tiny")
    said = f"{model} needs {library} {wanted} or newer, but {installed} is installed: upgrade it"
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("library", "version", "keyword"),
    [
        ("transformers", "4.51.3", "torch_dtype"),
        ("transformers", "4.56.0", "dtype"),
        ("transformers", "5.0.0rc1", "dtype"),
        ("diffusers", "0.39.0", "torch_dtype"),
        ("diffusers", "0.40.0.dev0", "dtype"),
    ],
)
def test_dtype_argument_of_from_pretrained(
    monkeypatch: pytest.MonkeyPatch, library: libraries.Library, version: str, keyword: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert libraries.dtype_keyword(library) == keyword


def test_short_dtypes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        "capture.cli.record_command._record",
        lambda arguments, begun: seen.append(arguments.dtype) or 0,
    )
    for short, dtype in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")):
        assert random_parser().parse_args(["--dtype", short]).dtype == dtype
        with pytest.raises(SystemExit):
            capture_main(["--model", "llama", "--dtype", short])
        assert seen.pop() == dtype
    with pytest.raises(SystemExit, match="2"):
        capture_main(["--model", "llama", "--dtype", "int8"])
    assert "choose from" in capsys.readouterr().err
