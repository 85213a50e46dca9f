"""Kernels, and the places where they are found.

A kernel is one function with SDPA's own arguments, registered under a name:

    from replay import register_kernel

    @register_kernel("mine")
    def mine(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False,
             *, scale=None, enable_gqa=False):
        ...

Every file in `replay/kernels/adapters/` registers its kernels when imported, so a new file is
enough to add a kernel. A library is imported when its kernel is first needed, not when the file is
imported.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention_replay.errors import Error
from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import FEATURES
from replay.kernels.declared_arguments import adapted, original
from replay.kernels.kernel_names import ENTRY_POINTS, USER_MODULE, parts, registrations
from replay.kernels.registered_functions import Received, Registered, functions, received, source_of
from replay.rows.errors_of_output import AccuracyClass

Attention = Callable[..., Tensor]
"""SDPA's signature: (query, key, value, attn_mask, dropout_p, is_causal, *, scale, enable_gqa)."""


class KernelNameError(Error):
    """Error for an unknown name of a kernel; the message lists the nearest names."""


def _always(_: object) -> None:
    return None


@dataclass(frozen=True)
class ScaledCore:
    """Core of an 8-bit kernel whose output must be multiplied by a scale.

    Only `run` is timed, but the product of output and scale is judged.
    """

    run: Callable[[], Tensor]
    scale: Tensor
    """Factor of the output, a 0-dim tensor."""

    def __call__(self) -> Tensor:
        return self.run()

    def product(self) -> Tensor:
        """Return the output in float32."""
        return self.run().float() * self.scale


def _never(_: AttentionCall) -> bool:
    return False


@dataclass(frozen=True)
class Kernel:
    """Kernel with its limits and options."""

    name: str
    attention: Attention
    """Drop-in function that a model would run, including layout changes and quantisation."""
    accuracy_class: AccuracyClass = "exact"
    """Accuracy rule: `exact` (16 or 32 bits throughout), `quantised` or `sparse`."""
    unavailable: Callable[[torch.device], str | None] = _always
    """Function that tests a device and returns why the kernel cannot run there, or None."""
    unsupported: Callable[[AttentionCall], str | None] = _always
    """Function that returns why the kernel cannot run a call (mask, head_dim, dtype …), or None."""
    prepare: Callable[[AttentionCall], Callable[[], Tensor]] | None = None
    """Function that does everything before the kernel's core, and returns the core.

    The core's output has the kernel's layout and is judged in the same way, but may have a
    different dtype. A `ScaledCore` omits the scale.
    """
    default: bool = True
    """True if the kernel runs when no kernel is named."""
    about: str = ""
    """Description of the kernel in the list of kernels."""
    library: str = ""
    """Package that contains the kernel; the package's version is shown."""
    install: str = ""
    """Command that installs the library."""
    variant_of: str = ""
    """Base kernel of this variant, whose name is `base[option=value,…]`; a variant never runs by
    default."""
    own_process: bool = False
    """True if the kernel must not share a worker with another such kernel, because its library
    supports one kernel per process. One worker calls `unavailable` of all such kernels, so
    `unavailable` must not make the library choose a kernel."""

    chosen: Callable[[AttentionCall], Tensor] | None = None
    """Function that returns the keys a `sparse` kernel attends to: bool, True = attended,
    broadcasts to (B, Hq, Sq, Sk), with the same result for the same inputs.
    `replay.mask_of_tokens` makes this mask from indices. For blocks, it may be a
    `capture.call.block_mask.block_mask`, which takes less memory."""
    options: Callable[..., Kernel] | None = None
    """Function that makes this kernel with other options.

    Each keyword argument has a default, and values must have the type of the default. The function
    raises ValueError with a sentence for a meaningless value. Names such as `name[option=value,…]`
    call this function.
    """

    differentiable: bool | None = False
    """True if PyTorch computes gradients of `attention`; None if only a run can tell, as for a
    user's function."""

    features: frozenset[str] = frozenset()
    """Features beyond SDPA that the kernel supports (`capture.call.attention_variant.FEATURES`).

    `attention` gets the call's `sinks`, `cu_seqlens_q`, `cu_seqlens_k`, `seqused_k`, `page_table`,
    `query_scale`, `key_scale`, `value_scale`, `window`, `softcap`, `bottom_right`, `max_seqlen_q`
    and `max_seqlen_k` as keyword arguments.
    """

    prefers_rewritten_mask: Callable[[AttentionCall], bool] = _never
    """Function that returns True if equivalent options (`capture.call.mask_structure`) should
    replace a call's mask. Options always replace a mask that the kernel refuses."""

    warm_up: Callable[[], None] | None = None
    """Function that imports in advance the modules that the first call would import."""

    source: str = ""
    """File or installed package outside this project that defines the kernel; empty for known
    kernels. Kernels of one source share a worker process, which no other kernel shares."""

    load: Callable[[], Kernel] | None = None
    """Function that imports the kernel when it is first needed: code from a user's file or from an
    installed package's entry point."""

    def __post_init__(self) -> None:
        if not self.name.strip() or not self.name.isprintable():
            raise ValueError(f"invalid kernel name {self.name!r}: expected one printable line")
        if (self.accuracy_class == "sparse") != (self.chosen is not None):
            raise ValueError(f"{self.name}: a kernel is sparse if and only if `chosen` is given")
        if unknown := self.features - FEATURES.keys():
            known = ", ".join(FEATURES)
            unknown_names = ", ".join(sorted(unknown))
            raise ValueError(f"{self.name}: unknown feature {unknown_names} (known: {known})")

    @property
    def process(self) -> str:
        """Name of the worker process that the kernel needs; empty for that of known kernels."""
        return self.name if self.own_process else self.source

    def refuses(self, call: AttentionCall) -> str | None:
        """Return the reason why the kernel cannot run a call; None if it can."""
        unknown = [FEATURES[name] for name in call.features if name not in self.features]
        return f"has no {' and no '.join(unknown)}" if unknown else self.unsupported(call)

    def loaded(self) -> Kernel:
        """Return the kernel itself, importing it if necessary."""
        return self if self.load is None else self.load()


