"""`record`: store a sample of the attention calls of a running model."""

from __future__ import annotations

import contextlib
import datetime
import fnmatch
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from capture.autocast import autocast_dtype, cast
from capture.backends import chosen_backend, disabled_backends
from capture.call import AttentionCall, Origin
from capture.call_file import PackedCall
from capture.capture_record import CaptureRecord
from capture.census import Census, Count
from capture.dataset import Dataset
from capture.errors import CaptureError
from capture.interceptor import TORCH_SDPA, Arguments, intercept
from capture.modules import ModuleTracker, Site, roots_of
from capture.sampling import Place, Sampler, make_sampler
from capture.writer import Writer, slug


@contextlib.contextmanager
def record(
    module: Any,
    out: str | Path = "captured_inputs",
    *,
    max: int = 10,
    name: str | None = None,
    sample: str = "spread",
    modules: str | None = None,
    weights: str | None = None,
    seed: int | None = None,
    settings: dict[str, Any] | None = None,
    max_bytes: int | None = None,
    output: bool = True,
    overwrite: bool = False,
) -> Iterator[Recording]:
    """Record attention calls made inside the `with` block into the directory `out`.

    Args:
        module: what to watch: a `torch.nn.Module`, a diffusers pipeline, or a dict of name →
            module. Calls made elsewhere are counted but not stored.
        max: number of calls to store.
        name: the capture's name in the dataset; by default the class name.
        sample: `spread` over layers, steps, phases and shapes, or the `first` ones.
        modules: comma-separated globs of the module paths whose calls may be stored. By default a
            pipeline's `transformer` or `unet`, otherwise every watched module.
        weights: a phrase saying which weights produced the values; by default the model's
            `name_or_path`, if it has one.
        seed: the seed of the run, stored for reference.
        settings: what is needed to rebuild the run, stored in the manifest (plain JSON).
        max_bytes: limit on the total size of the stored calls.
        output: also store the model's own attention output.
        overwrite: replace the directory's capture of the same name.

    Yields:
        A `Recording` with live counts.

    Raises:
        CaptureError: `out` is not writable or already contains a capture of that name, or the model
            made no call that could be stored (the message says which attention it probably uses).
        RuntimeError: another recording is active.

    Example:
        >>> with record(pipe.transformer, out="captured_inputs", max=10):
        ...     pipe("a panda playing guitar")
    """
    roots = roots_of(module)
    if modules is None:
        main = [part for part in ("transformer", "unet") if part in roots]
        modules = f"{main[0]},{main[0]}.*" if main else "*"
    capture = CaptureRecord(
        model=name or type(module).__name__,
        weights=weights or _describe_weights(module),
        settings=settings or {},
        versions=_versions(),
        started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        sample=sample,
        modules=modules,
    )
    dataset = prepare_directory(out, capture.model, overwrite=overwrite)
    tracker = ModuleTracker(roots)
    if not any(_matches(path, modules) for path in tracker.paths):
        raise CaptureError(_no_match(modules, tracker.paths))
    recording = Recording(
        tracker, make_sampler(sample, max, max_bytes, seed or 0), Writer(dataset, capture), capture
    )
    recording.seed, recording.keeps_output = seed, output
    complete = False
    with _locked(dataset.directory):
        try:
            with tracker.watch(), intercept(recording.handle):
                yield recording
            complete = True
        finally:
            recording.close(complete=complete)
    if not recording.kept:
        raise CaptureError(_nothing_kept(recording, roots))


def prepare_directory(out: str | Path, model: str, *, overwrite: bool) -> Dataset:
    """Open the dataset at `out` for a new capture of `model`, without deleting anything.

    Raises:
        CaptureError: `out` is not writable, or contains a capture of `model` and `overwrite` is
            False.
    """
    directory = Path(out).absolute()  # the model may change the current one
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CaptureError(
            f"cannot write to {directory} ({error.strerror}); choose another with `out=`"
        ) from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise CaptureError(f"cannot write to {directory}; choose another with `out=`")
    dataset = Dataset.open_or_new(directory)
    # Two names with the same slug would write the same files.
    earlier = [c.model for c in dataset.captures if slug(c.model) == slug(model)]
    if earlier and not (overwrite and earlier == [model]):
        remedy = "rename this one" if earlier != [model] else "replace it with `overwrite=True`"
        raise CaptureError(
            f"{directory} already contains a capture of {earlier[0]}: {remedy}, "
            "or choose another directory with `out=`"
        )
    return dataset


