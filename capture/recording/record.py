"""`record`: store a sample of the attention calls of a running model."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from capture.call.head_ranges import parse_ranges, ranges
from capture.errors import CaptureError
from capture.hooks.audit import Audit
from capture.hooks.entry_points import follow_entry_points
from capture.hooks.interceptor import observe
from capture.hooks.modules import ModuleTracker, denoisers, matches, roots_of
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
    max: int = 10,
    name: str | None = None,
    sample: str = "spread",
    modules: str | None = None,
    phase: str | None = None,
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
    overwrite: bool = False,
    audit: bool = False,
) -> Iterator[Recording]:
    """Record attention calls made inside the `with` block into the directory `out`.

    Once the block has begun, nothing that goes wrong with the recording reaches it: a call that
    cannot be stored is left out, a `RecordingWarning` tells of the first, and the recording's
    `problems` list all. The block's own exceptions pass, after what was recorded is on the disk.

    Args:
        module: what to watch: a `torch.nn.Module`, a diffusers pipeline, or a dict of name →
            module. Calls made elsewhere are counted but not stored.
        max: number of calls to store.
        name: the capture's name in the dataset; by default the class name. With a rank, `.rankN`
            follows, so that all ranks can share a directory.
        sample: `spread` over layers, steps, phases and shapes; `hard`, those most difficult for a
            quantised kernel, for which the model waits at every call that may be stored; the
            `first` ones; `every:N`, the first of every N; or `reservoir`, at random by `seed`, each
            with equal probability.
        modules: comma-separated globs of the module paths whose calls may be stored. By default
            those of a pipeline's denoisers (all components that take a time step: transformers,
            UNets, priors, ControlNets), otherwise every watched module.
        phase: store only calls of this phase: `denoise`, `prefill`, `decode` or `encode`.
        heads: store only these query heads, from 0, with the key/value heads that they attend to.
            Of a call with grouped heads, as many query heads of each of those.
        weights: a phrase saying which weights produced the values; by default the model's
            `name_or_path`, if it has one.
        seed: the seed of the run, stored for reference; also that of `reservoir`.
        rank: the rank of this process, stored for reference. By default that of
            `torch.distributed`, or the environment's RANK, if there are several.
        split: what the ranks share out of each call, so that `load(out).joined()` can put it
            together: `heads` (tensor parallel, Ulysses) or `queries` (each rank has all keys). By
            default heads, where distributed tensors (`torch.distributed.tensor`) say so.
        split_ranks: the ranks that share a call, in the order of their parts; by default all.
        settings: what is needed to rebuild the run, stored in the manifest (plain JSON).
        max_bytes: limit on the total size of the stored calls.
        buffer_bytes: host memory for calls that wait to be written; when it is full, the model
            waits. By default a quarter of the memory that is free at the beginning.
        durable: have each call on the disk before the model goes on. Otherwise calls that were
            still in memory are lost if the process is killed; an exception, Ctrl-C, SIGTERM,
            SIGHUP (unless the program handles them) and the end of the program write them first.
        output: also store the model's own attention output.
        overwrite: replace the directory's capture of the same name, when this one is complete.
        audit: also count the attention operators that this thread runs outside of the calls seen
            (`recording.audit`). The model is slower, and PyTorch's own transformer modules leave
            their fused path.

    Yields:
        A `Recording` with live counts.

    Raises:
        TypeError: `module` is no model, or holds none.
        ValueError: `sample`, `phase`, `heads`, `seed`, `rank`, `split` or a limit is none: limits
            are integers, in bytes those of size.
        CaptureError: before the block begins: `out` is not writable or already contains a capture
            of that name, `settings` are not JSON, or no module matches.
        RuntimeError: another recording is active.

    Example:
        >>> with record(pipe.transformer, out="captured_inputs", max=10) as recording:
        ...     pipe("a panda playing guitar")
        >>> print(recording.kept, recording.problems)
    """
    if phase is not None and phase not in PHASES:
        raise ValueError(f"phase must be {', '.join(PHASES)} or None, not {phase!r}")
    rank = current_rank() if rank is None else natural("rank", rank)
    if seed is not None:
        seed = natural("seed", seed)
    if buffer_bytes is None:
        buffer_bytes = default_buffer_bytes()
    buffer_bytes = positive("buffer_bytes", buffer_bytes)
    if heads is not None and (isinstance(heads, str) or not isinstance(heads, Iterable)):
        raise ValueError(f"heads must be a list of numbers, such as [0, 2], not {heads!r}")
    part = declared(split, split_ranks, rank, heads)
    if heads is not None:
        heads = parse_ranges(",".join(map(str, heads)))
    roots = roots_of(module)
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
            heads=ranges(heads or ()),
        ),
        seed,
        rank,
    )
    tracker = ModuleTracker(roots)
    if not any(matches(path, modules) for path in tracker.paths):
        raise CaptureError(no_match(modules, tracker.paths))
    sampler = make_sampler(sample, max, max_bytes, seed or 0)
    complete = False
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_empty_directory(Path(out)))
        target = CaptureTarget.check(out, capture.model, overwrite=overwrite)
        recording = Recording(
            tracker,
            sampler,
            target,
            capture,
            seed=seed,
            rank=rank,
            part=part,
            keeps_output=output,
            heads=heads,
            buffer_bytes=buffer_bytes,
            durable=durable,
        )
        stack.enter_context(before_termination(lambda: recording.close(complete=False)))
        stack.enter_context(tracker.watch())
        stack.enter_context(observe(recording.observer()))
        stack.enter_context(follow_entry_points(recording.handle))
        stack.enter_context(recording.fused.counted())
        if audit:
            recording.audit = Audit(tracker)
            stack.enter_context(recording.audit.counted())
        stack.callback(lambda: recording.close(complete=complete))
        recording.begin()
        yield recording
        complete = True
    if not recording.kept and not recording.problems:
        recording.tell(nothing_kept(recording))