_kernels: dict[str, Kernel] = {}


def register(kernel: Kernel) -> Kernel:
    """Add a kernel to the catalogue.

    Raises:
        ValueError: the name is taken.
    """
    known = _kernels.get(kernel.name)
    # A worker knows the kernels of its parent before it imports their files, which register them.
    if known is not None and not (known.load and known.source == kernel.source):
        raise ValueError(f"a kernel named {kernel.name!r} is registered already")
    _kernels[kernel.name] = kernel
    return kernel


def register_kernel(
    name: str,
    *,
    accuracy_class: AccuracyClass = "exact",
    unavailable: Callable[[torch.device], str | None] = _always,
    unsupported: Callable[[AttentionCall], str | None] = _always,
    prepare: Callable[[AttentionCall], Callable[[], Tensor]] | None = None,
    default: bool = True,
    about: str = "",
    library: str = "",
    install: str = "",
    chosen: Callable[[AttentionCall], Tensor] | None = None,
    features: Collection[str] = (),
) -> Callable[[Attention], Attention]:
    """Register the decorated function as a kernel. It has SDPA's arguments, or some of them.

    The kernel runs in a worker process that imports the function. A lambda, a function inside
    another one, or one of a notebook runs only with `workers=False`, and is not ranked.

    Args:
        name: the kernel's name.
        accuracy_class: accuracy rule for its output: `exact`, `quantised` or `sparse`.
        unavailable: returns the reason why the kernel cannot run on a device, or None.
        unsupported: returns the reason why the kernel cannot run a call, or None.
        prepare: does everything before the kernel's core once, and returns the core.
        default: run the kernel when no kernel is named.
        about: one line for lists of kernels; by default the first line of the function's docstring.
        library: the package whose version is shown.
        install: the command that installs the library.
        chosen: for `sparse` kernels, returns the mask of the keys that a call attends to.
        features: features beyond SDPA that the function's arguments support (see `Kernel`).

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        ValueError: the name is taken, the arguments contradict each other, or the function cannot
            take a call.

    Example:
        >>> @register_kernel("mine")
        ... def mine(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False,
        ...          *, scale=None, enable_gqa=False):
        ...     ...
    """

    def decorate(attention: Attention) -> Attention:
        line = about or (attention.__doc__ or "").strip().partition("\n")[0]
        fields: dict[str, Any] = {
            "accuracy_class": accuracy_class,
            "unavailable": unavailable,
            "unsupported": unsupported,
            "prepare": prepare,
            "library": library,
            "install": install,
            "chosen": chosen,
            "features": frozenset(features),
        }
        shown: dict[str, Any] = {"default": default, "about": line, "source": source_of(attention)}
        register(of_function(name, attention, **shown, **fields))
        is_plain = Kernel(name, attention) == Kernel(name, attention, **fields)
        functions[name] = Registered(attention, has_limits=not is_plain)
        return attention

    return decorate


def catalogue() -> dict[str, Kernel]:
    """Return every registered kernel by name, after importing our own kernels."""
    package = importlib.import_module("replay.kernels.adapters")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if entry_point.name not in _kernels:
            about = f"from {entry_point.value}"
            source = entry_point.value.partition(":")[0]
            register(_foreign(entry_point.name, entry_point.load, about, source))
    given, folders = received()
    for name, function in given.items():
        if name not in _kernels:
            register(_of_parent(name, function, folders))
    return dict(_kernels)


