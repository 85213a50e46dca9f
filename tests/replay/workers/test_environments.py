"""Kernels of several Python environments share a table; each has its own packages."""

import json
import re
import sys
from pathlib import Path
from typing import cast

import pytest
import torch

import replay as replay_package
from replay.bench.reported_stages import LOADING
from replay.bench.settings import Settings
from replay.workers.environment_options import WorkerError, interpreters
from replay.workers.environments import Environment, ProbeResult, assign
from replay.workers.process import Process
from tests.factories import kernel, made_workload
from tests.in_this_process import RunCli
from tests.replay.workers.scripted import Script, Scripted, died

REPOSITORY = Path(replay_package.__file__).resolve().parent.parent
QUICK = ("--rounds", "3", "--device", "cpu")
WORKLOAD = made_workload("call", lambda device: pytest.fail("loaded here"))


SPY = """
import importlib.util, json, sys
import clash
from torch.nn.functional import scaled_dot_product_attention
from replay.kernels.registry import register_kernel

def unavailable(device):
    return None if importlib.util.find_spec("stand_in_library") else "not installed"

@register_kernel("stand-in", unavailable=unavailable, library="stand-in")
def attention(query, key, value, *others, **options):
    import stand_in_library
    return scaled_dot_product_attention(query, key, value, *others, **options)

def tell(call):
    return json.dumps({"clash": clash.WHOSE, "path": sys.path, "rich": "rich" in sys.modules})

@register_kernel("spy", unsupported=tell)
def spy(query, key, value, *others, **options): ...
"""
"""File with a kernel of a library that one environment has, and one that tells what it sees."""


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory with a package of the environment `this`; the file with kernels is beside it."""
    directory = tmp_path / "ours"
    directory.mkdir()
    (directory / "clash.py").write_text("WHOSE = 'this'\n")
    (tmp_path / "spy.py").write_text(SPY)
    monkeypatch.setenv("PYTHONPATH", str(directory))
    return directory


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Interpreter with other packages, a space in its path, and a broken `rich`."""
    directory = tmp_path / "theirs"
    for folder in ("rich", "stand_in-2.5.dist-info"):
        (directory / folder).mkdir(parents=True)
    (directory / "clash.py").write_text("WHOSE = 'theirs'\n")
    (directory / "rich" / "__init__.py").write_text("raise ImportError('no rich here')\n")
    (directory / "stand_in_library.py").touch()
    (directory / "stand_in-2.5.dist-info" / "METADATA").write_text("Name: stand-in\nVersion: 2.5\n")
    command = f'PYTHONPATH="{directory}" exec "{sys.executable}" "$@"'
    return _script(tmp_path / "their place", command)


def _script(directory: Path, command: str = f'exec "{sys.executable}" "$@"') -> Path:
    """Return a script that runs a command, such as this interpreter."""
    directory.mkdir()
    python = directory / "python"
    python.write_text(f"#!/bin/sh\n{command}\n")
    python.chmod(0o755)
    return python


@pytest.mark.slow
def test_library_of_one_environment_is_listed(
    run_cli: RunCli, ours: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    given = (f"{ours.parent}/spy.py:attention,torch-math", "--device", "cpu")
    code, out, err = run_cli("kernels", *given, "--env", f"theirs={theirs}")
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert "theirs 2.5" in text
    assert f"this {torch.__version__}, theirs {torch.__version__}" in text


def test_rows_of_two_environments_make_one_table(
    run_cli: RunCli, ours: Path, theirs: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml, written = ours / "kernels.toml", ours / "rows.jsonl"
    toml.write_text(f"[environments]\ntheirs = '{theirs}'\n")
    truncated = recorded / "model-000000.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:1000])
    (recorded / "model-000002.safetensors").unlink()
    monkeypatch.setattr("replay.bench.confirmation.TOO_FAST", 1e6)  # the machine may be busy
    monkeypatch.chdir(REPOSITORY)  # the current directory contains `models` and `tests`
    kernels = f"{ours.parent}/spy.py:attention,torch-flash,{ours.parent}/spy.py:spy"
    given = ("--dir", str(recorded), *QUICK, "--env", str(toml), "--kernels", kernels)
    code, out, err = run_cli(*given, "--json", str(written))

    # An unreadable file gives one row, not one per environment, and other calls are replayed.
    assert code == 1
    unreadable = ["model-000000", "model-000002"]
    assert re.findall(r"^replay: .*(model-\d+)", err, re.MULTILINE) == unreadable
    rows = [json.loads(line) for line in written.read_text().splitlines()]
    lost = [(row["call"]["name"], row["status"]) for row in rows if not row["kernel"]]
    assert lost == [(name, "error") for name in unreadable]

    places = [
        (row["environment"], row["kernel"].rpartition(":")[2]) for row in rows if row["kernel"]
    ]
    found = dict(zip(places, (row for row in rows if row["kernel"]), strict=True))
    assert places == [
        ("this", "torch-flash"),
        ("this", "spy"),
        ("theirs", "attention"),
        ("theirs", "spy"),
        ("this", "torch-math"),
    ]
    assert "attention@theirs" in out
    row, baseline = found["theirs", "attention"], found["this", "torch-math"]
    assert row["rounds"] == baseline["rounds"] != ""
    assert row["time_ms"]["control"] == []  # another environment may have another baseline
    assert row["speedup"]["vs"] == "torch-math"

    # Each interpreter sees its own packages and ours, but nothing else from our directory.
    for name in ("this", "theirs"):
        seen = json.loads(found[name, "spy"]["reason"])
        assert (seen["clash"], seen["rich"]) == (name, False)
        assert (str(ours) in seen["path"]) == (name == "this")
        assert not {"", ".", str(REPOSITORY), str(REPOSITORY.parent)} & set(seen["path"])


@pytest.mark.parametrize(
    ("command", "timeout", "reason"),
    [
        (
            f'PYTHONPATH= exec "{sys.executable}" -S "$@"',
            60,
            "the worker exited with code 1: ModuleNotFoundError: No module named 'torch'; "
            "it needs torch and safetensors",
        ),
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


def test_interpreters_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        (["=python"], "", "write NAME=PATH/TO/python"),
        (["fa4="], "", "write NAME=PATH/TO/python"),
        (["this=/bin/sh"], "", "'this' is the name of this environment"),
        (["a=/bin/sh", "a=/bin/ls"], "", r"--env gives a to two Pythons: choose two names"),
        (["fa4=/no/such/python"], "", "--env fa4: there is no Python at /no/such/python"),
        ([], "environments = 3", r"needs \[environments\] with lines"),
        ([], "[environments]\nfa4 = 3", r"needs \[environments\] with lines"),
        ([], "not TOML", r"kernels.toml is not TOML: "),
        ([], "a = " + "[" * 3000, r"kernels.toml is not TOML: nested too deeply"),
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
    assert (found, stages) == ({"a": 5.0, "c": 7.0}, ["a", "b", "c"])
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
