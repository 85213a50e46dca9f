"""Stages of a tuning: record, compare kernels, search for a plan, and measure it in the model."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from capture.errors import described
from capture.text.counted import counted
from replay.api.call_choices import RecordedCalls
from replay.api.choices import MeasureChoice, ReplayRequest, RunPlace
from replay.api.messages import say
from replay.api.session import Session
from replay.api.tuning_planner import expected_trials, planner_of
from replay.api.tuning_recording import recorded
from replay.api.tuning_sparsity import MOST_CALLS, check_device, sparse_candidates
from replay.api.verify_model import as_json
from replay.distribution.time_limit import TimeLimit
from replay.tune.tuning import Tuning

if TYPE_CHECKING:
    from torch import Tensor

    from capture.storage.call_file import FileEntry
    from capture.storage.capture_record import CaptureRecord
    from replay.end_to_end.model_check import ModelResult
    from replay.plan.plan import Plan
    from replay.rows.row import Row
    from replay.sketches.make_sketch import Columns
    from replay.sketches.sketch import ErrorSketch
    from replay.sparsity.kernel import SparseKernel
    from replay.tune.directory import TuningDirectory
    from replay.tune.judge import Judge
    from replay.tune.judged_runs import JudgedRuns
    from replay.tune.quality import Quality, QualityBudget
    from replay.tune.search import Planner, Trial

LEAST_SAVED = 0.02
"""Smallest share of a run that the cheapest kernels must save for a tuning to go on."""

THREADS = "OMP_NUM_THREADS"
"""Environment variable with the number of threads that PyTorch starts with."""

WORTH_MORE_TIME = 0.03
"""Least share of the model's time in attention for which a second tuning is suggested."""

SKETCHING = 0.25
"""Share of the remaining time limit that foretelling errors may take."""

LEAST_PROMPTS = 8
"""Smallest number of prompts whose sketch chooses plans for other prompts. Plans chosen by the
sensitivities of four prompts held less often on others than plans chosen by single errors."""

PASS = 2.0
"""Time of a pass with gradients, in runs."""

COMPARING = EXAMINING = 0.5
"""Shares of the remaining time limit that comparing kernels may take, and then examining calls for
sparse attention."""


@dataclass(frozen=True)
class Best:
    """Best plan of a tuning, before it is measured."""

    trial: Trial
    rows: list[Row]
    """Rows of the recorded calls."""
    capture: CaptureRecord
    run_ms: float
    """Time of a run with the model's own attention."""