def _of_parent(name: str, given: Received, folders: Sequence[str]) -> Kernel:
    """Return a kernel that this process's parent registered."""
    where, _, function = given.address.rpartition(":")

    def load() -> Attention:
        sys.path += [folder for folder in folders if folder not in sys.path]
        if where == given.source:
            attention = _function_of_file(where, function)
        else:
            attention = getattr(importlib.import_module(where), function)
        if given.has_limits and attention not in map(
            original, (each.attention for each in _kernels.values())
        ):
            raise KernelNameError(
                f"importing {where} does not register {function} as {name}: decorate it there"
            )
        return attention

    return _foreign(name, load, f"your {function}", given.source)


def registered() -> tuple[str, ...]:
    """Return the names of the kernels registered so far, without importing any kernel."""
    return tuple(_kernels)


def _from_file(target: str) -> Kernel:
    """Return the kernel of a user's `path/file.py:name`, without importing the file yet.

    The name is that of a function, or the name under which the file registers a kernel.
    """
    path, _, function = target.rpartition(":")
    if not target.isprintable():
        raise KernelNameError(f"no kernel {target!r}: its path must be one printable line")
    if not Path(path).is_file():
        raise KernelNameError(f"no kernel {target!r}: there is no file {path}")
    try:
        source = Path(path).read_text("utf-8", errors="replace")
    except OSError as error:
        reason = f"{path} cannot be read: {error.strerror}"
        raise KernelNameError(f"no kernel {target!r}: {reason}") from error
    # The file may import the function, so refuse only a file that does not mention its name.
    if not re.search(rf"\b{re.escape(function)}\b|import \*|__getattr__", source):
        if re.search(r"[*?]", function):
            hint = f"{path} decorates no function with `register_kernel` under such a name"
            raise KernelNameError(f"no kernel {target!r}: {hint}")
        own = [*re.findall(r"^(?:async )?def (\w+)", source, re.MULTILINE), *registrations(path)]
        near = difflib.get_close_matches(function, own)
        hint = f"did you mean {', '.join(near)}?" if near else "add it"
        raise KernelNameError(f"no kernel {target!r}: {path} has no function {function!r}; {hint}")

    load = functools.partial(_function_of_file, path, function)
    return _foreign(target, load, f"your {function}", path)


def _function_of_file(path: str, function: str) -> Attention:
    """Import a user's file, unless it is imported already, and return its function."""
    # Name the module after the whole path, because two files may have the same name.
    name = USER_MODULE + re.sub(r"\W", "_", str(Path(path).resolve()))
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(Path(path).resolve().parent))
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    module = sys.modules[name]  # a module may replace its entry in `sys.modules`
    known = _kernels.get(function)
    is_name = function in registrations(path) or not hasattr(module, function)
    if is_name and known is not None and known.source and known.load is None:
        return original(known.attention)
    if not hasattr(module, function):
        raise KernelNameError(f"{path} has no function {function!r}")
    attention = getattr(module, function)
    if not callable(attention):
        raise KernelNameError(f"{function} in {path} is not a function")
    found: Attention = attention
    return found


def of_function(name: str, function: Attention, **fields: Any) -> Kernel:
    """Return a kernel of a user's function; `Kernel` describes the fields.

    Calls that need arguments which the function does not declare are unsupported.

    Raises:
        SignatureError: the function cannot take a call.
    """
    attention, declared = adapted(function, fields.get("features", ()))
    kernel = Kernel(name, attention, **{"differentiable": None, **fields})
    if declared is None:
        return kernel
    return replace(
        kernel, unsupported=lambda call: declared.refusal(call) or kernel.unsupported(call)
    )


def _foreign(name: str, load: Callable[[], Attention], about: str, source: str) -> Kernel:
    """Return a kernel that is imported when needed; the limits that it registers then apply."""

    def loaded() -> Kernel:
        before = dict(_kernels)
        try:
            attention = load()
        except BaseException:
            # Undo registrations, or a second attempt would report a duplicate name as the cause.
            _kernels.clear()
            _kernels.update(before)
            raise
        own = name.rpartition(":")[2]
        known = [each for each in _kernels.values() if original(each.attention) is attention]
        for kernel in sorted(known, key=lambda each: each.name != own):
            return replace(kernel, name=name, source=source, load=None)
        return of_function(name, attention, about=about, source=source)

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        return load()(*args, **kwargs)

    return Kernel(name, attend, about=about, source=source, load=loaded)


_NO_NAME = (
    "a kernel is named by a string, not {}: a registered name or 'file.py:function' "
    "(`register_kernel` gives a function a name)"
)