@contextlib.contextmanager
def no_empty_directory(directory: Path) -> Iterator[None]:
    """Remove `directory` on exit if it is empty and did not exist before."""
    existed = directory.is_dir()
    try:
        yield
    finally:
        if not existed:
            with contextlib.suppress(OSError):
                directory.rmdir()


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lock the directory against other captures, which would overwrite its manifest.

    Raises:
        CaptureError: another process is recording there.
    """
    try:
        import fcntl
    except ImportError:  # not a Unix
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CaptureError(
                f"another capture is writing to {directory}; wait, or choose another directory"
            ) from error
        yield
    finally:
        os.close(descriptor)


class Recording:
    """A recording in progress, with counts of the calls seen and kept so far."""

    def __init__(
        self, tracker: ModuleTracker, sampler: Sampler, writer: Writer, capture: CaptureRecord
    ) -> None:
        self.capture = capture
        self.census = Census()
        self.seed: int | None = None
        self.keeps_output = True
        self.without_values = 0
        """Calls that cannot be stored: meta, fake or nested tensors, or inside `vmap`."""
        self._tracker = tracker
        self._sampler = sampler
        self._writer = writer
        self._kept: dict[int, Count] = {}
        self._places: dict[Count, Place | None] = {}
        """None where calls are not to be stored."""
        self._lock = threading.Lock()
        self._closed = False

    @property
    def seen(self) -> int:
        """SDPA calls made so far, anywhere in the process."""
        return self.census.calls

    @property
    def kept(self) -> int:
        return self._sampler.kept

    @property
    def nbytes(self) -> int:
        """Size of the tensors kept."""
        return self._sampler.nbytes

    @property
    def refused_for_bytes(self) -> int:
        """Calls not kept because of `max_bytes`."""
        return self._sampler.refused_for_bytes

    def handle(
        self, arguments: Arguments, proceed: Callable[[], Tensor], sdpa: Callable[..., Tensor]
    ) -> Tensor:
        """Make the call and store it if the sampler selects it; the interceptor's handler."""
        result = proceed()
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
                    self._observe(index, site, place, count, cast(arguments, dtype), result, sdpa)
        return result

    def close(self, *, complete: bool) -> None:
        with self._lock:
            self._closed = True
            self._writer.close(self.census.to_json(), complete=complete)

    def _place(self, site: Site, count: Count) -> Place | None:
        """Return where calls like these are sampled; None if they are not to be stored."""
        if site.module == "" or not _matches(site.module, self.capture.modules):
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
        if not all(_has_values(tensor) for tensor in arguments if isinstance(tensor, Tensor)):
            self.without_values += 1
            return
        nbytes = _stored_bytes(arguments, output=self.keeps_output)
        decision = self._sampler.offer(index, place, site.step, nbytes)
        if not decision.keep:
            return
        output = result if self.keeps_output else None
        call = _as_call(arguments, output, self._origin(index, site, arguments, sdpa))
        packed = PackedCall.of(call)
        self._kept[index] = count
        count.kept += 1
        for dropped in decision.drop:
            self._kept.pop(dropped).kept -= 1
        self._writer.put(packed, decision.drop, self.census.to_json())

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
            seed=self.seed,
            backend=_backend(arguments, sdpa),
            disabled_backends=disabled_backends(),
            versions=self.capture.versions,
        )


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
        is_causal=arguments.is_causal,
        scale=arguments.scale,
        enable_gqa=arguments.enable_gqa,
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


def _stored_bytes(arguments: Arguments, *, output: bool) -> int:
    query, key, value = arguments.query, arguments.key, arguments.value
    tensors = [query, key, value]
    if arguments.attn_mask is not None:
        tensors.append(arguments.attn_mask)
    nbytes = sum(_stored_elements(tensor) * tensor.element_size() for tensor in tensors)
    if output:
        nbytes += query.numel() // query.shape[-1] * value.shape[-1] * query.element_size()
    return nbytes


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
