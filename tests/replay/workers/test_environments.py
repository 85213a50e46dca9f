"""Kernels of several Python environments share a table, but each environment has its own
packages."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

import replay as replay_package
from replay.bench.runner import LOADING
from replay.bench.settings import Settings
from replay.workers.environment_options import WorkerError, interpreters
from replay.workers.environments import Environment, ProbeResult, assign
from replay.workers.process import Process
from tests.factories import kernel, made_workload
from tests.replay.workers.scripted import Script, Scripted, died

REPOSITORY = Path(replay_package.__file__).resolve().parent.parent
QUICK = ("--rounds", "3", "--device", "cpu")
WORKLOAD = made_workload("call", lambda device: pytest.fail("loaded here"))

RunCli = Callable[..., tuple[int, str, str]]

STAND_IN = '''
import importlib.util
from torch.nn.functional import scaled_dot_product_attention
from replay.kernels.registry import register_kernel

def unavailable(device):
    return None if importlib.util.find_spec("stand_in_library") else "not installed"

@register_kernel("stand_in_kernel", unavailable=unavailable, library="stand-in",
                 install="pip install stand-in")
def attention(query, key, value, *others, **options):
    """Attention of a library that only one environment has."""
    import stand_in_library
    return scaled_dot_product_attention(query, key, value, *others, **options)
'''
SPY = """
import json, sys
import clash
from replay.kernels.registry import register_kernel

def tell(call):
    return json.dumps({"clash": clash.WHOSE, "path": sys.path, "rich": "rich" in sys.modules})

