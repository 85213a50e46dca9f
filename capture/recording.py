"""`record`: store a sample of the attention calls of a running model."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import fnmatch
import itertools
import json
import os
import platform
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from capture.autocast import autocast_dtype, cast
from capture.backends import chosen_backend, disabled_backends
from capture.call import AttentionCall, Origin
from capture.capture_record import CaptureRecord
from capture.census import Census, Count
from capture.copies import HostCopier, stored_bytes
from capture.errors import CaptureError
from capture.header import Header
from capture.heads import kv_heads_of, pick
from capture.interceptor import TORCH_SDPA, Arguments, intercept
from capture.json_data import parsed, typed
from capture.memory import default_buffer_bytes
from capture.modules import ModuleTracker, Site, roots_of
from capture.ranges import parse_ranges, ranges
from capture.sampling import PHASES, Place, Sampler, make_sampler
from capture.target import Target, current_rank, no_empty_directory, rank_name
from capture.termination import before_termination
from capture.writer import Waiting, Writer


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
    settings: dict[str, Any] | None = None,
    max_bytes: int | None = None,
    buffer_bytes: int | None = None,
    durable: bool = False,
    output: bool = True,
    overwrite: bool = False,
) -> Iterator[Recording]:
    """Record attention calls made inside the `with` block into the directory `out`.

    Once the block has begun, nothing that goes wrong with the recording reaches it: a call that
    cannot be stored is left out, a `RecordingWarning` tells of the first, and the recording's
    `problems` list all. The block's own exceptions pass, after what was recorded is on the disk.

    Args:
        module: what to watch: a `torch.nn.Module`, a diffusers pipeline, or a dict of name →
            module. Calls made elsewhere are counted but not stored.
        max: number of calls to store.
        name: the capture's name in the dataset; by default the class name. In a process of several
            ranks (`torch.distributed`, or the environment's RANK and WORLD_SIZE) `.rankN` follows,
            so that all ranks can share a directory.
        sample: `spread` over layers, steps, phases and shapes; the `first` ones; `every:N`, the
            first of every N; or `reservoir`, at random by `seed`, each with equal probability.
        modules: comma-separated globs of the module paths whose calls may be stored. By default a
            pipeline's `transformer` or `unet`, otherwise every watched module.
        phase: store only calls of this phase: `denoise`, `prefill`, `decode` or `encode`.
        heads: store only these query heads, from 0, with the key/value heads that they attend to.
            Of a call with grouped heads, as many query heads of each of those.
        weights: a phrase saying which weights produced the values; by default the model's
            `name_or_path`, if it has one.
        seed: the seed of the run, stored for reference; also that of `reservoir`.
        settings: what is needed to rebuild the run, stored in the manifest (plain JSON).
        max_bytes: limit on the total size of the stored calls.
        buffer_bytes: host memory for calls that wait to be written; when it is full, the model
            waits. By default a quarter of the memory that is free at the beginning.
        durable: have each call on the disk before the model goes on. Otherwise calls that were
            still in memory are lost if the process is killed; an exception, Ctrl-C, SIGTERM (unless
            the program handles it) and the end of the program write them first.
        output: also store the model's own attention output.
        overwrite: replace the directory's capture of the same name, when this one is complete.

    Yields:
        A `Recording` with live counts.

    Raises:
        ValueError: `sample`, `phase`, `heads` or a limit is none.
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
    if heads is not None:
        heads = parse_ranges(",".join(map(str, heads)))
    roots = roots_of(module)
    if modules is None:
        main = [part for part in ("transformer", "unet") if part in roots]
        modules = f"{main[0]},{main[0]}.*" if main else "*"
    capture = _checked(
        CaptureRecord(
            model=rank_name(name or type(module).__name__),
            weights=weights or _describe_weights(module),
            settings=_plain(settings or {}),
            versions=_versions(),
            started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds"),
            sample=sample,
            modules=modules,
            phase=phase or "",
            heads=ranges(heads or ()),
        ),
        seed,
    )
    tracker = ModuleTracker(roots)
    if not any(_matches(path, modules) for path in tracker.paths):
        raise CaptureError(_no_match(modules, tracker.paths))
    sampler = make_sampler(sample, max, max_bytes, seed or 0)
    complete = False
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_empty_directory(Path(out)))
        target = Target.check(out, capture.model, overwrite=overwrite)
        recording = Recording(
            tracker,
            sampler,
            target,
            capture,
            seed=seed,
            keeps_output=output,
            heads=heads,
            buffer_bytes=default_buffer_bytes() if buffer_bytes is None else buffer_bytes,
            durable=durable,
        )
        stack.enter_context(before_termination(lambda: recording.close(complete=False)))
        stack.enter_context(tracker.watch())
        stack.enter_context(intercept(recording.handle))
        stack.callback(lambda: recording.close(complete=complete))
        recording.begin()
        yield recording
        complete = True
    if not recording.kept and not recording.problems:
        recording.tell(_nothing_kept(recording, roots))


