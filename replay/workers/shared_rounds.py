"""The replay of calls by several workers that share their rounds.

The parent gives each worker its turns, and stops all others. So a user's file can slow down only
itself, and the samples of a round are paired, also between processes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from replay.bench.reported_stages import DONE, STAGES
from replay.bench.settings import Settings
from replay.bench.speedups import with_speedups
from replay.isolation import processes
from replay.isolation.probe import Probe
from replay.kernels.registry import Kernel, find
from replay.rows.agreement import with_agreement
from replay.rows.row import DEFAULT_BASELINE, HERE, KernelId, Row
from replay.workers.conversation import PHASES, Conversation, Task
from replay.workers.environments import Environment, Worker
from replay.workers.judge_process import JudgeProcess
from replay.workers.process import MOST_WORKERS
from replay.workloads.workload import Workload

NOT_ISOLATED = (
    "not isolated: this system cannot stop a kernel's processes while other kernels are timed"
)
"""Flag of all rows that share rounds with a user's kernel on such a system."""

Part = tuple[Worker, list[Kernel]]


def replay_in_workers(
    workloads: Iterable[Workload],
    kernels: dict[str, list[Kernel]],
    settings: Settings,
    environments: dict[str, Environment],
    judge: JudgeProcess,
    on_progress: Callable[[Workload, str], None] | None = None,
) -> Iterator[Row]:
    """Yield the same rows as `replay.bench.runner.replay_here`, from workers, call by call."""
    numbers = itertools.count(1)
    fixed, others = _parts(kernels, settings, environments)
    probe = None
    if settings.device.type == "cuda" and any(worker.name for worker, _ in (*fixed, *others)):
        probe = Probe(lambda: judge.probe_ms(settings))
        probe.is_slow()  # measures the fastest probe before any user's kernel has run
    step = MOST_WORKERS - len(fixed)
    for workload in workloads:

        def report(environment: str, stage: str, workload: Workload = workload) -> None:
            if on_progress is not None:
                is_kernel = stage not in STAGES
                on_progress(workload, str(KernelId(stage, environment)) if is_kernel else stage)

        rows: list[Row] = []
        for start in range(0, max(len(others), 1), step):
            # Later groups share their rounds only with the workers of special kernels.
            first = fixed if start == 0 else [(worker, []) for worker, _ in fixed]
            group = [*first, *others[start : start + step]]
            for worker, _ in others if len(others) > step else ():
                if worker not in [each for each, _ in group]:
                    worker.process.close()
            task = Task(workload, settings, judge, report, str(next(numbers)))
            found = _replay_together(group, task, probe)
            have = {(row.kernel, row.environment) for row in rows}
            rows += [row for row in found if (row.kernel, row.environment) not in have]
            if any(not row.kernel for row in rows):  # no worker can read the call
                break
        yield from with_agreement(_in_order(rows, kernels))
        if on_progress is not None:
            on_progress(workload, DONE)


def _parts(
    kernels: dict[str, list[Kernel]], settings: Settings, environments: dict[str, Environment]
) -> tuple[list[Part], list[Part]]:
    """Return workers with their kernels: workers of special kernels first, and then all others.

    Special kernels are the baseline and the kernel that errors are computed against. The latter's
    worker is the very first, because the judge needs its output.
    """
    special = filter(None, (settings.compared_kernel, settings.baseline or DEFAULT_BASELINE))
    fixed = dict.fromkeys((HERE, find(name).process) for name in special)
    parts: dict[tuple[str, str], list[Kernel]] = {place: [] for place in fixed}
    for name, environment in environments.items():
        divided = environment.divided(kernels.get(name, ()), str(settings.device))
        for process, own in divided.items():
            parts.setdefault((name, process), []).extend(own)
    found = [(environments[name].worker(process), own) for (name, process), own in parts.items()]
    return found[: len(fixed)], found[len(fixed) :]


