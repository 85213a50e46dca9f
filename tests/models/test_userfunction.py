"""Arguments, results and errors of a user's function, given as ``file.py:function``."""

import sys
from pathlib import Path

import pytest
import torch

import models

TWO_LINES = "import torch\nfrom torch import nn\n"


def write(directory: Path, text: str) -> str:
    file = directory / "mine.py"
    file.write_text(TWO_LINES + text)
    return f"{file}:make"


def test_function_gets_seed_device_and_dtype(tmp_path: Path) -> None:
    model = write(
        tmp_path,
        "def make(seed, device, dtype):\n"
        "    layer = nn.Linear(4, 4, device=device, dtype=dtype)\n"
        "    return layer, lambda: layer(torch.randn(2, 4, device=device, dtype=dtype))\n",
    )
    runnable = models.load(model, device="cpu", seed=3, dtype="bfloat16")
    assert runnable.weights == f"user's own: {model}"
    first, second = runnable.run(), runnable.run()
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, second)
    assert not first.requires_grad
    assert not runnable.roots[""].training


def test_pipeline_may_be_returned(tmp_path: Path) -> None:
    model = write(
        tmp_path,
        "class Pipeline:\n"
        "    components = {'unet': nn.Dropout(), 'scheduler': object()}\n"
        "def make(): return Pipeline(), lambda: 42\n",
    )
    runnable = models.load(model)
    assert [*runnable.roots] == ["unet"]
    assert type(runnable.pipeline).__name__ == "Pipeline"


def test_named_roots_and_late_imports_of_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text("answer = 42\n")
    model = write(
        tmp_path,
        "def make():\n"
        "    def run():\n"
        "        import neighbour_of_mine\n"
        "        return neighbour_of_mine.answer\n"
        "    return {'encoder': nn.Identity(), 'decoder': nn.Identity()}, run\n",
    )
    path = list(sys.path)
    runnable = models.load(model)
    assert list(runnable.roots) == ["encoder", "decoder"]
    assert runnable.run() == 42
    assert sys.path == path


def test_steps_and_prompt_are_passed_only_when_given(tmp_path: Path) -> None:
    model = write(
        tmp_path,
        "def make(steps=11, prompt='default'):\n"
        "    return nn.Identity(), lambda: (steps, prompt)\n",
    )
    assert models.load(model).run() == (11, "default")
    assert models.load(model, steps=2, prompt="a fox").run() == (2, "a fox")
    assert models.load(model).for_prompt is None


def test_run_may_take_a_prompt(tmp_path: Path) -> None:
    model = write(tmp_path, "def make(): return nn.Identity(), lambda prompt: prompt * 2")
    runnable = models.load(model)
    assert runnable.for_prompt is not None
    assert runnable.for_prompt("fox")() == "foxfox"
    with pytest.raises(models.ModelError, match=r"mine.py needs a prompt: .*tune with --prompts"):
        runnable.run()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def other(): ...\ndef _own(): ...", r"has no function 'make': choose from other$"),
        ("def making(): ...", r"has no function 'make': did you mean making\?$"),
        ("make = 3", r"has no function 'make': add it"),
        ("make = ", r"could not be imported: SyntaxError"),
        ("import no_such_package_anywhere", r"could not be imported: ModuleNotFoundError"),
        ("def make(): raise RuntimeError('two\\nlines')", r"make in .* failed: RuntimeError: two$"),
        ("def make(prompt): ...", r"make needs prompt: name a function that returns \(module, r"),
        ("def make(): return {}, print", r"returned \(dict, builtin_function_or_method\)$"),
        ("def make(): return nn.Identity()", r"must return \(module, run\).* returned Identity$"),
        ("def make(): return nn.Identity(), 3", r"returned \(Identity, int\)$"),
        ("def make(): return {'a': 1}, print", r"returned \(dict, builtin_function_or_method\)$"),
        ("raise SystemExit(0)", "mine.py could not be imported: SystemExit: 0"),
        ("def make(): raise SystemExit(0)", "make in .*mine.py failed: SystemExit: 0"),
        ("def make(): return nn.Identity(), exit", "run of make in .*mine.py ended in SystemExit"),
    ],
)
def test_mistakes_are_one_sentence_naming_the_file(tmp_path: Path, text: str, message: str) -> None:
    model = write(tmp_path, text)
    with pytest.raises(models.ModelError, match=message) as caught:
        models.load(model).run()
    assert "mine.py" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_users_exception_is_kept(tmp_path: Path) -> None:
    with pytest.raises(models.ModelError) as caught:
        models.load(write(tmp_path, "1 / 0"))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_options_the_function_does_not_take_are_refused(tmp_path: Path) -> None:
    model = write(tmp_path, "def make(seed): return nn.Identity(), print")
    with pytest.raises(models.ModelError, match="takes no prompt or steps"):
        models.load(model, prompt="a fox", steps=2)
    with pytest.raises(models.ModelError, match="leave out --size and --checkpoint"):
        models.load(model, size="full", checkpoint="org/name")
