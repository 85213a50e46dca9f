"""`replay --ray` on local clusters whose CPUs stand in for GPUs."""

import contextlib
import importlib.util
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

import pytest

import replay as replay_package
from capture.storage.dataset import Dataset
from replay.distribution.ray_cluster import Cluster, ClusterError, connected
from replay.isolation import processes
from tests.factories import random_call, save_calls
from tests.in_this_process import RunCli

REPOSITORY = Path(replay_package.__file__).resolve().parent.parent
QUICK = ("--rounds", "3", "--kernels")

with_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None or sys.platform != "linux",
    reason="needs Ray (pip install 'attention-replay[ray]') and /proc",
)


class Replays(NamedTuple):
    """Runs the command in separate processes, which must not leave processes behind."""

    variables: dict[str, str]
    """Environment variables of every child; MARK distinguishes them from other processes."""

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "replay", *map(str, arguments)],
            env={**os.environ, **self.variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=240)
        return process.returncode, out, err


@pytest.fixture
def replays(tmp_path: Path) -> Iterator[Replays]:
    yield Replays({"MARK": str(tmp_path), "PYTHONPATH": str(REPOSITORY)})
    wait_until_all_ended(str(tmp_path))


def wait_until_all_ended(mark: str) -> None:
    """Wait for processes with a mark; a worker ends within a second after its parent."""
    deadline = time.monotonic() + 100
    while left := [path for path in Path("/proc").glob("[0-9]*/environ") if is_of(path, mark)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def is_of(environment: Path, mark: str) -> bool:
    try:
        return f"MARK={mark}".encode() in environment.read_bytes().split(b"\0")
    except OSError:
        return False


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, IO[str]]]:
    """Address of a cluster at 127.0.0.1, and a stream: a line written to it kills a node."""
    variables = {"MARK": str(tmp_path_factory.mktemp("cluster"))}
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("two_nodes.py"))],
        env={**os.environ, **variables, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process.stdout.readline().strip(), process.stdin
    finally:
        process.communicate(timeout=200)
    wait_until_all_ended(variables["MARK"])


@pytest.fixture
def address(replays: Replays, two_nodes: tuple[str, IO[str]]) -> str:
    """Address of a cluster that the replays can join."""
    replays.variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return two_nodes[0]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for_rows(count: int, path: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a running command has written rows."""
    deadline = time.monotonic() + 200
    while not (path.exists() and path.read_text().count("\n") >= count):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


STARTS_ANOTHER = """
import os, time
from torch.nn.functional import scaled_dot_product_attention

copies = []

def attention(query, key, value, *others, **options):
    if not copies:
        copies.append(os.fork())
        if copies == [0]:
            time.sleep(120)  # what a kernel starts ends with the command
            os._exit(0)
    return scaled_dot_product_attention(query, key, value, *others, **options)
"""


def listeners(family: Iterable[int]) -> Iterator[str]:
    """Yield the addresses where processes listen, as /proc states them, in hexadecimal."""
    sockets: set[str] = set()
    for each in family:
        with contextlib.suppress(OSError):
            sockets |= {os.readlink(file) for file in Path(f"/proc/{each}/fd").iterdir()}
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                yield fields[1].partition(":")[0]


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}


@pytest.mark.slow
@with_ray
def test_own_cluster_answers_only_here(replays: Replays, recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(STARTS_ANOTHER)
    rows = tmp_path / "rows.jsonl"
    kernel = f"{tmp_path / 'mine.py'}:attention"
    process = replays.start("--dir", recorded, *QUICK, kernel, "--json", rows, "-q", "--ray")
    found_listening: set[str] = set()
    while process.poll() is None:
        found_listening |= set(listeners(processes.family(process.pid)))
        time.sleep(0.2)
    code, (out, err) = process.returncode, process.communicate()
    assert (code, err) == (0, "")
    assert "Ray" not in out
    found = [(row["call"]["name"], row["kernel"], row["status"]) for row in rows_of(rows)]
    assert found == [
        (f"model-{index:06d}", name, "ok") for index in range(3) for name in (kernel, "torch-math")
    ]
    assert {row["host"] for row in rows_of(rows)} == {os.uname().nodename}
    assert found_listening == LOOPBACK


@pytest.mark.slow
@with_ray
def test_node_with_an_environment_without_torch_is_left_out(
    replays: Replays, address: str, recorded: Path, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ -z "$SECOND_NODE" ] || set -- -S "$@"\nexec {sys.executable} "$@"\n'
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "mine.py").write_text(
        "from torch.nn.functional import scaled_dot_product_attention as attend"
    )
    rows, mine = tmp_path / "rows.jsonl", f"{tmp_path / 'mine.py'}:attend"
    arguments = ("--dir", recorded, "--call", "model-000000", *QUICK, mine, "--json", rows)
    code, _, err = replays(*arguments, "--env", f"other={python}", "--ray", address)
    assert code == 0, err
    (left_out,) = [line for line in err.splitlines() if "left out" in line]
    assert "environment other" in left_out
    assert "No module named 'torch'" in left_out
    found = rows_of(rows)
    (host,) = {row["host"] for row in found}
    assert host not in left_out
    places = {(row["kernel"], row["environment"], row["status"]) for row in found}
    assert places == {(mine, "this", "ok"), (mine, "other", "ok"), ("torch-math", "this", "ok")}


@pytest.mark.slow
@with_ray
def test_ctrl_c_leaves_rows(replays: Replays, address: str, recorded: Path, tmp_path: Path) -> None:
    first = float(Dataset.open(recorded)[0].query.abs().max())
    (tmp_path / "stalls.py").write_text(STALLS.format(first=first))
    rows = tmp_path / "rows.jsonl"
    kernel = f"{tmp_path / 'stalls.py'}:stall"
    process = replays.start("--dir", recorded, *QUICK, kernel, "--json", rows, "--ray", address)
    wait_for_rows(2, rows, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 130
    assert "replay: interrupted" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert [row["call"]["name"] for row in rows_of(rows)] == ["model-000000"] * 2


STALLS = """
import time
from torch.nn.functional import scaled_dot_product_attention

def stall(query, key, value, *others, **options):
    if float(query.abs().max()) != {first}:
        time.sleep(3600)
    return scaled_dot_product_attention(query, key, value, *others, **options)
"""


@pytest.mark.slow
@with_ray
def test_node_that_dies_costs_no_row(
    replays: Replays,
    address: str,
    two_nodes: tuple[str, IO[str]],
    tmp_path: Path,
) -> None:
    """This test runs last, because it leaves the cluster with one node."""
    rows, others = tmp_path / "rows.jsonl", ["torch-flash", "torch-efficient", "torch-cudnn"]
    by_math = {"backend": "torch-math", "disabled_backends": others}
    calls = (random_call(seed=at, origin={**by_math, "call_index": at}) for at in range(80))
    directory = save_calls(tmp_path / "many", calls)
    arguments = ("--dir", directory, *QUICK, "torch-math", "--json", rows)
    process = replays.start(*arguments, "--ray", address)
    wait_for_rows(10, rows, process)
    print("kill", file=two_nodes[1], flush=True)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "Raylet" not in out + err
    found = rows_of(rows)
    assert [row["call"]["name"] for row in found] == [f"model-{index:06d}" for index in range(80)]
    on_a_busy_machine = "something changed the timer"
    assert not [
        row for row in found if row["status"] != "ok" and on_a_busy_machine not in row["reason"]
    ]
    assert len({row["host"] for row in found}) == 2
    (lost,) = {flag for row in found for flag in row["flags"] if flag.startswith("measured after")}
    host = lost.split()[2]
    assert f"replay: {host} is given up: {host} is gone" in err
    retried = [row for row in found if lost in row["flags"]]
    assert retried
    assert host not in {row["host"] for row in retried}


def test_missing_ray_is_refused_with_its_remedy(
    run_cli: RunCli, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = run_cli("--dir", str(recorded), "--ray")
    assert (code, err) == (2, "replay: --ray needs Ray: pip install 'attention-replay[ray]'\n")


@pytest.fixture
def a_ray(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand-in for Ray, with an empty cluster."""
    found = SimpleNamespace(init=lambda *_, **__: None, nodes=list, shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", found)
    return found


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:9", "nothing answers there .*: check the address that `ray start --head`"),
        ("ray://127.0.0.1:10001", "write HOST:PORT as `ray start --head` prints it"),
        ("somewhere", "write HOST:PORT"),
        ("127.0.0.1:99999", "write HOST:PORT"),
        ("127.0.0.1:0", "write HOST:PORT"),
    ],
)
@pytest.mark.usefixtures("a_ray")
def test_address_without_a_cluster_is_refused(address: str, reason: str) -> None:
    with pytest.raises(ClusterError, match=f"^--ray {address}: {reason}"), connected(address):
        pass


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("Version mismatch:\n    Ray: 2.49.0"), "Ray says: Version mismatch: Ray: 2"),
        (RuntimeError("no authentication token"), "the cluster asks for a token: set RAY_AUTH_"),
        (ConnectionError("Could not find any running Ray instance."), "no cluster runs on this"),
        (RuntimeError("the raylet died"), "this machine is not a node of the cluster"),
    ],
)
def test_refusal_of_ray_has_a_remedy(a_ray: SimpleNamespace, error: Exception, reason: str) -> None:
    def init(address: str, **_: object) -> None:
        try:
            raise error
        except (RuntimeError, ConnectionError) as cause:
            raise RuntimeError("Ray failed" if reason[:4] != "Ray " else str(error)) from cause

    a_ray.init = init
    with pytest.raises(ClusterError, match=f"^--ray auto: {reason}"), connected("auto"):
        pass


