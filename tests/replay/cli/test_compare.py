"""`replay compare`, and runs that are kept and compared with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from replay.kernels.registry import Kernel
from replay.rows.row_files import save_jsonl
from tests.replay.comparison.simulated import run

RunCli = Callable[..., tuple[int, str, str]]
SHAPE = ("random", "-b", "1", "-hq", "4", "-sq", "70", "-d", "32", "--dtype", "fp32")
RUNS = ("before.jsonl", "slow.jsonl")
QUICK = ("--rounds", "6", "--device", "cpu", "--in-process")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    save_jsonl(run("before", {"a": 0.5}).rows, Path("before.jsonl"))
    save_jsonl(run("equal", {"a": 0.5}).rows, Path("equal.jsonl"))
    save_jsonl(run("slow", {"a": 0.525}).rows, Path("slow.jsonl"))
    save_jsonl(run("other", {"b": 0.5}, calls=1).rows[1:], Path("other.jsonl"))
    Path("deep.jsonl").write_text("[" * 100_000 + "\n")


def test_a_slower_kernel_fails_where_it_should(run_cli: RunCli) -> None:
    code, out, err = run_cli("compare", "before.jsonl", "equal.jsonl", "--fail-on", "slow:3%")
    assert (code, err) == (0, "")
    assert "nothing changed" in out
    code, out, err = run_cli("compare", "before.jsonl", "slow.jsonl", "--fail-on", "slow:3%,error")
    assert code == 1
    assert err == "replay: failed: slow:3%: a on 12 of 12 calls\n"
    assert "slower: a" in out
    assert run_cli("compare", "before.jsonl", "slow.jsonl")[0] == 0


def test_several_runs_are_compared_with_the_first(run_cli: RunCli) -> None:
    _, out, _ = run_cli("compare", "before.jsonl", "equal.jsonl", "slow.jsonl")
    assert out.index("before.jsonl → equal.jsonl") < out.index("before.jsonl → slow.jsonl")
    code, _, err = run_cli(
        "compare", "before.jsonl", "equal.jsonl", "slow.jsonl", "--fail-on", "slow"
    )
    assert (code, err) == (1, "replay: failed: slow: a on 12 of 12 calls\n")


def test_every_format_is_written(run_cli: RunCli) -> None:
    files = {"--markdown": "x.md", "--json": "x.json"}
    given = [part for pair in files.items() for part in pair]
    assert run_cli("compare", "before.jsonl", "slow.jsonl", *given)[0] == 0
    assert Path("x.md").read_text().startswith("### before.jsonl → slow.jsonl")
    assert json.loads(Path("x.json").read_text())[0]["after"] == "slow.jsonl"
    _, out, err = run_cli("compare", "before.jsonl", "slow.jsonl", "--json", "-")
    assert json.loads(out)[0]["before"] == "before.jsonl"
    assert "slower: a" in err


@pytest.mark.parametrize("full", ["markdown", "json"])
def test_a_file_without_room_costs_no_other(run_cli: RunCli, full: str) -> None:
    places = {name: f"x.{name}" for name in ("markdown", "json")} | {full: "/dev/full"}
    given = [part for name, place in places.items() for part in (f"--{name}", place)]
    code, out, err = run_cli("compare", *RUNS, *given, "--save-baseline", "main")
    assert code == 2
    assert "slower: a" in out
    assert err.splitlines()[1:] == [
        "replay: cannot write /dev/full: No space left on device: make room"
    ]
    assert all(Path(place).stat().st_size for name, place in places.items() if name != full)
    assert run_cli("compare", "main", "before.jsonl")[0] == 0


def test_each_file_that_cannot_be_written_is_named(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay.cli.compare.check_place", lambda _: None)
    given = ("--markdown", "no/x.md", "--json", "no/x.json")
    code, _, err = run_cli("compare", *RUNS, *given, "--fail-on", "slow")
    assert code == 2
    assert err.splitlines() == [
        "replay: failed: slow: a on 12 of 12 calls",
        "replay: cannot write no/x.md: No such file or directory",
        "replay: cannot write no/x.json: No such file or directory",
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("before.jsonl", "nope.jsonl"), "nope.jsonl: no such file; write one with"),
        (("before.jsonl", "."), "cannot read .: Is a directory"),
        (("before.jsonl", "empty.jsonl"), "empty.jsonl holds no rows"),
        (("before.jsonl", "old.jsonl"), "old.jsonl holds rows of version 1, and this is version"),
        (("before.jsonl", "picture.jsonl"), "picture.jsonl was not written by `replay --json`"),
        (("before.jsonl", "other.jsonl"), "have no kernel on the same call in common"),
        (("before.jsonl", "./before.jsonl"), "is the same file twice: name two runs"),
        (
            ("nightly", "before.jsonl"),
            "no baseline 'nightly' of GPU 1: keep one with",
        ),
        (("before.jsonl", "deep.jsonl"), "deep.jsonl, line 1: not a row of `replay --json`"),
        (("before.jsonl", "slow.jsonl", "--spread", "deep.jsonl"), "not what `replay --selftest"),
        (("before.jsonl", "slow.jsonl", "--spread", "x"), "no such file, and not a share"),
        (("before.jsonl", "slow.jsonl", "--spread", "other.jsonl"), "no kernel on the same call"),
        (("before.jsonl", "slow.jsonl", "--fail-on", "fast"), "no such condition, choose from"),
        (("before.jsonl", "slow.jsonl", "--json", "slow.jsonl"), "--json would overwrite slow"),
        (
            ("before.jsonl", "slow.jsonl", "--spread", "equal.jsonl", "--json", "equal.jsonl"),
            "--spread and --json both name equal.jsonl",
        ),
        (("before.jsonl", "slow.jsonl", "--json", "-", "--markdown", "-"), "both name stdout"),
        (("before.jsonl", "slow.jsonl", "--json", "no/x"), "cannot write no/x: create its"),
        (("before.jsonl", "slow.jsonl", "--markdown", "."), "cannot write .: it is a directory"),
        (("before.jsonl", "slow.jsonl", "--save-baseline", "no/x"), "cannot write no/x: create"),
        (("before.jsonl", "slow.jsonl", "--save-baseline", ".."), "invalid baseline name"),
        (("before.jsonl",), "required: AFTER"),
    ],
)
def test_wrong_usage_is_one_sentence_with_the_remedy(
    run_cli: RunCli, arguments: tuple[str, ...], sentence: str
) -> None:
    Path("empty.jsonl").touch()
    Path("old.jsonl").write_text('{"kernel": "a", "call": {}}\n')
    Path("picture.jsonl").write_bytes(b"\x89PNG\xff")
    code, out, err = run_cli("compare", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("replay")
    assert len(err.splitlines()) == 1
    assert sentence in err


def test_a_baseline_is_kept_by_name_and_compared_with(run_cli: RunCli) -> None:
    code, _, err = run_cli("compare", "before.jsonl", "equal.jsonl", "--save-baseline", "main")
    assert code == 0
    assert "baseline main of " in err
    assert err.strip().endswith("main.jsonl")
    code, out, _ = run_cli("compare", "main", "slow.jsonl", "--fail-on", "slow")
    assert code == 1
    assert "main → slow.jsonl" in out


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom replay.cli.main import main\n"
        "try:\n    main(['compare', '--help'])\n"
        "except SystemExit as stop:\n    print(stop.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines()[-1] == "0 False", done.stderr
    assert "--fail-on" in done.stdout


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
    return F.scaled_dot_product_attention(query, key, value, **options)


def less_accurate(*inputs: torch.Tensor, **options: Any) -> Any:
    return attention(*inputs, **options) * (1 + 1e-6)


def wrong(*inputs: torch.Tensor, **options: Any) -> Any:
    return attention(*inputs, **options) * 1.1


@pytest.mark.parametrize(
    ("changed", "condition", "told"),
    [
        (attention, "inaccurate,less-accurate", ""),
        (less_accurate, "less-accurate", "less-accurate: mine on "),
        (wrong, "inaccurate", "inaccurate: mine on "),
    ],
)
def test_a_replay_keeps_its_rows_and_finds_what_a_kernel_lost(
    run_cli: RunCli,
    kernels: Callable[..., Kernel],
    changed: Callable[..., Any],
    condition: str,
    told: str,
) -> None:
    given = (*SHAPE, *QUICK, "--kernels", "mine")
    now = [attention]
    kernels("mine", lambda *inputs, **options: now[0](*inputs, **options))
    assert run_cli(*given, "--save-baseline", "main")[0] == 0
    now[0] = changed
    code, out, err = run_cli(*given, "--compare-to", "main", "--fail-on", condition)
    assert "main → this run" in out
    assert told in err
    assert code == (1 if told else 0)


def test_times_are_written_for_a_chart(run_cli: RunCli) -> None:
    given = (*SHAPE, *QUICK, "--kernels", "torch-math")
    assert run_cli(*given, "--benchmark-json", "chart.json")[0] == 0
    names = [each["name"].split()[0] for each in json.loads(Path("chart.json").read_text())]
    assert sorted(names) == ["torch-default", "torch-math"]
    _, out, _ = run_cli(*given, "--benchmark-json", "-")
    assert len(json.loads(out)) == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--compare-to", "nightly"), "no baseline 'nightly' of"),
        (("--compare-to", "x.jsonl"), "x.jsonl: no such file"),
        (("--save-baseline", ".."), "invalid baseline name"),
        (("--save-baseline", "n" * 250), "File name too long"),
        (("--fail-on", "slow"), "--fail-on requires --compare-to"),
        (("--spread", "1%"), "--spread requires --compare-to"),
        (("--compare-to", "before.jsonl", "--fail-on", "x"), "no such condition"),
        (("--compare-to", "before.jsonl", "--spread", "x"), "no such file, and not a share"),
    ],
)
def test_a_replay_refuses_before_it_measures(
    run_cli: RunCli, arguments: tuple[str, ...], sentence: str
) -> None:
    code, out, err = run_cli(*SHAPE, *QUICK, "--kernels", "torch-default", *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