_is_tracing = torch._C._is_tracing
"""Looked up once, not in every call."""


class RecordingWarning(UserWarning):
    """A recording is not what was asked for; the model's run is not affected."""


_live: weakref.WeakSet[Recording] = weakref.WeakSet()


def _abandon_all() -> None:
    for recording in list(_live):
        recording.abandon()


def _close_all() -> None:
    for recording in list(_live):
        recording.close(complete=False)


os.register_at_fork(after_in_child=_abandon_all)
atexit.register(_close_all)  # of a program that ends inside the block; later, no thread runs


class Recording:
    """A recording in progress, with counts of the calls seen and kept so far."""

    def __init__(
        self,
        tracker: ModuleTracker,
        sampler: Sampler,
        target: Target,
        capture: CaptureRecord,
        *,
        seed: int | None,
        keeps_output: bool,
        heads: Sequence[int] | None,
        buffer_bytes: int,
        durable: bool,
    ) -> None:
        self.capture = capture
        self.census = Census()
        self.without_values = 0
        """Calls that cannot be stored: meta, fake or nested tensors, inside `vmap` or a trace."""
        self.problems: list[str] = []
        """What went wrong with the recording, a sentence each; the same reason only once."""
        self.lost = 0
        """Calls that were chosen and could not be stored."""
        self.buffer_bytes = buffer_bytes
        """Host memory for calls that wait to be written."""
        self.flush_seconds = 0.0
        """How long it took, after the model had returned, until everything was on the disk."""
        self.without_heads = 0
        """Calls that cannot be stored because there is no call of just the wanted heads."""
        self._seed, self._keeps_output, self._heads = seed, keeps_output, heads
        self._durable = durable
        self._rank = current_rank()
        self._tracker = tracker
        self._sampler = sampler
        self._target = target
        self._writer: Writer | None = None
        self._copier = HostCopier()
        self._kept: dict[int, Count] = {}
        self._places: dict[Count, Place | None] = {}
        """None where calls are not to be stored."""
        self._failed: deque[int] = deque()
        """Calls that the writer's thread could not write; it must not wait for our lock."""
        self._told = itertools.count()
        self._lock = threading.RLock()
        self._closed = True

    @property
    def seen(self) -> int:
        """SDPA calls made so far, anywhere in the process."""
        return self.census.calls

    @property
    def kept(self) -> int:
        """Calls that are stored, or in memory and to be stored."""
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Size of the tensors kept."""
        return self._sampler.nbytes

    @property
    def refused_for_bytes(self) -> int:
        """Calls not kept because of `max_bytes`."""
        return self._sampler.refused_for_bytes

    @property
    def waited_seconds(self) -> float:
        """Time that the model waited because `buffer_bytes` of calls were still to be written."""
        return self._writer.waited_seconds if self._writer else 0.0

    @property
    def allocation_seconds(self) -> float:
        """Time that allocating and pinning host memory took, during the model's run."""
        return self._writer.pool.allocation_seconds if self._writer else 0.0

    @property
    def written_bytes(self) -> int:
        """Size of all files written, also of those deleted since for better ones."""
        return self._writer.written_bytes if self._writer else 0

    def begin(self) -> None:
        """Create the journal; from now on calls are recorded.

        Raises:
            CaptureError: another process records there, or the directory is not writable.
        """
        journal = self._target.begin(self.capture)
        try:
            writer = Writer(
                journal,
                buffer_bytes=self.buffer_bytes,
                final=self._sampler.is_final,
                durable=self._durable,
                failed=self._call_failed,
            )
        except CaptureError:
            self._target.withdraw()
            raise
        if journal.note:
            self.tell(journal.note)
        with self._lock:
            self._writer, self._closed = writer, False
        _live.add(self)

    def handle(
        self, arguments: Arguments, proceed: Callable[[], Tensor], sdpa: Callable[..., Tensor]
    ) -> Tensor:
        """Make the call and store it if the sampler selects it; the interceptor's handler."""
        result = proceed()
        if self._closed:
            return result
        # What we do would become part of the trace, of torch.jit or torch.fx.
        if _is_tracing() or not isinstance(result, Tensor):
            self.without_values += 1
            return result
        try:
            site = self._tracker.site
            dtype = autocast_dtype(arguments) if sdpa is TORCH_SDPA else None
            # Held until the copies are queued, so that files change in the order of the decisions.
            with self._lock:
                if not self._closed:
                    index = self.census.calls
                    count = self.census.add(site, arguments, dtype)
                    try:
                        place = self._places[count]
                    except KeyError:
                        place = self._places[count] = self._place(site, count)
                    if place is not None and self._sampler.wants(place, site.step):
                        arguments = cast(arguments, dtype)
                        self._observe(index, site, place, count, arguments, result, sdpa)
        except Exception as error:
            self.tell(f"an attention call could not be recorded: {_reason(error)}")
        return result

    def tell(self, problem: str) -> None:
        """Add to `problems`; the first is warned of at once."""
        if problem in self.problems:
            return
        self.problems.append(problem)
        if next(self._told):
            return
        # Neither an exception, if the user turned warnings into them, nor what the user's own way
        # of showing them raises, must reach the model or the thread that writes.
        with contextlib.suppress(Exception):
            warnings.warn(f"recording: {problem}", RecordingWarning, stacklevel=2)

    def close(self, *, complete: bool) -> bool:
        """End the recording: write what is in memory and put it into the manifest.

        Returns:
            False if it has ended before, or another thread is ending it. Raises nothing but what
            interrupts it; see `problems`.
        """
        with self._lock:
            if self._writer is None:
                return True
            if self._closed:
                return False
            self._closed = True
        began = time.perf_counter()
        try:
            self._writer.close()
        except Exception as error:
            self.tell(f"{self._target.directory} may not be on the disk yet: {_reason(error)}")
        finally:  # also after Ctrl-C, once more
            self._end(self._writer, complete=complete)
            self.flush_seconds = time.perf_counter() - began
        return True

    def abandon(self) -> None:
        """Leave the recording to the parent process, in a child that was forked from it."""
        self._closed = True
        self._lock = threading.RLock()  # a thread of the parent may have held it
        self._target.abandon()

    def _end(self, writer: Writer, *, complete: bool) -> None:
        """Put what is stored into the manifest."""
        try:
            self._forget_failed(writer)
            if given_up := [index for index in self._kept if index not in writer.entries]:
                self.tell(f"gave up {len(given_up)} calls that were only in memory")
                self.lost += len(given_up)
                for index in given_up:
                    self._forget(index)
            self.capture.complete = complete and not self.lost
            self.capture.census = self.census.to_json()
            self.capture.calls_seen = self.census.calls
            for problem in self._target.end(self.capture):
                self.tell(problem)
        except Exception as error:
            self.tell(
                f"could not end the recording in {self._target.directory}: {_reason(error)}; "
                f"finish it with `capture --repair {self._target.directory}`"
            )

    def _place(self, site: Site, count: Count) -> Place | None:
        """Return where calls like these are sampled; None if they are not to be stored."""
        if site.module == "" or not _matches(site.module, self.capture.modules):
            return None
        if self.capture.phase not in ("", site.phase):
            return None
        return self._sampler.place((site.phase, *count.signature.stratum), site.module)

    def _observe(
        self,
        index: int,
        site: Site,
        place: Place,
        count: Count,
        arguments: Arguments,
        result: Tensor,
        sdpa: Callable[..., Tensor],
    ) -> None:
        """Store a call that the sampler wants, unless it has no values or does not fit."""
        assert self._writer is not None
        self._forget_failed(self._writer)
        if not _can_be_copied(arguments):
            self.without_values += 1
            return
        output = result if self._keeps_output else None
        call = _as_call(arguments, output, self._origin(index, site, arguments, sdpa))
        if self._heads is not None:
            kv_heads = kv_heads_of(self._heads, call.shape.q_heads, call.shape.kv_heads)
            if kv_heads is None:
                self.without_heads += 1
                return
            call = pick(call, self._heads, kv_heads)
        tensors, header = call.tensors(), Header.of(call)
        nbytes = _stored_bytes(tensors)
        if fault := header.fault() or header.excess(nbytes):  # nobody could load it
            self.tell(f"a call cannot be stored: {fault}")
            return
        decision = self._sampler.offer(index, place, site.step, nbytes)
        if not decision.keep:
            return
        try:
            pinned = call.device.type == "cuda"
            buffer = self._writer.reserve(stored_bytes(tensors), pinned=pinned)
            try:
                copy = self._copier.copy(tensors, buffer)
            except BaseException:
                self._writer.release(buffer)
                raise
            self._kept[index] = count
            count.kept += 1
            waiting = Waiting(replace(header, layouts=copy.layouts), copy)
            for dropped in self._writer.put(waiting, decision.drop):
                self._forget(dropped)
        except Exception as error:
            self._call_failed(index, error)

    def _call_failed(self, index: int, error: Exception) -> None:
        """Note a call that could not be stored; also called by the writer's thread."""
        self._failed.append(index)
        self.tell(f"could not store a call in {self._target.directory}: {_reason(error)}")

    def _forget_failed(self, writer: Writer) -> None:
        while self._failed:
            index = self._failed.popleft()
            if index not in writer.entries:
                self.lost += 1
                self._forget(index)

    def _forget(self, index: int) -> None:
        if count := self._kept.pop(index, None):
            count.kept -= 1

    def _origin(
        self, index: int, site: Site, arguments: Arguments, sdpa: Callable[..., Tensor]
    ) -> Origin:
        device = arguments.query.device
        described = device.type
        if device.type == "cuda":
            described = f"cuda ({torch.cuda.get_device_name(device)})"
        self.capture.device = described
        return Origin(
            model=self.capture.model,
            weights=self.capture.weights,
            module=site.module,
            call_index=index,
            step=site.step,
            phase=site.phase,
            device=described,
            seed=self._seed,
            rank=self._rank,
            backend=_backend(arguments, sdpa),
            disabled_backends=disabled_backends(),
            heads=self.capture.heads,
            versions=self.capture.versions,
        )


