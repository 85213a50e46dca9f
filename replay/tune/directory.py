"""Directory of a tuning: the recording, the rows and the judged plans, from which it resumes.

DIR/lock              locked while a tuning runs
DIR/settings.json     the request that the directory belongs to
DIR/recording/        the recorded calls
DIR/rows.jsonl        the rows of the calls
DIR/sparsity.json     errors of sparse attention on the recorded calls
DIR/trials.jsonl      the judged plans, one a line
DIR/plan.json         the last plan that was measured in the model
DIR/checks.jsonl      the model's own attention and the plan, measured side by side
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from attention_replay.errors import Error
from capture.storage.json_data import parsed
from capture.storage.locks import LocksUnsupported, try_lock, unlock
from capture.storage.plain_files import possible
from capture.storage.target import no_empty_directory
from replay.rows.replacement import replacing, why_not_written
from replay.tune.quality import Quality, QualityBudget
from replay.tune.search import Key, Trial, key_of


class TuningError(Error):
    """Reason why a tuning cannot begin or go on; the message gives the remedy."""


class TuningDirectory:
    """Files of one tuning. Only one tuning at a time may use the directory.

    Args:
        path: the directory, which is created.
        settings: the request as plain JSON. A directory of another request is refused.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path.absolute()
        self._settings = dict(settings)
        self.recording = self.path / "recording"
        self.rows = self.path / "rows.jsonl"
        self.sparsity = self.path / "sparsity.json"
        self.plan = self.path / "plan.json"
        self.checks = self.path / "checks.jsonl"
        self._trials = self.path / "trials.jsonl"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the directory's lock during the `with` block.

        An error before the recording removes the directory.

        Raises:
            TuningError: another tuning holds the lock, the directory belongs to another request, or
                it is not writable.
        """
        with self.writing(), no_empty_directory(self.path):
            possible(self.path).mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with contextlib.suppress(LocksUnsupported):
                if not try_lock(descriptor):
                    raise TuningError(
                        f"another tuning is using {self.path}: wait for its end, or name another "
                        "plan or directory"
                    )
            self._check_settings()
            try:
                yield
            except BaseException:
                self._remove_if_unused()
                raise
        finally:
            unlock(descriptor)
            os.close(descriptor)

    def trials(
        self, budget: QualityBudget, fingerprint: str
    ) -> dict[Key, tuple[Quality | None, str]]:
        """Return the quality, or the reason of a failure, of the plans that were judged before.

        Args:
            fingerprint: digest of the outputs that the plans were compared with.
        """
        found: dict[Key, tuple[Quality | None, str]] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in self._trials.read_text(encoding="utf-8").splitlines():
                # A killed process may have left half a line, whose plan is judged again.
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    data = parsed(line)
                    if (data["metric"], data["baseline"]) != (budget.metric, fingerprint):
                        continue
                    key = tuple(tuple(map(str, each)) for each in data["plan"])
                    figures = data["figures"]
                    quality = (
                        None if figures is None else Quality(budget, tuple(map(float, figures)))
                    )
                    found[key] = quality, str(data["reason"])  # type: ignore[index]
        return found

    def sketch(self, fingerprint: str) -> Path:
        """Return the file of the sketch of a model whose outputs have this digest."""
        return self.path / f"sketch-{fingerprint[:16]}.safetensors"

    def add(self, trial: Trial, metric: str, fingerprint: str) -> None:
        """Note a plan that was judged by a metric, against outputs with this digest."""
        figures = None if trial.quality is None else [str(each) for each in trial.quality.figures]
        line = {
            "metric": metric,
            "baseline": fingerprint,
            "plan": key_of(trial.plan),
            "figures": figures,
            "reason": trial.reason,
        }
        with self.opened(self._trials, "a") as file:
            file.write(json.dumps(line) + "\n")

    @contextlib.contextmanager
    def opened(self, path: Path, mode: str) -> Iterator[IO[Any]]:
        """Open one of the files for writing.

        Raises:
            TuningError: the file cannot be written, for example to a full disk.
        """
        with self.writing(), path.open(mode, encoding="utf-8") as file:
            yield file

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Report that a file cannot be written in the `with` block.

        Raises:
            TuningError: it cannot be written.
        """
        try:
            yield
        except OSError as error:
            raise TuningError(
                f"cannot write {self.path} ({why_not_written(error)}): mend this and tune again to "
                "go on, or name another directory"
            ) from error

    def _check_settings(self) -> None:
        path = self.path / "settings.json"
        try:
            before = parsed(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            with self.writing(), replacing(path) as file:
                file.write(json.dumps(self._settings, indent=1))
            return
        except ValueError:
            before = {}
        before = before if isinstance(before, dict) else {}
        for name, value in json.loads(json.dumps(self._settings)).items():
            if before.get(name) != value:
                raise TuningError(
                    f"{self.path} belongs to a tuning with {name} {before.get(name)!r}, not "
                    f"{value!r}: delete it, or name another plan or directory"
                )

    def _remove_if_unused(self) -> None:
        """Remove the directory of a tuning that ended before its recording."""
        if not {path.name for path in self.path.iterdir()} - {"lock", "settings.json"}:
            shutil.rmtree(self.path)
