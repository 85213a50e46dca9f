"""Users' kernels come from functions in a file, or from packages that offer kernels."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import attention_replay as ar
from replay.bench.runner import IN_PROCESS
from replay.kernels import registry
from replay.kernels.registry import KernelNameError, catalogue, find
from tests.in_this_process import RunCli, refusal

SHAPE = ("random", "-hq", "2", "-sq", "16", "-d", "8", "--dtype", "float32")
QUICK = ("--rounds", "3", "--device", "cpu", "--in-process")

MINE = '''
import torch

def my_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False,
                 *, scale=None, enable_gqa=False):
    """Written out."""
    scores = query @ key.transpose(-1, -2) * (scale or query.shape[-1] ** -0.5)
    return scores.softmax(-1) @ value
'''
PICKY = """
from my_file import my_attention
from replay.kernels.registry import register_kernel

def unsupported(call):
    return "causal calls" if call.is_causal else None

@register_kernel("picky", unsupported=unsupported, accuracy_class="quantised",
                 prepare=lambda call: lambda: my_attention(**call.arguments()))
def attention(query, key, value, **options):
    return my_attention(query, key, value, **options) * 1.02
"""

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture
def run(run_cli: RunCli) -> Callable[..., dict[str, dict[str, Any]]]:
    """Return a function that runs kernels in this process and returns the rows by kernel."""

    def rows(kernels: str, *arguments: str) -> dict[str, dict[str, Any]]:
        options = (*SHAPE, *QUICK, "-q", "--kernels", kernels, "--json", "-")
        code, out, err = run_cli(*options, *arguments)
        assert (code, err.strip()) == (0, "")
        return {row["kernel"]: row for row in map(json.loads, out.splitlines())}

    return rows


Run = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory, which contains `my_file.py` and `picky.py`."""
    (tmp_path / "my_file.py").write_text(MINE)
    (tmp_path / "picky.py").write_text(PICKY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_function_in_a_file_is_replayed(run: Run, folder: Path) -> None:
    absolute = f"{folder}/my_file.py:my_attention"
    rows = run(f"my_file.py:my_attention,{absolute},torch-math")
    assert list(rows) == ["my_file.py:my_attention", absolute, "torch-math", "torch-default"]
    assert all(row["status"] == "ok" for row in rows.values())


def test_a_function_in_this_process_is_not_ranked(run_cli: RunCli, folder: Path) -> None:
    kernels = ("--kernels", "my_file.py:my_attention,torch-math", "--json", "rows.jsonl")
    code, out, _ = run_cli(*SHAPE, *QUICK, *kernels)
    rows = ar.Rows.read("rows.jsonl")
    assert [(row.kernel, row.speedup is None, row.flags) for row in rows] == [
        ("my_file.py:my_attention", True, (IN_PROCESS,)),
        ("torch-math", False, ()),
        ("torch-default", True, ()),
    ]
    reason = "? my_file.py:my_attention: unconfirmed"
    assert (code, reason in out, "unconfirmed" in str(rows)) == (0, True, True)


def test_constraints_of_the_decorator_hold(run: Run, folder: Path) -> None:
    """Constraints work as they do for our own kernels, and a file may import its neighbours."""
    rows = run("picky.py:picky,picky.py:attention,picky.py:p*")
    assert list(rows) == ["picky.py:picky", "picky.py:attention", "torch-default"]
    row = rows["picky.py:picky"]
    assert row["status"] == "ok"  # judged by the rule for quantised kernels
    assert row["core_time_ms"]["n"] == 3
    row = run("picky.py:attention", "--mask", "causal")["picky.py:attention"]
    assert (row["status"], row["reason"]) == ("unsupported", "causal calls")


def test_a_file_that_does_not_exist_ends_the_command(run_cli: RunCli, folder: Path) -> None:
    code, _, err = run_cli(*SHAPE, *QUICK, "--kernels", "no.py:a")
    assert (code, err) == (2, "replay random: no kernel 'no.py:a': there is no file no.py\n")
    none = refusal(run_cli, *SHAPE, *QUICK, "--kernels", "picky.py:no*")
    assert "no kernel 'picky.py:no*': picky.py decorates no function" in none


@pytest.mark.parametrize(
    ("source", "function", "error", "sentence"),
    [
        ("raise RuntimeError('loud')\nattend = print", "attend", RuntimeError, "loud"),
        (
            "if False:\n    nothing = print",
            "nothing",
            KernelNameError,
            "^mine.py has no function 'nothing'$",
        ),
        ("three = int('3')", "three", KernelNameError, "^three in mine.py is not a function$"),
        (
            PICKY.replace('"picky"', '"torch-math"'),
            "attention",
            ValueError,
            "'torch-math' is registered already",
        ),
        ("def attend(query, key, value, window): ...", "attend", ValueError, "requires window"),
    ],
)
def test_an_unusable_function_fails_when_it_is_loaded(
    folder: Path, source: str, function: str, error: type[Exception], sentence: str
) -> None:
    (folder / "mine.py").write_text(source)
    kernel = find(f"mine.py:{function}")
    assert (kernel.name, kernel.about) == (f"mine.py:{function}", f"your {function}")
    with pytest.raises(error, match=sentence):
        kernel.loaded()


def test_two_files_of_one_name_are_told_apart(run: Run, folder: Path) -> None:
    for name, factor in (("one", 1), ("two", 2)):
        (folder / name).mkdir()
        (folder / name / "kernel.py").write_text(
            f"{MINE.replace('softmax(-1) @ value', f'softmax(-1) @ value * {factor}')}"
        )
    rows = run("one/kernel.py:my_attention,two/kernel.py:my_attention")
    assert [row["status"] for row in rows.values()] == ["ok", "inaccurate", "ok"]


def test_failed_import_fails_the_same_way_again(folder: Path) -> None:
    """The second reason must not be that the kernel's name is already registered."""
    (folder / "half.py").write_text(PICKY + "\nraise RuntimeError('half way')\n")
    kernel = find("half.py:attention")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="half way"):
            kernel.loaded()
    assert "picky" not in catalogue()