def _can_be_copied(arguments: Arguments) -> bool:
    """Whether the tensors have values, and no CUDA graph would contain the copies."""
    on_gpu = arguments.query.device.type == "cuda"
    if on_gpu and torch.cuda.is_current_stream_capturing():
        return False
    return all(_has_values(tensor) for tensor in arguments if isinstance(tensor, Tensor))


def _has_values(tensor: Tensor) -> bool:
    """Whether it is an ordinary tensor with its own memory."""
    if tensor.is_nested or isinstance(tensor, FakeTensor):
        return False
    try:
        return tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:  # inside vmap or grad
        return False


def _as_call(arguments: Arguments, output: Tensor | None, origin: Origin) -> AttentionCall:
    tensors = (arguments.query, arguments.key, arguments.value)
    leading = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in tensors))
    query, key, value = (_four_dims(tensor, leading) for tensor in tensors)
    mask = arguments.attn_mask
    return AttentionCall(
        query=query,
        key=key,
        value=value,
        attn_mask=None if mask is None else _four_dims(mask, leading if len(leading) > 1 else ()),
        output=None if output is None else _four_dims(output, leading),
        is_causal=bool(arguments.is_causal),
        scale=arguments.scale,
        enable_gqa=bool(arguments.enable_gqa),
        dropout_p=arguments.dropout_p,
        origin=origin,
    )


