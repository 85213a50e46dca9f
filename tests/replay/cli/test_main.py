"""The command's exit codes, its one-sentence errors with remedies, and its output for machines."""

import csv
import errno
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import replay as replay_package
from capture.storage.capture_record import CaptureRecord
from replay.cli.compare_kernels import parser
from replay.cli.main import VERBS, main
from replay.cli.replayed import Replayed, exit_code
from replay.cli.requests import measure_of
from replay.kernels.registry import Kernel, catalogue
from replay.rows.row import SpeedupOver
from replay.workloads.workload import with_counterparts
from tests import factories
from tests.in_this_process import RunCli, refusal

REPOSITORY = Path(replay_package.__file__).resolve().parent.parent
SHAPE = ("random", "-b", "1", "-hq", "4", "-hk", "2", "-sq", "70", "-d", "32")
HERE = ("--device", "cpu", "--in-process")
KERNELS = "torch-default,torch-math,torch-flash,torch-cud?n"
DIR = ("--dir", "recorded", "--call", "model-000000")
QUICK = ("--rounds", "6", *HERE)
"""Options for quick runs without workers, in this process, which has the fake kernels."""


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def in_a_process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=200
    )


def test_help_and_refusals_do_not_import_torch(recorded: Path, tmp_path: Path) -> None:
    """One process tries all commands, and stops at the first that imports torch."""
    directory, empty = ("--dir", str(recorded)), tmp_path / "empty"
    empty.touch()
    commands = [
        ["--help"],
        *([name, "--help"] for name in VERBS),
        ["explain", "nosuch.jsonl"],
        ["report", "nosuch.jsonl", "-o", "x.html"],
        ["report", "nosuch.jsonl", "-o", "x.html", "--outputs", "."],
        ["random", "-hq", "3", "-hk", "2"],
        ["random", "-sq", "1000000000000000000"],
        ["random", "--json", "/dev/full"],
        ["random", "--report", "/dev/full"],
        ["random", "--device", "gpu"],
        ["random", "--device", "cpu", "--cache", "cold"],
        ["random", "--kernels", "nosuch.py:attention"],
        ["suite", "llama", "--max-seq", "10"],
        [*directory, "--tolerances", "nosuch"],
        ["--dir", str(tmp_path)],
        ["plan", *directory, "--out", "/dev/full"],
        ["plan", *directory, "--out", "x", "--budget", "nosuch=1"],
        ["cache-formats", *directory, "--budget", "2%"],
        ["verify", *directory, "--text", str(empty)],
        ["verify", *directory, "--plan", str(empty)],
        ["verify", *directory, "--tolerances", "nosuch"],
        ["verify", *directory, "--save-output", str(empty)],
        ["doctor", *directory, "--tolerances", "nosuch"],
        ["doctor", *directory, "--json", "/dev/full"],
        ["reproduce", *directory, "--kernel", "x.py:a", "--out", "x"],
        ["selftest", "--device", "gpu"],
        ["profile", "random", "--kernels", "nosuch.py:attention"],
    ]
    done = in_a_process(
        "import sys\n"
        "from replay.cli.main import main\n"
        f"for command in {commands}:\n"
        "    try:\n        main(command)\n"
        "    except SystemExit as stop:\n"
        "        expected = 0 if '--help' in command else 2\n"
        "        assert stop.code == expected, (command, stop.code)\n"
        "    assert 'torch' not in sys.modules, command\n"
    )
    assert done.returncode == 0, done.stderr
    assert "kernels" in done.stdout
    assert all(f"usage: replay {name}" in done.stdout for name in VERBS)
    refusals = [command for command in commands if "--help" not in command]
    assert len([line for line in done.stderr.splitlines() if ": " in line]) == len(refusals)