@dataclass
class Stages:
    """Stages of a tuning, in the order of the methods."""

    runnable: Any
    budget: QualityBudget
    files: TuningDirectory
    kernels: str | None
    rounds: int
    limit: TimeLimit
    quiet: bool
    runs: JudgedRuns
    sparse: SparseKernel | None = None
    """Block-sparse kernel to choose from too; None for none."""
    _left_out: str = field(default="", init=False)
    """Description of the calls and kernels that there was no time to compare, and that no compared
    call stands for."""

    def result(self) -> Tuning:
        """Run all stages; return the plan, or the reason why there is none."""
        found = self.best()
        if isinstance(found, Tuning):
            return found
        checks = self._verified(found)
        return self._concluded(found.trial, found.rows, checks)

    def best(self) -> Best | Tuning:
        """Run all stages but the last; return the best plan, or the reason why there is none."""
        from replay.tune.compared_calls import with_nearest

        if self.sparse is not None:
            check_device(self.sparse, self.runnable.roots)
        search, accept = self._judges()
        self._say("running the model twice with its own attention")
        with self._shown(search, 2):
            run_ms = 1000 * search.run_baseline()
        most = None if self.sparse is None else MOST_CALLS
        capture = recorded(self.runnable, self._run_once, self.files, quiet=self.quiet, most=most)
        share = capture.attention_share
        if share is not None and share < LEAST_SAVED:
            return Tuning(
                f"nothing to tune: attention takes {share:.1%} of the model's time, so no kernel "
                f"can save {LEAST_SAVED:.0%} of a run"
            )
        rows = self.compared(capture)
        entries = self.recorded_calls()
        planned = with_nearest(rows, entries)
        if {entry.path.stem for entry in entries} <= {row.call.name for row in planned}:
            self._left_out = ""
        planner, low, high = self._planner(capture, planned, entries, search, run_ms)
        ceiling = planner(high).saved_ms / run_ms
        if ceiling < LEAST_SAVED:
            return self._too_little(ceiling, run_ms, rows, share)
        trial = self.chosen(search, accept, planner, low, high)
        if isinstance(trial, str):
            return Tuning(trial, rows=rows)
        return Best(trial, rows, capture, run_ms)

    def _planner(
        self,
        capture: CaptureRecord,
        rows: list[Row],
        entries: list[FileEntry],
        search: Judge,
        run_ms: float,
    ) -> tuple[Planner, float, float]:
        """Return the planner and its limits; its plans may have sparse attention too."""
        if self.sparse is None:
            names = [*dict.fromkeys(row.kernel for row in rows if row.status == "ok")]
            is_sure = not self.runs.kept or len(self.runs.searched) >= LEAST_PROMPTS
            sketch = self._sketch(search, names, run_ms) if is_sure else None
            return planner_of(capture, rows, sketch)
        from replay.sparsity.foretold_sensitivity import DIRECTIONS, by_head, kernels_of

        device = self._device(capture)
        candidates, unexamined = sparse_candidates(
            self.sparse, self.files, entries, rows, device, self._part(EXAMINING), quiet=self.quiet
        )
        self._left_out = " and ".join(filter(None, [self._left_out, unexamined]))
        sketch = None
        if candidates.calls:
            names = kernels_of(self.sparse.name)
            sketch = self._sketch(search, names, run_ms, DIRECTIONS, by_head)
        return planner_of(capture, rows, sketch, sparse=candidates)

    def _too_little(
        self, ceiling: float, run_ms: float, rows: list[Row], share: float | None
    ) -> Tuning:
        """Return the result if the measured speed-ups save too little of a run.

        Args:
            share: attention's share of the model's time; None if it is unknown.
        """
        saved = (
            f"the cheapest kernel at every layer saves {max(ceiling, 0):.1%} of a run of "
            f"{run_ms / 1000:.3g} s, less than {LEAST_SAVED:.0%}"
        )
        busy = sum(map(_is_hidden, rows))
        if not (busy or self._left_out):
            return Tuning(f"nothing to tune: {saved}", rows=rows)
        hidden = []
        if busy:
            hidden.append(f"a busy machine hid {counted(busy, 'speed-up')}")
        if self._left_out:
            hidden.append(f"time ran out with {self._left_out}")
        where = "with more time" if self._left_out else "on a quiet machine"
        remedy = f"tune again {where} to measure them"
        if share is not None and share < WORTH_MORE_TIME:
            remedy = f"attention takes {share:.1%} of the model's time, so they can gain little"
        return Tuning(
            f"undecided: {' and '.join(hidden)}, and without these {saved}; {remedy}",
            rows=rows,
            is_undecided=True,
        )

    def _judges(self) -> tuple[Judge, Judge | None]:
        """Return the judges of the search and of the acceptance, if there are several runs."""
        from replay.tune.judge import Judge

        search, accept = (
            Judge(self.runnable.roots, runs, self.budget)
            for runs in (self.runs.searched, self.runs.kept)
        )
        return search, accept if self.runs.kept else None

    def _run_once(self) -> Any:
        import torch

        with torch.no_grad():
            result = self.runnable.run()
        if torch.cuda.is_initialized():
            # An offloaded model appears to be on the CPU, whose clock does not wait for the GPU.
            torch.cuda.synchronize()
        return result

    def compared(self, capture: CaptureRecord) -> list[Row]:
        """Compare kernels on the recorded calls; rows that the directory holds are kept.

        Calls with a speed-up that a busy machine hid are measured again. With sparse attention,
        dense kernels are compared at one denoising step, which stands for the others.
        """
        from replay.api.measured_rows import Rows
        from replay.rows.row_files import read_jsonl, save_jsonl, write_jsonl
        from replay.tune.compared_calls import of_one_step, rounds_of_a_call

        with contextlib.suppress(FileNotFoundError):
            before, _ = read_jsonl(self.files.rows)
            if hidden := {row.call.name for row in before if _is_hidden(row)}:
                kept = (row for row in before if row.call.name not in hidden)
                save_jsonl(kept, self.files.rows)
        entries, names = self.recorded_calls(), None
        if self.sparse is not None:  # other steps are there for the errors of sparse attention
            entries = of_one_step(entries)
            names = ",".join(entry.path.stem for entry in entries)
        request = ReplayRequest(
            RecordedCalls(str(self.files.recording), names),
            self.kernels,
            MeasureChoice(rounds=rounds_of_a_call(entries, self.rounds), for_model=True),
            RunPlace(device=self._device(capture)),
            self._part(COMPARING).seconds,
            resume=self.files.rows,
        )
        request.check()
        with _as_many_threads(), Session(request, quiet=self.quiet) as session:
            for row in session.rows():
                with self.files.opened(self.files.rows, "a") as file:
                    write_jsonl([row], file)
            outcome = session.outcome()
        self._left_out = outcome.left_out
        if outcome.left_out:
            self._say(f"{outcome.left_out}: these are planned like the nearest compared call")
        named = {kernel.name for kernels in session.assigned.values() for kernel in kernels}
        # Plans made here may run code, but a resumed file may name code that the user did not.
        return Rows(row for row in outcome.rows if ".py:" not in row.kernel or row.kernel in named)

    def _sketch(
        self,
        search: Judge,
        names: list[str],
        run_ms: float,
        directions: int | None = None,
        by_head: Columns | None = None,
    ) -> ErrorSketch | None:
        """Return the sketch of kernels; None if there is no time or no gradient.

        The directory keeps it, by the outputs of the model's own attention.

        Args:
            directions: number of directions over all prompts; None for the default.
            by_head: as `replay.sketches.make_sketch.make_sketch` takes it.
        """
        import torch

        from replay.kernels.registry import find
        from replay.sketches.gradients_on import GradientError
        from replay.sketches.make_sketch import PROMPTS, RUNS, make_sketch
        from replay.sketches.sketch import ErrorSketch

        path = self.files.sketch(search.fingerprint)
        if path.exists():
            before = ErrorSketch.load(path)
            if by_head is not None or before.kernels == names:
                return before
        runs = self.runs.searched[:PROMPTS]
        passes = RUNS
        if directions is not None:
            directions = max(directions // len(runs), 1)
            passes = len(runs) * (1 + directions)
        seconds = passes * run_ms / 1000 * PASS
        if not self._part(SKETCHING).allows(seconds):
            return None
        self._say(f"foretelling the output's error with any plan from {passes} passes")
        try:
            sketch = make_sketch(
                self.runnable.roots,
                runs,
                [find(name) for name in names],
                model=self.runnable.name,
                pipeline=self.runnable.pipeline,
                directions=directions,
                by_head=by_head,
            )
            sketch.save(path)
            return sketch
        except (GradientError, torch.OutOfMemoryError) as error:
            self._say(f"plans are ranked by the errors of single calls: {described(error)}")
            return None

    def recorded_calls(self) -> list[FileEntry]:
        from capture.storage.dataset import Dataset

        return Dataset.open(str(self.files.recording)).entries

    def _device(self, capture: CaptureRecord) -> str | None:
        """Return the device that the model runs on; None for any GPU if it is offloaded."""
        if capture.device == "cpu":
            return "cpu"
        weights = (each for root in self.runnable.roots.values() for each in root.parameters())
        return next((str(each.device) for each in weights if each.device.type == "cuda"), None)

    def chosen(
        self, search: Judge, accept: Judge | None, planner: Planner, low: float, high: float
    ) -> Trial | str:
        """Return the fastest plan within the budget, or a sentence if there is none."""
        from replay.tune.search import careful
        from replay.tune.search import search as searched

        before = self.files.trials(self.budget, search.fingerprint)
        with self._shown(search, expected_trials(low, high)):
            judge = partial(self._tried, search, before)
            trials = list(searched(planner, judge, low, high, lambda: self.limit.allows(0)))
            search.check_baseline()
        within = [trial for trial in trials if trial.holds]
        if not within:
            reasons = {trial.reason for trial in trials if trial.reason}
            best = "; ".join(reasons) or "the most careful one has " + ", ".join(
                str(trial.quality) for trial in trials[-1:] if trial.quality
            )
            return (
                f"no plan is within {self.budget} ({counted(len(trials), 'plan')} tried: {best}); "
                "the model keeps its own attention"
            )
        within.sort(key=lambda trial: -trial.plan.saved_ms)
        if accept is None:
            return within[0]
        more = careful(planner, judge, within[-1].limit, low)
        with self._shown(accept, 3):
            accept.run_baseline()
            for trial in itertools.chain(within, (each for each in more if each.holds)):
                accepted = accept.trial(trial.limit, trial.plan)
                if accepted.quality is None or trial.quality is None:
                    continue
                quality = replace(accepted.quality, searched=trial.quality.figures)
                if quality.is_safe:
                    return replace(accepted, quality=quality)
        return (
            f"no plan is sure enough to be within {self.budget} on other prompts than those of the "
            "search; the model keeps its own attention"
        )

    def _tried(
        self, judge: Judge, before: dict[Any, tuple[Quality | None, str]], limit: float, plan: Plan
    ) -> Trial:
        """Judge a plan, unless an earlier run of this tuning did."""
        from replay.tune.search import Trial, key_of

        if (found := before.get(key_of(plan))) is not None:
            return Trial(limit, plan, *found)
        trial = judge.trial(limit, plan)
        self.files.add(trial, self.budget.metric, judge.fingerprint)
        return trial

    def _verified(self, best: Best) -> list[ModelResult]:
        """Measure a plan beside the model's own attention; return the results of both."""
        from replay.end_to_end.live_model import LiveModel
        from replay.end_to_end.model_check import affordable_rounds, check, own_kernel_of
        from replay.end_to_end.model_process import Variant
        from replay.end_to_end.run_pace import RunPace
        from replay.report.progress import shown_runs
        from replay.rows.row import KernelId

        plan = best.trial.plan
        plan.save(self.files.plan)
        name = self.files.path.stem
        live = replace(self.runnable, run=self._run_once, outputs=_Named)
        pace = RunPace()
        with shown_runs(pace, "measuring the plan", quiet=self.quiet):
            checks = check(
                best.capture,
                best.rows,
                [Variant(name, plan=self.files.plan, trust_code=True)],
                LiveModel(live, pace),
                rounds=affordable_rounds(best.run_ms / 1000),
                kernel_at={name: lambda *where: KernelId(plan.kernel_at(*where))},
                own_kernel=own_kernel_of(best.rows),
            )
        text = "".join(json.dumps(as_json(each)) + "\n" for each in checks)
        with self.files.opened(self.files.checks, "w") as file:
            file.write(text)
        return checks

    def _concluded(self, trial: Trial, rows: list[Row], checks: list[ModelResult]) -> Tuning:
        """Return the plan if it is measurably faster than the model's own attention."""
        from replay.end_to_end.predicted_times import RUN
        from replay.report.cells import speedup_text

        checked = checks[-1]
        if checked.status != "ok":
            sentence = f"the plan failed in the model: {checked.reason}"
            return Tuning(sentence, rows=rows, checks=checks)
        speedup = checked.measured[RUN].speedup
        assert speedup is not None  # the plan is not the baseline
        if speedup.verdict == "fast":
            return Tuning("", trial.plan, trial.quality, speedup, rows, checks)
        is_undecided = speedup.verdict == "inconclusive"
        said = (
            "undecided, because the machine is busy: the best plan"
            if is_undecided
            else ("no plan is faster: the best one")
        )
        sentence = (
            f"{said} within {self.budget} measures {speedup_text(speedup)} in the model, at "
            f"{trial.quality}; it is in {self.files.plan}"
        )
        return Tuning(sentence, None, trial.quality, speedup, rows, checks, is_undecided)

    @contextlib.contextmanager
    def _shown(self, judge: Judge, times: int) -> Iterator[None]:
        """Show the progress of running every prompt a number of times."""
        from replay.end_to_end.run_pace import RunPace
        from replay.report.progress import shown_runs

        pace = RunPace()
        pace.expect(Counter({"run": times * judge.runs}))

        def around(what: str, run: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
            pace.enter(what)
            with pace.running("run"):
                return run()

        before, judge.around = judge.around, around
        try:
            with shown_runs(pace, "running the model", quiet=self.quiet):
                yield
        finally:
            judge.around = before

    def _part(self, share: float) -> TimeLimit:
        """Return a share of the remaining time, at least a second."""
        is_limited = self.limit.seconds is not None
        return TimeLimit(max(share * self.limit.left, 1.0) if is_limited else None)

    def _say(self, sentence: str) -> None:
        if not self.quiet:
            say(sentence)


def _is_hidden(row: Row) -> bool:
    """Return True if a busy machine hid a row's speed-up."""
    return row.speedup is not None and row.speedup.reason == "interrupted"


@contextlib.contextmanager
def _as_many_threads() -> Iterator[None]:
    """Let worker processes compute with as many threads as this process, and so as the model."""
    import torch

    before = os.environ.get(THREADS)
    os.environ[THREADS] = str(torch.get_num_threads())
    try:
        yield
    finally:
        del os.environ[THREADS]
        if before is not None:
            os.environ[THREADS] = before


class _Named:
    """Outputs of a run by name, as `models.Runnable.outputs` returns them."""

    def __init__(self, result: Any) -> None:
        from replay.tune.outputs import named_tensors

        self.tensors = named_tensors(result)