def _four_dims(tensor: Tensor, leading: Sequence[int]) -> Tensor:
    """Broadcast and flatten SDPA's leading dimensions, of any number, into one."""
    while tensor.ndim < 4:
        tensor = tensor.unsqueeze(0)
    if leading:
        tensor = tensor.expand(*leading, *tensor.shape[-3:])
    return tensor.flatten(0, -4)


def _stored_bytes(tensors: dict[str, Tensor]) -> int:
    return sum(_stored_elements(tensor) * tensor.element_size() for tensor in tensors.values())


def _stored_elements(tensor: Tensor) -> int:
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= 1 if stride == 0 else size
    return count


def _backend(arguments: Arguments, sdpa: Callable[..., Tensor]) -> str:
    """Return the backend PyTorch chooses for this call, or the function that was called instead."""
    if sdpa is TORCH_SDPA:
        return chosen_backend(arguments)
    return f"{sdpa.__module__}.{getattr(sdpa, '__qualname__', sdpa)}"


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings as JSON would give them back.

    Raises:
        CaptureError: they are not JSON.
    """
    try:
        plain: dict[str, Any] = json.loads(json.dumps(settings))
    except (TypeError, ValueError, RecursionError) as error:
        raise CaptureError(f"`settings=` cannot be written as JSON: {error}") from error
    return plain


def _checked(capture: CaptureRecord, seed: int | None) -> CaptureRecord:
    """Return a capture as it will be read back.

    Raises:
        CaptureError: it cannot.
    """
    try:
        typed(int | None, seed, "`seed=`")
        manifest = json.dumps({"captures": [capture.to_json()]})
        return CaptureRecord.from_json(parsed(manifest)["captures"][0])
    except (TypeError, ValueError) as error:
        raise CaptureError(f"the recording cannot be described: {error}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    for package in ("diffusers", "transformers"):
        if package in sys.modules:
            versions[package] = getattr(sys.modules[package], "__version__", "unknown")
    return versions


def _describe_weights(module: Any) -> str:
    path = getattr(module, "name_or_path", None) or getattr(
        getattr(module, "config", None), "_name_or_path", None
    )
    # A randomly initialised model built from a checkpoint's config has that name too.
    return f"{path} (its name_or_path)" if path else "not stated"


def _matches(path: str, globs: str) -> bool:
    return any(fnmatch.fnmatchcase(path, glob.strip()) for glob in globs.split(","))


def _no_match(globs: str, paths: list[str]) -> str:
    likely = [path for path in paths if "att" in path.rpartition(".")[2].lower()] or paths
    shown = ", ".join(likely[:3])
    return f"no module matches {globs!r}; available: {shown} … Select some with `modules=`"


def _nothing_kept(recording: Recording, roots: dict[str, Any]) -> str:
    if recording.refused_for_bytes:
        return "no call fits in `max_bytes=`; increase it"
    if not recording.seen:
        return f"the model made no scaled_dot_product_attention call: {_other_attention(roots)}"
    if recording.without_values:
        return (
            f"none of the {recording.seen} attention calls can be stored: their tensors are meta, "
            "fake or nested, or inside vmap"
        )
    if recording.without_heads:
        return (
            f"none of the attention calls has the heads {recording.capture.heads}, or as many of "
            "them for each key/value head as for the others; choose others with `heads=`"
        )
    phases = recording.census.phases()
    if recording.capture.phase not in ("", *phases):
        return (
            f"none of the {recording.seen} attention calls is of phase {recording.capture.phase}: "
            f"choose {' or '.join(phases)} with `phase=`"
        )
    callers = [module or "(outside all watched modules)" for module in recording.census.modules()]
    shown = ", ".join(callers[:3]) + (" …" if len(callers) > 3 else "")
    return (
        f"none of the {recording.seen} attention calls came from a module that matches "
        f"{recording.capture.modules!r}; they came from: {shown}. Select some with `modules=`"
    )


def _other_attention(roots: dict[str, Any]) -> str:
    for root in roots.values():
        implementation = getattr(getattr(root, "config", None), "_attn_implementation", None)
        if implementation not in (None, "sdpa"):
            return (
                f"it uses attn_implementation={implementation!r}; load it with "
                "attn_implementation='sdpa'"
            )
    return (
        "it probably calls another attention kernel directly (flash-attn, xFormers, FlexAttention, "
        "or matmul and softmax); switch it to SDPA to record it"
    )