def _replay_together(group: Sequence[Part], task: Task, probe: Probe | None) -> list[Row]:
    """Return the rows of workers that share their rounds, with speed-ups over the baseline."""
    talks = [Conversation(worker, kernels, task) for worker, kernels in group]
    turns, order = _Turns(talks, probe), random.Random(task.settings.seed)
    is_whole = False
    while not is_whole:
        for talk in (each for each in talks if not each.is_waiting):
            turns.stop_others(talk)
            talk.begin()
            if talk.is_unreadable:
                return talk.rows
        # If one worker has to begin again, all others must too, because their rounds are paired.
        is_whole = all(
            _share_rounds(talks, turns, order)
            and all(turns.give(talk) and talk.finish() for talk in talks)
            for _ in range(PHASES)
        )
        if not is_whole:
            _give_up(talks, turns)
    baseline = next((talk.baseline for talk in talks if talk.baseline), "")
    rows = [row for talk in talks for row in talk.rows]
    if not processes.IS_POSSIBLE and any(talk.worker.name for talk in talks):
        rows = [replace(row, flags=(*row.flags, NOT_ISOLATED)) for row in rows]
    return with_speedups(rows, baseline)


def _give_up(talks: Sequence[Conversation], turns: _Turns) -> None:
    """Let workers in the block phase finish, because a restarted worker has no samples to pair."""
    for talk in talks:
        turns.stop_others(talk)
        while talk.is_waiting and talk.phase > 1:
            talk.finish()


def _share_rounds(talks: Sequence[Conversation], turns: _Turns, order: random.Random) -> bool:
    """Give all workers their turns; return False if all must begin the call again."""
    number = 0
    while any(number < talk.rounds and not talk.is_done for talk in talks):
        # The worker of known kernels takes turns to the end, because it has the baseline.
        sharing = [
            talk
            for talk in talks
            if number < talk.rounds and not (talk.is_done and talk.worker.name)
        ]
        order.shuffle(sharing)
        if number == 0:  # known kernels measure blocks without a kernel first
            sharing.sort(key=lambda talk: bool(talk.worker.name))
        number += 1
        for talk in sharing:
            after_another = turns.last not in (None, talk)
            if not (turns.give(talk) and talk.turn(number - 1, after_another=after_another)):
                if any(each.phase > 1 for each in talks if each.is_waiting):
                    return False  # blocks cannot be repeated without samples
                number = 0  # rounds stay paired only if all workers begin them again
                break
    return True


class _Turns:
    """The turns of workers: only one worker runs at a time."""

    def __init__(self, talks: Sequence[Conversation], probe: Probe | None) -> None:
        self._talks = talks
        self._probe = probe
        self.last: Conversation | None = None

    def stop_others(self, talk: Conversation) -> None:
        """Stop all workers except one."""
        for each in self._talks:
            if each is not talk:
                each.worker.process.stop()
        self.last = talk

    def give(self, talk: Conversation) -> bool:
        """Stop all workers except one.

        Returns:
            False if another worker continued to work, and was therefore ended and begun again.
        """
        last = self.last
        self.stop_others(talk)
        for each in self._talks:
            if each.worker.name and each is not talk and each.worker.process.ran_while_stopped():
                each.worker.process.close()
                each.worker.disturbances += 1
                self.stop_others(each)
                each.begin()
                return False
        if self._probe is None or last is None or last is talk:
            return True
        suspects = [each for each in self._talks if each.worker.name]
        suspects.sort(key=lambda each: (each is not last, each is talk))
        count, found = self._probe.ended([each.worker.process.close for each in suspects])
        if count == 0:
            return True
        suspects[count - 1].worker.disturbances += found
        for each in suspects[:count]:
            self.stop_others(each)
            each.begin()
        return False


def _in_order(rows: Sequence[Row], kernels: dict[str, list[Kernel]]) -> list[Row]:
    """Sort rows in the order of their environments and kernels; added baselines come last."""
    order = {
        (name, kernel.name): place
        for place, (name, kernel) in enumerate(
            (name, kernel) for name, own in kernels.items() for kernel in own
        )
    }
    last = len(order)
    return sorted(rows, key=lambda row: order.get((row.environment, row.kernel), last))
