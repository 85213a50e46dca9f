"""Stores a sample of the attention calls of a running model (`record`)."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from capture.call.head_ranges import parse_ranges, ranges
from capture.errors import CaptureError
from capture.hooks.entry_points import follow_entry_points, vllm
from capture.hooks.gradients import gradients_followed
from capture.hooks.interceptor import observe
from capture.hooks.modules import ModuleTracker, denoisers, matches, roots_of
from capture.recording.context import RecordingContext
from capture.recording.description import checked, name_of_weights, plain_settings, versions
from capture.recording.memory import default_buffer_bytes
from capture.recording.nothing_kept import no_match, nothing_kept
from capture.recording.parts import declared
from capture.recording.recording import Recording
from capture.recording.sampling import PHASES, make_sampler
from capture.recording.termination import before_termination
from capture.storage.capture_record import CaptureRecord
from capture.storage.target import CaptureTarget, current_rank, no_empty_directory, rank_name
from capture.text.limits import natural, positive


@contextlib.contextmanager
def record(
    module: Any,
    out: str | Path = "captured_inputs",
    *,
    max: int | str = 10,
    name: str | None = None,
    sample: str = "spread",
    modules: str | None = None,
    phase: str | None = None,
    steps: Collection[int] | None = None,
    heads: Sequence[int] | None = None,
    weights: str | None = None,
    seed: int | None = None,
    rank: int | None = None,
    split: str | None = None,
    split_ranks: Sequence[int] | None = None,
    settings: dict[str, Any] | None = None,
    max_bytes: int | None = None,
    buffer_bytes: int | None = None,
    durable: bool = False,
    output: bool = True,
    backward: bool = False,
    overwrite: bool = False,
) -> Iterator[Recording]:
    """Record attention calls made inside the `with` block into the directory `out`.

    Problems with the recording raise no exceptions inside the block. A call that cannot be stored
    is skipped. The first problem is issued as a `RecordingWarning`, and all problems are listed in
    the recording's `problems`. If the block raises an exception, recorded calls are written to the
    disk first.

    Args:
        module: `torch.nn.Module`, diffusers pipeline, or dict of name → module to watch. Calls
            outside these modules are counted but not stored.
        max: number of calls to store, or `per-layer`: one call of each module and phase.
        name: name of the capture in the dataset (default: the class name). With a rank, `.rankN`
            follows, so that all ranks can share a directory.
        sample: `spread` over layers, steps, phases and shapes; `hard`, the most difficult calls for
            a quantised kernel (the model waits at every call that may be stored); `first`;
            or `every:N`, the first of every N calls.
        modules: comma-separated globs of the module paths whose calls may be stored (default: a
            pipeline's denoisers, that is, all components that take a time step; without denoisers,
            every watched module).
        phase: store only calls of this phase: `denoise`, `prefill`, `decode` or `encode`; of a
            batch of requests also `extend` or `mixed`.
        steps: with `per-layer`, store a call of each module at each of these denoising steps, which
            begin at 0 (default: one step of each module).
        heads: store only these query heads, from 0, and the key/value heads that they attend to.
            Each of these key/value heads must serve the same number of the query heads.
        weights: description of the model's weights (default: the model's `name_or_path`, if it has
            one).
        seed: seed of the run, stored for reference.
        rank: rank of this process, stored for reference (default: the rank in `torch.distributed`
            or the environment's RANK, if there are several processes).
        split: dimension by which ranks share each call, so that `load(out).joined()` can join the
            parts: `heads` (tensor parallel, Ulysses) or `queries` (each rank has all keys). The
            default is `heads` if distributed tensors (`torch.distributed.tensor`) are split by
            heads, and no split otherwise.
        split_ranks: ranks that share a call, in the order of their parts (default: all).
        settings: plain JSON that describes how to rebuild the run, stored in the manifest.
        max_bytes: limit of the total size of the stored calls.
        buffer_bytes: host memory for calls that are not written yet. The model waits when this
            memory is full (default: a quarter of the free memory).
        durable: write each call to the disk before the model continues. Otherwise calls in memory
            are lost if the process is killed. Calls in memory are written at an exception, Ctrl-C,
            SIGTERM or SIGHUP (unless the program handles the signal) and at the end of the program.
            A recording outside the main thread, which alone handles signals, writes every call
            immediately, in the background.
        output: also store the model's own attention output.
        backward: also store the gradient that reaches the output of each call, and the gradients of
            its inputs, as the call's own backward returns them. A call stays in memory, without a
            limit, until its gradients have come or the recording ends.
        overwrite: replace the directory's capture of the same name when this one is complete.

    Yields:
        A `Recording` with live counts.

    Raises:
        TypeError: `module` is not a model and contains no model.
        ValueError: `sample`, `phase`, `steps`, `heads`, `seed`, `rank`, `split` or a limit is
            invalid.
        CaptureError: before the block begins, if `out` is not writable or already contains this
            capture, `settings` are not JSON, or no module matches.
        RuntimeError: another recording is active.

    Example:
        >>> with record(pipe.transformer, out="captured_inputs", max=10) as recording:
        ...     pipe("a panda playing guitar")
        >>> print(recording.kept, recording.problems)
    """
    roots = roots_of(module)
    if phase is not None and phase not in PHASES:
        raise ValueError(f"phase must be {', '.join(PHASES)} or None, not {phase!r}")
    if heads is not None and (isinstance(heads, str) or not isinstance(heads, Iterable)):
        raise ValueError(f"heads must be a list of numbers, such as [0, 2], not {heads!r}")
    sampler = make_sampler(sample, max, max_bytes, steps)
    kept_heads = None if heads is None else parse_ranges(",".join(map(str, heads)))
    seed = None if seed is None else natural("seed", seed)
    rank = current_rank() if rank is None else natural("rank", rank)
    part = declared(split, split_ranks, rank, heads)
    if buffer_bytes is None:
        buffer_bytes = default_buffer_bytes()
    buffer_bytes = positive("buffer_bytes", buffer_bytes)
    if modules is None:
        modules = ",".join(f"{name},{name}.*" for name in denoisers(roots) if name) or "*"
    capture = checked(
        CaptureRecord(
            model=rank_name(name or type(module).__name__, rank),
            weights=weights or name_of_weights(module),
            settings=plain_settings(settings or {}),
            versions=versions(),
            started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds"),
            sample=sample,
            modules=modules,
            phase=phase or "",
            heads=ranges(kept_heads or ()),
        ),
        seed,
        rank,
    )
    tracker = ModuleTracker(roots, pipeline=module)
    paths = [watched.path for watched in tracker.watched]
    if not any(matches(path, modules) for path in paths):
        raise CaptureError(no_match(modules, paths))
    complete = False
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_empty_directory(Path(out)))
        target = CaptureTarget.check(out, capture.model, overwrite=overwrite)
        recording = Recording(
            RecordingContext(
                sampler=sampler,
                tracker=tracker,
                target=target,
                capture=capture,
                heads=kept_heads,
                seed=seed,
                rank=rank,
                part=part,
                keeps_output=output,
                keeps_gradients=backward,
                buffer_bytes=buffer_bytes,
                durable=durable,
            )
        )
        stack.enter_context(before_termination(lambda: recording.close(complete=False)))
        stack.enter_context(tracker.watch())
        if backward:
            stack.enter_context(gradients_followed(recording.tell))
        eagerly = not vllm.serves(each.module for each in tracker.watched)
        observed = observe(recording.calls.observer(), recording.calls.mark, eagerly=eagerly)
        stack.enter_context(observed)
        stack.enter_context(follow_entry_points(recording.calls.handle))
        # Runs first at the exit, so that the hooks above see calls until everything is written.
        stack.callback(lambda: recording.close(complete=complete))
        recording.begin()
        yield recording
        complete = True
    if recording.kept:
        recording.warn_of_findings()
    elif not recording.problems:
        recording.tell(nothing_kept(recording))