def find(name: str) -> Kernel:
    """Return the registered kernel with this name, or a user's `file.py:function`.

    Raises:
        KernelNameError: no kernel has this name.
        TypeError: `name` is not a string.
    """
    if not isinstance(name, str):
        raise TypeError(_NO_NAME.format(type(name).__name__))
    if name in _kernels:  # searching installed packages takes milliseconds
        return _kernels[name]
    kernels = catalogue()
    if name in kernels:
        return kernels[name]
    if ".py:" in name:
        return _from_file(name)
    base, _, given = name.partition("[")
    if base in kernels and name.endswith("]") and kernels[base].options is not None:
        return _with_texts(kernels[base], given.removesuffix("]"))
    near = difflib.get_close_matches(name, kernels, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    hint += "`replay kernels` lists them"
    if name.endswith(".py"):
        hint = f"name a function in it, {name}:FUNCTION"
    elif base in kernels:
        hint = "its options end with ]" if kernels[base].options else f"{base} has no options"
    raise KernelNameError(f"no kernel {name!r}: {hint}")


def option_names(kernel: Kernel) -> list[str]:
    """Return the options that the kernel accepts in brackets after its name."""
    return list(inspect.signature(kernel.options).parameters) if kernel.options else []


def with_options(kernel: Kernel, values: Mapping[str, Any]) -> Kernel:
    """Return the kernel with the given options; options that the kernel lacks are ignored.

    Raises:
        KernelNameError: a value is invalid.
    """
    values = {name: values[name] for name in option_names(kernel) if name in values}
    if not values or kernel.options is None:
        return kernel
    text = ",".join(f"{name}={value}" for name, value in values.items())
    try:
        made = kernel.options(**values)
    except ValueError as error:
        raise KernelNameError(f"{kernel.name}[{text}]: {error}") from error
    return replace(
        made,
        name=f"{kernel.name}[{text}]",
        variant_of=kernel.name,
        default=False,
        options=None,
        source=kernel.source,
    )


def _with_texts(kernel: Kernel, given: str) -> Kernel:
    """Return the kernel with options parsed from `option=value,…`."""
    assert kernel.options is not None
    known = inspect.signature(kernel.options).parameters
    values = {}
    for part in given.split(","):
        option, _, text = part.strip().partition("=")
        name = f"{kernel.name}[{given}]"
        if option not in known:
            raise KernelNameError(
                f"{kernel.name} has no option {option!r}: it has {', '.join(known)}"
            )
        if not text:
            raise KernelNameError(f"{name}: {option} has no value: write {option}=VALUE")
        if option in values:
            raise KernelNameError(f"{name}: {option} is given twice: leave one of them out")
        kind = type(known[option].default)
        try:
            values[option] = kind(text)
        except ValueError as error:
            raise KernelNameError(f"{name}: {text!r} is not a valid {kind.__name__}") from error
    return with_options(kernel, values)


def select(patterns: str | None, variants: bool = False) -> tuple[list[Kernel], list[str]]:
    """Return the kernels that a comma-separated list selects, and the names in it (no globs).

    A name may also be a user's `file.py:function`. None chooses the default kernels, and `all`
    chooses every kernel without its variants; `variants` adds the variants of every chosen kernel.
    In a glob, `*` and `?` are special; brackets are not, because names of variants contain them.

    Raises:
        KernelNameError: a name or glob matches no kernel.
        TypeError: `patterns` is not a string.
    """
    if not isinstance(patterns, str | None):
        raise TypeError(_NO_NAME.format(type(patterns).__name__))
    kernels = catalogue()
    if patterns is None:
        defaults = {name: kernel for name, kernel in kernels.items() if kernel.default}
        return list((_with_variants(defaults) if variants else defaults).values()), []
    chosen: dict[str, Kernel] = {}
    named: list[str] = []
    for pattern in parts(patterns):
        if pattern in kernels:
            matches = [pattern]
        elif pattern == "all":
            matches = [name for name, kernel in kernels.items() if not kernel.variant_of]
        else:
            matches = fnmatch.filter(kernels, pattern.replace("[", "[[]"))
        if pattern in kernels or not matches:
            chosen[pattern] = find(pattern)
            named.append(pattern)
        chosen.update((name, kernels[name]) for name in matches)
    if not chosen:
        raise KernelNameError("--kernels names no kernel; see `replay kernels`")
    return list((_with_variants(chosen) if variants else chosen).values()), named


def _with_variants(chosen: dict[str, Kernel]) -> dict[str, Kernel]:
    """Return the chosen kernels, each followed by its variants that are not chosen already."""
    kernels = catalogue().values()
    found: dict[str, Kernel] = {}
    for name, kernel in chosen.items():
        found[name] = kernel
        found.update((each.name, each) for each in kernels if each.variant_of == name)
    return found
