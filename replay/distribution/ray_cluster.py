"""The devices of a Ray cluster, for measurements with `replay --ray`.

Ray starts a `replay.distribution.node.Node` for each device, and carries its messages. The fleet
distributes the calls, as on one host.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import secrets
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch

from attention_replay import __version__
from attention_replay.errors import Error
from capture.errors import MissingPackage
from replay.bench.settings import Settings
from replay.distribution.device_slots import Device
from replay.distribution.fleet import DeviceSlot, Fleet, running_fleet
from replay.distribution.node import Introduction, Node
from replay.distribution.transfer import FileFacts
from replay.kernels.registry import Kernel
from replay.rows.row import KernelId, Machine, Row
from replay.workers.environment_options import WorkerError
from replay.workers.execution import Assignment, Findings, Progress
from replay.workers.process import Stopped
from replay.workloads.schedule import Schedule
from replay.workloads.sources import Source
from replay.workloads.workload import Workload

logger = logging.getLogger(__name__)

CONNECTING_SECONDS = 5.0
STARTING_SECONDS = 300.0
"""Time limit for a node's workers to import PyTorch, possibly from a cold network disk."""
LOOK_SECONDS = 0.5
"""Interval between two checks for a request to stop the replay."""
ANSWERING_SECONDS = 120.0
"""Time limit for a node to report whether a device still works."""

LAST_PORT = 0xFFFF

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "1",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # messages about nodes that die, on stdout
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
}
"""Environment variables that keep Ray from printing and from sending usage reports."""
SILENT: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
"""Arguments of `ray.init` that silence Ray."""

REMEDIES = {
    "AuthenticationError|authentication token": (
        "the cluster asks for a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file "
        "with its token"
    ),
    "Could not find any running Ray instance": (
        "no cluster runs on this machine: start one with `ray start`, or leave out the address"
    ),
    "node_ip_address.json|No node info found|raylet": (
        "this machine is not a node of the cluster: run the command on one of its nodes"
    ),
}
"""Sentences for Ray's errors, keyed by a pattern that occurs in the error's message."""

WORKERS_END_THEMSELVES = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Environment variable that keeps Ray from killing workers. A killed worker could not end the
processes of its kernels."""


class ClusterError(Error):
    """Error for an unusable cluster; the message names the remedy."""


@dataclass(frozen=True)
class NodeDevice:
    """Device of a node, before workers run on the device."""

    node_id: str
    host: str
    share: tuple[int, int]
    """Index of the device on its node, and number of the node's devices."""
    cpus: float
    """Number of CPUs that are reserved with the device."""