@register_kernel("spy", unsupported=tell)
def attention(query, key, value, *others, **options): ...
"""


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory with the packages of the environment `this`."""
    directory = tmp_path / "ours"
    _install_kernel(directory)
    (directory / "clash.py").write_text("WHOSE = 'ours'\n")
    monkeypatch.setenv("PYTHONPATH", str(directory))
    monkeypatch.syspath_prepend(directory)
    return directory


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Interpreter with other packages, a space in its path, and a broken `rich`."""
    directory = tmp_path / "theirs"
    _install_kernel(directory)
    (directory / "clash.py").write_text("WHOSE = 'theirs'\n")
    (directory / "rich").mkdir()
    (directory / "rich" / "__init__.py").write_text("raise ImportError('no rich here')\n")
    (directory / "stand_in_library.py").touch()
    _install(directory, "stand-in", "2.5")
    command = f'PYTHONPATH="{directory}" exec "{sys.executable}" "$@"'
    return _script(tmp_path / "their place", command)


def _install_kernel(directory: Path) -> None:
    directory.mkdir()
    (directory / "stand_in_kernel.py").write_text(STAND_IN)
    points = "[attention_replay.kernels]\nstand-in-kernel = stand_in_kernel:attention\n"
    (_install(directory, "stand-in-kernel", "1.0") / "entry_points.txt").write_text(points)


def _install(directory: Path, name: str, version: str) -> Path:
    information = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    return information


def _script(directory: Path, command: str = f'exec "{sys.executable}" "$@"') -> Path:
    """Return a script that runs a command, such as this interpreter."""
    directory.mkdir()
    python = directory / "python"
    python.write_text(f"#!/bin/sh\n{command}\n")
    python.chmod(0o755)
    return python


@pytest.mark.slow
@pytest.mark.usefixtures("ours", "kernels")
def test_library_that_only_the_other_environment_has_is_listed(
    run_cli: RunCli, theirs: Path
) -> None:
    given = ("stand-in-kernel,torch-math", "--device", "cpu", "--env", f"theirs={theirs}")
    code, out, err = run_cli("kernels", *given)
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert (
        "stand-in-kernel from stand_in_kernel:attention "
        "this: not installed: pip install stand-in theirs: available 2.5" in text
    )
    assert f"this: available {torch.__version__} theirs: available {torch.__version__}" in text


@pytest.mark.usefixtures("kernels")
def test_rows_of_two_environments_make_one_table(
    run_cli: RunCli,
    ours: Path,
    theirs: Path,
    recorded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spy = tmp_path / "spy.py"
    spy.write_text(SPY)
    toml = tmp_path / "kernels.toml"
    toml.write_text(f"[environments]\ntheirs = '{theirs}'\n")
    truncated = recorded / "model-000000.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:1000])
    (recorded / "model-000002.safetensors").unlink()
    monkeypatch.setattr("replay.bench.confirmation.TOO_FAST", 1e6)  # the machine may be busy
    monkeypatch.chdir(REPOSITORY)  # the current directory contains `models` and `tests`
    written = tmp_path / "rows.jsonl"
    kernels = f"stand-in-kernel,torch-flash,{spy}:attention"
    given = ("--dir", str(recorded), *QUICK, "--env", str(toml), "--kernels", kernels)
    code, out, err = run_cli(*given, "--json", str(written))

    # An unreadable file gives one row, not one per environment, and other calls are replayed.
    assert code == 1
    assert re.findall(r"^replay: .*(model-\d+)", err, re.MULTILINE) == [
        "model-000000",
        "model-000002",
    ]
    rows = [json.loads(line) for line in written.read_text().splitlines()]
    lost = [(row["call"]["name"], row["status"]) for row in rows if not row["kernel"]]
    assert lost == [("model-000000", "error"), ("model-000002", "error")]

    found = {(row["environment"], row["kernel"]): row for row in rows if row["kernel"]}
    attention = f"{spy}:attention"
    assert list(found) == [
        ("this", "torch-flash"),
        ("this", attention),
        ("theirs", "stand-in-kernel"),
        ("theirs", attention),
        ("this", "torch-math"),
    ]
    assert "stand-in-kernel@theirs" in out

    row, baseline = found["theirs", "stand-in-kernel"], found["this", "torch-math"]
    assert row["rounds"] == baseline["rounds"] != ""
    assert row["speedup"]["vs"] == "torch-math"

    # Each interpreter sees its own packages and ours, but nothing else from our directory.
    seen = {name: json.loads(found[name, attention]["reason"]) for name in ("this", "theirs")}
    for name, is_ours in {"this": True, "theirs": False}.items():
        assert seen[name]["clash"] == ("ours" if is_ours else "theirs")
        assert (str(ours) in seen[name]["path"]) == is_ours
        assert not {"", ".", str(REPOSITORY), str(REPOSITORY.parent)} & set(seen[name]["path"])
        assert not seen[name]["rich"]


@pytest.mark.parametrize(
    ("command", "timeout", "reason"),
    [
        (
            f'PYTHONPATH= exec "{sys.executable}" -S "$@"',
            60,
            "the worker exited with code 1: ModuleNotFoundError: No module named 'torch'; "
            "it needs torch and safetensors",
        ),
        ("exec /bin/echo", 5, "the worker exited with code 0"),
        ("exec sleep 1000", 0.4, r"sent no message for 0\.4 s \(--timeout\)"),
        ("exec sleep 1000", 0.2, r"sent no message for 0\.3 s \(limit for its start\)"),
    ],
)
def test_program_that_runs_no_worker_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, timeout: float, reason: str
) -> None:
    monkeypatch.setattr("replay.workers.process.ANSWERING_SECONDS", 0.3)
    python = _script(tmp_path / "odd", command)
    with pytest.raises(WorkerError, match=rf"environment odd \({python}\) does not work: {reason}"):
        Environment("odd", str(python), timeout).probe([kernel("a")], "cpu")


def test_interpreters_are_read_from_options_and_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    mine = _script(tmp_path / "mine")
    toml = tmp_path / "größe.toml"
    toml.write_text('[environments]\na = "~/mine/python"\nb = "/bin/sh"\n', "utf-8")
    assert interpreters([]) == {}
    assert interpreters([f"b={mine}", "c=~/mine/python", str(toml)]) == dict.fromkeys(
        ("a", "b", "c"), str(mine)
    )


@pytest.mark.parametrize(
    ("options", "text", "sentence"),
    [
        (["fa4"], "", "--env fa4: write NAME=PATH/TO/python"),
        (["=python"], "", "write NAME=PATH/TO/python"),
        (["fa4="], "", "write NAME=PATH/TO/python"),
        (["this=/bin/sh"], "", "'this' is the name of this environment"),
        (["a=/bin/sh", "a=/bin/ls"], "", r"--env gives a to two Pythons: choose two names"),
        (["fa4=/no/such/python"], "", "--env fa4: there is no Python at /no/such/python"),
        (["fa4=/tmp"], "", "--env fa4: there is no Python at /tmp"),
        ([], "environments = 3", r"needs \[environments\] with lines"),
        ([], "[environments]\nfa4 = 3", r"needs \[environments\] with lines"),
        ([], "[elsewhere]\nfa4 = 'x'", r"needs \[environments\] with lines"),
        ([], "not TOML", r"kernels.toml is not TOML: "),
        ([], None, r"^cannot read .*kernels.toml \(No such file or directory\): name a TOML file"),
    ],
)
def test_invalid_interpreters_are_refused(
    tmp_path: Path, options: list[str], text: str | None, sentence: str
) -> None:
    file = tmp_path / "kernels.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(WorkerError, match=sentence):
        interpreters([*options, *([] if text == "" else [str(file)])])


def test_kernels_run_where_their_library_is() -> None:
    """If most environments have a kernel's library, the first that can run the kernel runs it."""
    runs_in = {
        "torch-math": ["this", "that"],
        "ours": ["that", "bare"],
        "both": ["this", "that"],
        "there": ["that"],
        "nowhere": [],
    }
    libraries = {"torch-math": "torch", "ours": "triton"}
    kernels = [kernel(name, library=libraries.get(name, "")) for name in runs_in]
    found = {
        place: {
            name: ProbeResult(None if place in places else "not installed")
            for name, places in runs_in.items()
        }
        for place in ("this", "that", "bare")
    }
    assigned = {name: [each.name for each in run] for name, run in assign(kernels, found).items()}
    assert assigned == {
        "this": ["torch-math", "both", "nowhere"],
        "that": ["ours", "both", "there"],
        "bare": [],
    }