@pytest.fixture
def package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a distribution that offers working, constrained and broken kernels."""
    monkeypatch.setattr(registry, "_kernels", dict(catalogue()))  # restored after the test
    information = folder / "offer-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: offer\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[attention_replay.kernels]\n"
        "offered = my_file:my_attention\n"
        "offered-picky = picky:attention\n"
        "offered-broken = not_there:attention\n"
        "offered-nothing = my_file:nothing\n"
        "torch-math = not_there:attention\n"
    )
    return folder


@pytest.mark.usefixtures("package")
def test_a_package_offers_kernels(run: Run) -> None:
    rows = run("offered*,torch-math", "--mask", "causal")
    assert {name: row["status"] for name, row in rows.items()} == {
        "offered": "inaccurate",  # the kernel ignores is_causal
        "offered-picky": "unsupported",
        "offered-broken": "error",
        "offered-nothing": "error",
        "torch-math": "ok",  # the package does not replace our kernel
        "torch-default": "ok",
    }
    assert rows["offered-picky"]["reason"] == "causal calls"
    assert rows["offered-broken"]["reason"] == ("ModuleNotFoundError: No module named 'not_there'")
    assert rows["offered-nothing"]["reason"].startswith("AttributeError: ")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("def attend(): pass", "has no function 'atend'; did you mean attend?"),
        ("", "has no function 'atend'; add it"),
        # Only a function of the file with a similar name is suggested.
        ("def attention(): pass", "has no function 'atend'; add it"),
        ("def other():\n    def attend(): pass", "has no function 'atend'; add it"),
        ("\ndef atend(:", "mine.py, line 2: invalid syntax"),
        ("@register_kernel('at-end')\ndef f(): ...", "did you mean at-end?"),
        ("@register_kernel('atend')\ndef f(block): ...", ": f requires block"),
    ],
)
def test_missing_function_is_refused_with_a_suggestion(
    run_cli: RunCli, folder: Path, source: str, sentence: str
) -> None:
    (folder / "mine.py").write_text(source)
    assert sentence in refusal(run_cli, *SHAPE, *QUICK, "--kernels", "mine.py:atend")


@pytest.mark.parametrize(
    "source",
    [
        "from torch.nn.functional import *",
        "from torch.nn.functional import relu as atend",
        "atend = print",
        "globals()['atend'] = print",
        "def __getattr__(name): return print",
    ],
)
def test_function_that_may_be_in_the_file_is_accepted(tmp_path: Path, source: str) -> None:
    """Only running the file would reveal an error, which the row then reports."""
    (tmp_path / "mine.py").write_text(source)
    assert find(f"{tmp_path}/mine.py:atend").load is not None