class Cluster:
    """Ray cluster that this process is connected to.

    If any node has a GPU, all GPUs are used, with one call at a time on each GPU. Otherwise each
    node measures on its CPU.
    """

    def __init__(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        alive = [node for node in nodes if node["Alive"]]
        self.device = torch.device("cuda" if any(map(_gpus, alive)) else "cpu")
        names = Counter(node["NodeManagerHostname"] for node in alive)
        self.places: list[NodeDevice] = []
        for node in alive:
            host, node_id = node["NodeManagerHostname"], node["NodeID"]
            if names[host] > 1:
                host = f"{host}-{node_id[:6]}"
            count = _gpus(node) if self.device.type == "cuda" else 1
            cpus = node["Resources"].get("CPU", 0.0)
            if self.device.type == "cpu" and not cpus:
                continue  # a head node that runs no work
            for number in range(count):
                self.places.append(NodeDevice(node_id, host, (number, count), cpus // count))

    @contextlib.contextmanager
    def fleet(
        self, interpreters: dict[str, str], timeout: float, stopped: threading.Event
    ) -> Iterator[Fleet]:
        """Start workers on every device; all end with the `with` block.

        A device whose workers do not work is left out and reported on stderr.

        Raises:
            ClusterError: the workers do not work on any device.
        """
        with contextlib.ExitStack() as stack:
            slots = self._slots(interpreters, timeout, stopped, stack)
            yield stack.enter_context(running_fleet(slots, stopped))

    def _slots(
        self,
        interpreters: dict[str, str],
        timeout: float,
        stopped: threading.Event,
        stack: contextlib.ExitStack,
    ) -> list[DeviceSlot]:
        locks = {place.node_id: threading.Lock() for place in self.places}
        started = []
        for place in self.places:
            actor = _actor(place, self.device, interpreters, timeout)
            workers = RemoteWorkers(actor, place.host, locks[place.node_id], stopped)
            stack.callback(workers.close)
            started.append((place, workers, actor.start.remote(self.device.type)))
        slots: list[DeviceSlot] = []
        deadline = time.monotonic() + STARTING_SECONDS
        reasons: list[str] = []
        for place, workers, answer in started:
            try:
                slots.append(self._slot(place, workers, answer, deadline, slots))
            except WorkerError as error:
                reasons.append(str(error))
        if not slots:
            raise ClusterError(f"--ray: {reasons[0] if reasons else 'the cluster has no node'}")
        for reason in reasons:
            logger.warning("replay: left out: %s", reason)
        return slots

    def _slot(
        self,
        place: NodeDevice,
        workers: RemoteWorkers,
        answer: Any,
        deadline: float,
        others: Sequence[DeviceSlot],
    ) -> DeviceSlot:
        """Wait until the workers of a device have started, and check the versions."""
        node: Introduction = workers.get(answer, deadline)
        if node.version != __version__:
            raise WorkerError(
                f"{place.host} has version {node.version} of attention-replay, and this is "
                f"{__version__}: install the same"
            )
        workers.machine = node.machine
        for other in others:
            (machine,) = other.workers.machines(self.device)
            if unlike := _unlike(node.machine, machine):
                raise WorkerError(
                    f"{place.host} has {unlike[0]}, and {other.device.host} has {unlike[1]}: "
                    "install the same on all nodes"
                )
        name = f"GPU {node.index} of {place.host}" if node.index else place.host
        device = Device(name, node.machine.device, node.uuid, host=place.host)
        return DeviceSlot(device, workers)


class RemoteWorkers:
    """Workers of one device, reached through Ray.

    Args:
        actor: Ray's handle of a `Node`.
        host: name of the node, for messages.
        sending: lock that is held while a file is sent to the node.
        stopped: event that any thread sets to stop the replay.
    """

    at_a_time = 1

    def __init__(
        self, actor: Any, host: str, sending: threading.Lock, stopped: threading.Event
    ) -> None:
        self._actor = actor
        self._host = host
        self._sending = sending
        self._stopped = stopped
        self.machine = Machine()

    def machines(self, device: torch.device) -> list[Machine]:
        return [self.machine]

    def probe(self, kernels: Sequence[Kernel], device: torch.device) -> Findings:
        found: Findings = self.get(self._actor.probe.remote(_names(kernels), str(device)))
        return found

    def replay(
        self, schedule: Schedule, assigned: Assignment, settings: Settings, report: Progress
    ) -> Iterator[Row]:
        """Yield the rows of calls; files are sent to the node first if needed.

        Raises:
            WorkerError: the node is lost, or failed for a reason other than a kernel.
            Stopped: the replay was stopped.
        """
        for workload in schedule:
            yield from self._work_on_call(self._actor.replay, workload, assigned, settings, report)

    def first_calls(
        self, workload: Workload, assigned: Assignment, settings: Settings, report: Progress
    ) -> dict[KernelId, float]:
        """Call each kernel once; return the milliseconds of these first calls."""
        found: dict[KernelId, float] = self._work_on_call(
            self._actor.first_calls, workload, assigned, settings, report
        )
        return found

    def work_on(self, device: torch.device) -> bool:
        """Return whether a new worker can compute anything on the device."""
        try:
            deadline = time.monotonic() + ANSWERING_SECONDS
            return bool(self.get(self._actor.work_on.remote(str(device)), deadline))
        except WorkerError:
            return False

    def close(self) -> None:
        """End the processes on the node."""
        import ray

        ray.kill(self._actor)

    def get(self, answer: Any, deadline: float = math.inf) -> Any:
        """Return the node's reply."""
        import ray
        from ray.exceptions import RayError

        while not ray.wait([answer], timeout=LOOK_SECONDS)[0]:
            if self._stopped.is_set():
                raise Stopped
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"{self._host} does not answer: it is busy with other work, or gone"
                )
        try:
            return ray.get(answer)
        except RayError as error:
            raise WorkerError(_in_a_sentence(self._host, error)) from error

    def _work_on_call(
        self,
        method: Any,
        workload: Workload,
        assigned: Assignment,
        settings: Settings,
        report: Progress,
    ) -> Any:
        if self._stopped.is_set():
            raise Stopped
        source = self._sent(workload.source)
        report(workload, "running")
        names = {name: _names(kernels) for name, kernels in assigned.items()}
        return self.get(method.remote(source, names, settings))

    def _sent(self, source: Source) -> Source:
        """Send files that the node lacks; return the call's source with paths on the node."""
        files = []
        for path in source.files():
            with contextlib.suppress(OSError):  # the node will report an unreadable file
                files.append(FileFacts.of(path))
        if not files:
            return source
        with self._sending:
            directory, missing = self.get(self._actor.expect.remote(files))
            for facts in missing:
                content = facts.path.read_bytes()
                self.get(self._actor.receive.remote(facts, content, directory))
        return source.moved_to(directory)


@contextlib.contextmanager
def connected(address: str) -> Iterator[Cluster]:
    """Connect to a Ray cluster for the `with` block.

    Args:
        address: address of the head node, `auto` for the cluster that this machine belongs to, or
            `local` to start a cluster on this machine.

    Raises:
        MissingPackage: Ray is not installed.
        ClusterError: the cluster cannot be used.
    """
    is_ours = address == "local"
    with contextlib.ExitStack() as stack:
        stack.enter_context(_variables({**QUIET, **_private_cluster()} if is_ours else QUIET))
        try:
            import ray
        except ModuleNotFoundError as error:
            raise MissingPackage("--ray needs Ray: pip install 'attention-replay[ray]'") from error
        options = dict(SILENT)
        if is_ours:
            directory = stack.enter_context(TemporaryDirectory(prefix="replay-"))
            options |= {"include_dashboard": False, "_temp_dir": directory}
        elif address != "auto":
            _check(address)
        before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
        stack.callback(signal.signal, signal.SIGTERM, before)
        stack.callback(ray.shutdown)
        try:
            ray.init(address, **options)
            nodes = ray.nodes()
        except Exception as error:
            raise ClusterError(f"--ray {address}: {_why_not(error)}") from error
        # Ray's own handler exits before the fleet has ended its processes.
        as_ctrl_c = signal.default_int_handler
        signal.signal(signal.SIGTERM, as_ctrl_c if before == signal.SIG_DFL else before)
        yield Cluster(nodes)


@contextlib.contextmanager
def _variables(wanted: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _private_cluster() -> dict[str, str]:
    """Return variables for a new cluster that listens only on 127.0.0.1 and requires a token."""
    return {
        # Ray reads this variable on every system, despite its name.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }


def _check(address: str) -> None:
    """Check that a server answers at HOST:PORT, because Ray would wait for minutes."""
    found = re.fullmatch(r"\[?([^\s/\[\]]+)\]?:([0-9]{1,5})", address)
    if found is None or not 0 < int(found[2]) <= LAST_PORT:
        raise ClusterError(
            f"--ray {address}: write HOST:PORT as `ray start --head` prints it, auto for the "
            f"cluster that this machine is a node of, or no address to start one here (ports are "
            f"1-{LAST_PORT}, usually 6379)"
        )
    try:
        socket.create_connection((found[1], int(found[2])), CONNECTING_SECONDS).close()
    except OSError as error:
        raise ClusterError(
            f"--ray {address}: nothing answers there ({error}): check the address that `ray start "
            "--head` printed, and the firewall"
        ) from error


def _why_not(error: BaseException) -> str:
    """Return a sentence about Ray's error, with a remedy if the error is known."""
    texts = [type(error).__name__, str(error)]
    cause = error.__cause__ or error.__context__
    while cause is not None:
        texts.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    text = " ".join(texts)
    for pattern, remedy in REMEDIES.items():
        if re.search(pattern, text, re.IGNORECASE):
            return remedy
    return f"Ray says: {' '.join(str(error).split())}"


def _gpus(node: Mapping[str, Any]) -> int:
    return int(node["Resources"].get("GPU", 0))


def _actor(
    place: NodeDevice, device: torch.device, interpreters: dict[str, str], timeout: float
) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote_node = ray.remote(Node).options(
        num_gpus=1 if device.type == "cuda" else 0,
        num_cpus=place.cpus,
        scheduling_strategy=NodeAffinitySchedulingStrategy(place.node_id, soft=False),
        runtime_env={"env_vars": WORKERS_END_THEMSELVES},
    )
    return remote_node.remote(place.share, os.getcwd(), interpreters, timeout)


def _names(kernels: Sequence[Kernel]) -> list[str]:
    return [kernel.name for kernel in kernels]


def _unlike(machine: Machine, other: Machine) -> tuple[str, str] | None:
    """Return a version that differs between two machines with the same type of device, or None."""
    if machine.device != other.device:
        return None
    for name in ("python", "torch", "cuda", "cudnn", "triton", "threads"):
        ours, theirs = getattr(machine, name), getattr(other, name)
        if ours != theirs:
            return f"{name} {ours}", f"{name} {theirs}"
    return None


def _in_a_sentence(host: str, error: Exception) -> str:
    text, cause = str(error), getattr(error, "cause", None)
    if isinstance(cause, Error):
        return f"{host}: {cause}"
    logger.info("%s: %s", host, text.strip())
    if missing := re.search(r"No module named '([^']+)'", text):
        return f"{host} lacks {missing[1]}: pip install 'attention-replay[ray]' there"
    if cause is not None:
        return f"{host}: {type(cause).__name__}: {cause}"
    return f"{host} is gone, or Ray's process there"
