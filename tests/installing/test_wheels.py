"""Contents and requirements of the two wheels."""

import shutil
import subprocess
import sys
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, zipfile.ZipFile]:
    """Both wheels by the name of their distribution, built from a copy of the checkout."""
    copy, built = tmp_path_factory.mktemp("checkout") / "copy", tmp_path_factory.mktemp("built")
    names = ("attention_kernels", "attention_replay", "capture", "models", "replay")
    left_out = shutil.ignore_patterns("__pycache__", "build", "*.egg-info", "*.safetensors")
    for name in names:
        shutil.copytree(REPOSITORY / name, copy / name, ignore=left_out)
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, copy)
    for source in (copy, copy / "attention_kernels"):
        command = [sys.executable, "-c", BUILD, str(built)]
        subprocess.run(command, cwd=source, check=True, capture_output=True)
    return {path.name.partition("-")[0]: zipfile.ZipFile(path) for path in built.glob("*.whl")}


def code(wheel: zipfile.ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if ".dist-info/" not in name}


def test_wheel_of_replay_has_its_four_packages(wheels: dict[str, zipfile.ZipFile]) -> None:
    replay = code(wheels["attention_replay"])
    tops = {name.partition("/")[0] for name in replay}
    assert tops == {"attention_replay", "capture", "models", "replay"}
    for name in ("attention_replay/py.typed", "replay/cli/main.py", "capture/cli/main.py"):
        assert name in replay


def test_wheel_of_kernels_has_every_file_of_its_folder(wheels: dict[str, zipfile.ZipFile]) -> None:
    folder = REPOSITORY / "attention_kernels"
    files = [path for path in folder.rglob("*.py") if "build" not in path.parts]
    expected = {str(path.relative_to(REPOSITORY)) for path in files}
    assert code(wheels["attention_kernels"]) == expected | {"attention_kernels/py.typed"}


def test_wheels_do_not_require_each_other(wheels: dict[str, zipfile.ZipFile]) -> None:
    required = {}
    for name, wheel in wheels.items():
        (path,) = (each for each in wheel.namelist() if each.endswith("/METADATA"))
        required[name] = BytesParser().parsebytes(wheel.read(path)).get_all("Requires-Dist")
    assert not any("attention-kernels" in each for each in required["attention_replay"])
    assert [each.partition(">")[0] for each in required["attention_kernels"]] == ["torch", "triton"]


def test_both_wheels_have_one_licence() -> None:
    ours = (REPOSITORY / "attention_kernels" / "LICENSE").read_bytes()
    assert ours == (REPOSITORY / "LICENSE").read_bytes()