def test_random_call_is_replayed(run_cli: RunCli) -> None:
    code, out, err = run_cli(*SHAPE, "--mask=causal", *QUICK, "--kernels", KERNELS, "--metric=all")
    assert code == 0
    assert err.startswith("replay random: energy needs an NVIDIA GPU\nreplay random: 1 call × 3 ")
    assert re.search(r"\nreplay random: the replay took \d+ s\nnext: ", err)
    assert err.count("energy") == 1
    assert "random · synthetic · 1×4/2×70×32 · bfloat16 · causal" in out
    for kernel in ("torch-default", "torch-math", "torch-flash"):
        assert kernel in out
    assert re.search("– torch-cudnn: .*PyTorch has it on GPUs only", out)
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        ((), ("the following arguments are required: --dir",)),
        (("doktor",), ("no verb 'doktor'", "did you mean doctor")),
        ((".", "-q"), ("no verb '.': did you mean replay --dir .?",)),
        ((*SHAPE, "--kernels", "torch-mth"), ("no kernel 'torch-mth'", "did you mean torch-math")),
        ((*SHAPE, "--kernels", "torch-cudnn"), ("torch-cudnn cannot run on cpu", "GPUs only")),
        (("suite", "llama", "--errors-against", "torch-cudnn"), ("torch-cudnn cannot run on cpu",)),
        ((*SHAPE, "--metric", "thruput"), ("unknown metric 'thruput': did you mean throughput",)),
        ((*SHAPE, "--cache", "cold"), ("--cache cold requires a GPU",)),
        (("random", "-sq", "8,,9"), ("-sq: has an empty entry: give numbers such as 512,1024",)),
        (("random", "-sq", "8,0"), ("-sq: must be an integer of at least 1",)),
        (("suite", "lama"), ("no suite 'lama': choose from flux", "or name a .toml file")),
        (("suite", "no.toml"), ("cannot read no.toml (No such file or directory)",)),
        ((*SHAPE, "--call", "x"), ("unknown option --call",)),
        (("--dir", "x", "--mask", "window"), ("unknown option --mask",)),
        (("--dir", "x", "--max", "1"), ("unknown option --max: did you mean --max-seconds or",)),
        (("--kernel", "sage1"), ("unknown option --kernel: did you mean --kernels?",)),
        ((*SHAPE, "--timeout", "5"), ("not allowed with argument",)),
        ((*SHAPE, "--kernels", "triton-sparse-decode[keep=2]"), ("at most 1, got 2",)),
        (("--dir", "missing"), ("missing: no such directory", "capture --model")),
        (("--dir", "capturde"), ("capturde: no such directory: did you mean captured?",)),
        (("suite", "llama", "--max-seq", "10"), ("--max-seq 10 excludes every shape", "1024")),
        ((*SHAPE, "--json", "no/such/rows.jsonl"), ("cannot write no/such", "create its")),
        ((*DIR, "--json", "."), ("cannot write .: it is a directory",)),
        (("--dir", "."), (".: holds no recorded calls: did you mean captured?",)),
        ((*DIR, "--max-time", "1m"), ("--max-time requires worker processes: leave out",)),
        ((*DIR, "--resume"), ("--resume requires a file to continue: give --json FILE",)),
        (("random", "-sq", "1000000000000000000"), ("too large for any machine",)),
        ((*DIR, "--json", "x", "--report", "./x"), ("--json and --report both name ./x",)),
        ((*DIR, "--json", "/dev/stdout", "--report", "-"), ("--report both name stdout",)),
        ((*DIR, "--per-call", "--report", "-"), ("--per-call is about tables: name a file in",)),
        ((*DIR, "--tolerances", "x", "--json", "x"), ("--json would overwrite x: name another",)),
    ],
)
def test_wrong_usage_is_one_sentence_with_the_remedy(
    run_cli: RunCli,
    arguments: tuple[str, ...],
    sentences: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "captured").mkdir()
    (tmp_path / "captured" / "manifest.json").touch()
    err = refusal(run_cli, *arguments, *QUICK)
    assert all(sentence in err for sentence in sentences), err


@pytest.mark.parametrize(
    ("given", "for_model", "device", "calls"),
    [
        ((), False, "cuda", 0),
        ((), True, "cuda", 4),
        ((), True, "cpu", 0),
        (("--calls-before", "0"), True, "cuda", 0),
        (("--calls-before", "2"), False, "cpu", 2),
    ],
)
def test_rows_for_a_model_are_measured_as_in_a_model(
    given: tuple[str, ...], for_model: bool, device: str, calls: int
) -> None:
    arguments = parser().parse_args(["--dir", "captured_inputs", *given])
    settings = measure_of(arguments, for_model=for_model).settings(torch.device(device))
    assert settings.calls_before == calls
    assert settings.for_model is for_model


SUFFIXES = ("", "-random", "-matched")