def test_sigterm_counts_as_ctrl_c_and_the_cluster_ends(a_ray: SimpleNamespace) -> None:
    """Ray's own handler would exit before the processes of the fleet have ended."""
    ended: list[bool] = []
    a_ray.init = lambda *_, **__: signal.signal(signal.SIGTERM, signal.SIG_IGN)
    a_ray.shutdown = lambda: ended.append(True)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt), connected("local"):
            signal.raise_signal(signal.SIGTERM)
        assert ended
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def node(host: str, node_id: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    """Return a node as Ray lists it."""
    return {"Alive": alive, "NodeID": node_id, "NodeManagerHostname": host, "Resources": resources}


def test_gpus_are_separate_devices() -> None:
    cluster = Cluster(
        [
            node("head", "a1", CPU=8.0),
            node("one", "b2", CPU=33.0, GPU=2.0),
            node("two", "c3", CPU=16.0, GPU=1.0),
            node("gone", "d4", alive=False, CPU=16.0, GPU=8.0),
        ]
    )
    assert cluster.device.type == "cuda"
    assert [(each.host, each.share, each.cpus) for each in cluster.places] == [
        ("one", (0, 2), 16),
        ("one", (1, 2), 16),
        ("two", (0, 1), 16),
    ]


def test_node_without_gpus_is_one_device_with_its_own_name() -> None:
    cluster = Cluster([node("host", "aaaaaa1", CPU=2.0), node("host", "bbbbbb2", CPU=4.0)])
    assert cluster.device.type == "cpu"
    assert [(each.host, each.share, each.cpus) for each in cluster.places] == [
        ("host-aaaaaa", (0, 1), 2),
        ("host-bbbbbb", (0, 1), 4),
    ]