def environment_with(*scripts: Script) -> tuple[Environment, Scripted]:
    process = Scripted(*scripts)
    return Environment("other", "python", 5, cast("Process", process)), process


def test_probe_continues_after_a_crash() -> None:
    environment, process = environment_with(
        [{"at": "a"}, {"probed": "a", "reason": None, "version": "1"}, {"at": "b"}, died("b")],
        [{"at": "c"}, {"probed": "c", "reason": "no"}],
        [died("")],
    )
    assert environment.probe([*map(kernel, "abc")], "cpu") == {
        "a": ProbeResult(None, "1"),
        "b": ProbeResult("crash during the check: gone"),
        "c": ProbeResult("no"),
    }
    assert process.kernels() == [["a", "b", "c"], ["c"]]
    with pytest.raises(WorkerError, match=r"environment other \(python\) does not work: gone"):
        environment.probe([kernel("a")], "cpu")  # no kernel is to blame


def test_first_calls_continue_after_a_crash(quick: Settings) -> None:
    environment, process = environment_with(
        [{"at": "a"}, {"called": "a", "first_call_ms": 5.0}, {"at": "b"}, died("b")],
        [{"at": "c"}, {"called": "c", "first_call_ms": 7.0}],
        [died(LOADING)],
    )
    stages: list[str] = []
    found = environment.first_calls(WORKLOAD, [*map(kernel, "abc")], quick, stages.append)
    assert found == {"a": 5.0, "c": 7.0}
    assert stages == ["a", "b", "c"]
    assert process.kernels() == [["a", "b", "c"], ["c"]]
    assert environment.first_calls(WORKLOAD, [kernel("a")], quick, stages.append) == {}


def test_known_kernels_share_a_worker_and_each_file_of_a_user_has_its_own() -> None:
    """A known kernel that needs its own process gets one only if the kernel can run."""
    environment, process = environment_with(
        [{"probed": "alone", "reason": None}], [{"probed": "missing", "reason": "not installed"}]
    )
    kernels = [
        kernel("a"),
        kernel("mine.py:f", source="mine.py"),
        kernel("alone", own_process=True),
        kernel("missing", own_process=True),
        kernel("mine.py:g", source="mine.py"),
        kernel("package", source="package"),
    ]
    for _ in range(2):  # whether a kernel can run is asked only once
        divided = environment.divided(kernels, "cpu")
        assert {name: [each.name for each in own] for name, own in divided.items()} == {
            "": ["a", "missing"],
            "mine.py": ["mine.py:f", "mine.py:g"],
            "alone": ["alone"],
            "package": ["package"],
        }
    assert process.kernels() == [["alone"], ["missing"]]
    workers = {id(environment.worker(name)) for name in [*divided, *divided]}
    assert len(workers) == len(divided)
    started = Environment("this", sys.executable, 60, users={"mine.py": process})
    assert started.worker("mine.py").process is process