def test_versus_random_adds_random_values_to_recorded_calls(
    run_cli: RunCli, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The recorded calls of the fixture were drawn with the seeds 0, 1 and 2.
    monkeypatch.setattr(
        "replay.workloads.workload.with_counterparts", lambda calls, _: with_counterparts(calls, 9)
    )
    asked = f"--dir {recorded} --kernels torch-flash --versus-random --details"
    code, table, _ = run_cli(*asked.split(), *QUICK, "--json", str(tmp_path / "rows.jsonl"))
    assert code == 0
    written = rows((tmp_path / "rows.jsonl").read_text())
    found = [row for row in written if row["kernel"] == "torch-flash"]
    names = [f"model-{index:06d}{suffix}" for index in range(3) for suffix in SUFFIXES]
    assert [row["call"]["name"] for row in found] == names
    for real, random in zip(found[::3], found[1::3], strict=True):
        assert real["call"]["shape"] == random["call"]["shape"]
        assert real["call"]["module"] == random["call"]["module"]
        assert random["call"]["weights"].startswith("none: random values")
        assert real["accuracy"]["reference"]["rmse"] != random["accuracy"]["reference"]["rmse"]
        assert random["accuracy"]["captured"] is None
    assert table.count("weights: none: random values") == 2
    assert "torch-flash" in table.partition("recorded against random inputs")[2]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_hostile_kernel_name_stays_text(
    run_cli: RunCli,
    kernels: Callable[..., Kernel],
    monkeypatch: pytest.MonkeyPatch,
    recorded: Path,
    tmp_path: Path,
) -> None:
    """A hostile name stays text in progress lines, tables and CSV."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # progress is drawn only on a terminal

    def attention(query: Any, key: Any, value: Any, **options: Any) -> torch.Tensor:
        print("noise")
        return F.scaled_dot_product_attention(query, key, value, **options)

    names = ["[red]", "[/red]", "=1+1", "a,b", 'say "hi"', "../up", "{0}", "%s"]
    for name in names:
        kernels(name, attention)
    monkeypatch.setattr(
        "replay.kernels.registry.select",
        lambda *_, **__: ([catalogue()[name] for name in names], []),
    )
    monkeypatch.chdir(recorded.parent)
    written = tmp_path / "rows.jsonl"
    code, out, err = run_cli(*DIR, *QUICK, "--json", str(written))
    assert code == 0, err
    table = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", out)
    assert not [name for name in names if name not in table]
    assert [row["kernel"] for row in rows(written.read_text())] == [*names, "torch-math"]
    _, out, _ = run_cli("report", str(written), "--csv", "-")
    found = [row["kernel"] for row in csv.DictReader(io.StringIO(out))]
    assert found == ["'=1+1" if name == "=1+1" else name for name in (*names, "torch-math")]


def test_check_fails_on_a_wrong_kernel(run_cli: RunCli, kernels: Callable[..., Kernel]) -> None:
    kernels("zeros", lambda **a: torch.zeros_like(a["query"]))
    kernels("fine", lambda **a: F.scaled_dot_product_attention(**a))
    code, out, err = run_cli(*SHAPE, *QUICK, "--kernels", "fine,zeros", "--check")
    assert code == 1
    assert "replay random: failed: zeros (inaccurate)" in err
    assert "zeros" in out
    assert run_cli(*SHAPE, *QUICK, "--kernels", "fine", "--check")[0] == 0


def test_check_states_the_smallest_slowdown(capsys: pytest.CaptureFixture[str]) -> None:
    found = [(1.0, 1.1), (2.0, 2.08), (1.0, None)]
    speedups = [SpeedupOver(ratio, 0.9, high, "slow", "noisy", "b") for ratio, high in found]
    replay = Replayed([factories.row(speedup=each) for each in speedups], None, {}, {})
    assert (exit_code(replay), exit_code(replay, check=True)) == (0, 0)
    told = "slowdowns against the baseline below 7.0% would not show on half of the rows"
    assert capsys.readouterr().err == (
        f"replay: {told}, and below 10.0% not on all; unknown for 1 row\n"
    )


@pytest.mark.parametrize("device", ["mps", "cpu:7", "cuda:-1", "abacus", ""])
def test_unusable_device_is_one_sentence(run_cli: RunCli, device: str) -> None:
    assert "--device" in refusal(run_cli, *SHAPE, "--device", device)


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (OSError(errno.ENOSPC, "No space"), 2, "cannot write: No space: make room"),
        (RuntimeError("boom"), 1, "unexpected RuntimeError: boom (traceback with --debug)"),
    ],
)
def test_error_is_one_sentence_unless_debugging(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, sentence: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("replay.workers.execution.replay_here", fail)
    assert run_cli(*SHAPE, *QUICK, "-q")[::2] == (code, f"replay random: {sentence}\n")
    with pytest.raises(type(error)):
        main([*SHAPE, *QUICK, "--debug"])


def test_quiet_keeps_results_and_warnings(run_cli: RunCli, recorded: Path) -> None:
    arguments = ("--dir", str(recorded), *QUICK, "--kernels", "torch-math", "-q")
    manifest = recorded / "manifest.json"
    data = json.loads(manifest.read_text())
    data["captures"] = [CaptureRecord("model", "trained", attention_share=0.03).to_json()]
    manifest.write_text(json.dumps(data))
    code, out, err = run_cli(*arguments, "--metric", "tflops,all")
    assert (code, err) == (0, "")
    assert "attention takes 3% of a forward pass, which gains at most 1.03×" in out
    manifest.unlink()
    next(iter(recorded.glob("*.safetensors"))).write_bytes(b"damaged")
    code, out, err = run_cli(*arguments)
    assert code == 1
    assert "manifest.json is missing" in err
    assert "the other calls were replayed" in err
    assert len(err.splitlines()) == 2
    assert "torch-math" in out


def test_recording_without_readable_calls_is_reported(run_cli: RunCli, recorded: Path) -> None:
    for call in recorded.glob("*.safetensors"):
        call.write_bytes(b"")
    code, _, err = run_cli("--dir", str(recorded), *QUICK, "--kernels", "torch-math", "-q")
    assert code == 1
    assert err.count("no call could be replayed, record anew") == len(err.splitlines()) == 3


@pytest.mark.parametrize("option", ["--json", "--out"])
def test_nothing_recorded_is_written_over(run_cli: RunCli, recorded: Path, option: str) -> None:
    verb = ("plan",) if option == "--out" else ()
    for file in ("manifest.json", "model-000000.safetensors"):
        content = (recorded / file).read_bytes()
        arguments = (*verb, "--dir", str(recorded), *QUICK, option, str(recorded / file))
        sentence = f"{file}: it is a recording's own, name another file"
        assert sentence in refusal(run_cli, *arguments)
        assert (recorded / file).read_bytes() == content
    archive = shutil.make_archive(str(recorded), "zip", recorded)
    err = refusal(run_cli, *verb, "--dir", archive, *QUICK, option, archive)
    assert f"{option} would overwrite {archive}" in err


def test_verbose_prints_where_the_time_goes(run_cli: RunCli, recorded: Path) -> None:
    arguments = ("--dir", str(recorded), *QUICK, "--kernels", "torch-math")
    told = run_cli(*arguments, "-v", "--json=-")[2]
    assert "in this: torch-math" in told
    assert len(re.findall(r"first call of torch-math: [\d.]+ ms", told)) == 3
    assert len(re.findall(r"^ +[\d.]+ s  model-\d+ took ", told, re.MULTILINE)) == 3
    assert re.search(r"3 calls took [\d.]+ s: ", told)
    assert run_cli(*arguments, "--json=-", "-q")[2] == "", "the next command narrates too"


def test_kernels_are_listed(run_cli: RunCli, kernels: Callable[..., Kernel]) -> None:
    kernels("mine", F.scaled_dot_product_attention, default=False, about="a kernel of a test")
    code, out, err = run_cli("kernels", *HERE)
    assert (code, err) == (0, "")
    able, unable = (" ".join(part.split()) for part in out.split("cannot run here"))
    assert able.startswith("can run here kernel version about")
    assert "mine a kernel of a test (not by default)" in able
    assert "torch-flash" in able
    assert re.search(r"PyTorch has it on GPUs only .*torch-cudnn", unable)
    assert max(map(len, out.splitlines())) <= 80


def test_tolerances_change_verdicts(run_cli: RunCli, recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "strict.toml"
    path.write_text("[exact]\nsame_dtype_factor = 0\nrounding_factor = 0\n")
    one = ("--dir", str(recorded), "--call", "model-000000", *QUICK)
    arguments = (*one, "--kernels", "torch-math", "--json", "-")
    (usual,) = rows(run_cli(*arguments)[1])
    (strict,) = rows(run_cli(*arguments, "--tolerances", str(path))[1])
    assert (usual["status"], usual["tolerances"]) == ("ok", "")
    assert strict["status"] == "inaccurate"
    assert strict["tolerances"] == "exact.same_dtype_factor=0 exact.rounding_factor=0"


def test_archive_is_replayed(
    run_cli: RunCli, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the chosen calls are copied for the workers; names, globs and commas choose."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    archive = shutil.make_archive(str(tmp_path / "calls"), "zip", tmp_path, recorded.name)
    arguments = ("--dir", archive, *QUICK, "--kernels", "torch-math")
    code, out, _ = run_cli(*arguments, "--call", "*[2-9], model-000000", "--json=-")
    assert code == 0
    names = dict.fromkeys(row["call"]["name"] for row in rows(out))
    assert [*names] == ["model-000000", "model-000002"]
    copies = {path.stem for path in (tmp_path / "cache").rglob("*.safetensors")}
    assert copies == {*names}


def test_kernel_that_leaves_the_process_unusable_ends_the_replay(
    run_cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After an illegal memory access, the GPU refuses all work."""
    (tmp_path / "mine.py").write_text("def lost(*_, **__):\n    raise RuntimeError('illegal')\n")
    monkeypatch.setattr("replay.bench.output_check.gpu_is_lost", lambda device: True)
    kernels = f"torch-math,{tmp_path / 'mine.py'}:lost"
    code, _, err = run_cli("random", "-sq", "8", "-d", "8", *QUICK, "--kernels", kernels)
    assert code == 2
    lost = r"mine.py:lost on random-00: .*illegal \(mine.py, line 2\); .* without --in-process"
    assert re.search(lost, err), err
