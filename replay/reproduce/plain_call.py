"""What a kernel's adapter does with one call, as source that needs the kernel's library alone.

Nobody writes that source twice: the adapter runs once, and what it asks of PyTorch and of its
library is written down, each line before it is run, so that the last line is the one that crashed.
Its library is whatever `Library.load` returns, and our own Triton functions, which are one here
too. What these do inside is not looked at.

An adapter that compiles functions of its own cannot be written down like this. Its source is then a
call of the adapter, whose files the reproducer brings along.

A child process does this (`replay.workers.process`), since a kernel may end it.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import importlib.metadata
import math
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from textwrap import indent
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode, resolve_name

from capture.hooks.interceptor import TORCH_SDPA
from replay.bench.forms import Forms
from replay.isolation.inputs import aliases
from replay.kernels import libraries as library
from replay.kernels.kernel_names import ENTRY_POINTS
from replay.kernels.registry import Kernel, find, registered
from replay.workers.sources import workload_of
from replay.workers.worker import Hear, Say

ADAPTERS = "replay.kernels.adapters"
OURS = "attention_kernels"
"""Kernels of ours, whose files a reproducer brings along."""

_SWITCHES = {
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
}


LONGEST_LINE = 80


class Untraceable(Exception):
    """Something that no source can say; the message names it."""


@dataclass
class PlainCall:
    """Source of one call, as JSON."""

    lines: list[str] = field(default_factory=list)
    """The body of a function of the call's tensors; `stored` has others by name."""
    result: str = ""
    """The expression that is the output; empty where the kernel returned none."""
    imports: list[str] = field(default_factory=list)
    library: str = ""
    """The package that has the kernel, if any."""
    raised: str = ""
    """What the kernel raised, if it did."""
    impossible: str = ""
    """Why there is no source; empty if there is."""


def handle(request: dict[str, Any], say: Say, _hear: Hear) -> None:
    """Answer `{"kernel": …, "workload": …, "device": …, "stored": …, "copied": …}` with
    `PlainCall`s, each more of the source, and the last one complete.

    Tensors that are none of the call's are written into the file `stored`, and what a sparse kernel
    chose beside it. `copied` asks for a call of the adapter.
    """
    device = torch.device(request["device"])
    say(at=request["kernel"])
    adapter = _adapter_of(request["kernel"]) if request["copied"] else ""
    kernel = find(request["kernel"]).loaded()
    call = workload_of(request["workload"]).load(device)
    form = Forms.of(call).form(kernel, device).call
    stored = Path(request["stored"])
    with torch.no_grad():
        if kernel.chosen is not None:
            save_file({"chosen": kernel.chosen(form).cpu().contiguous()}, f"{stored}.chosen")
        arguments = aliases(form)
        names = {name: arguments.get(name) for name in call.tensors()}
        tracer = _Tracer(kernel.library, names, stored, lambda plain: say(plain=asdict(plain)))
        if adapter:
            plain = _call_of_adapter(adapter, request["kernel"], arguments, tracer)
        else:
            plain = _traced(kernel, request["kernel"], arguments, tracer)
    say(plain=asdict(plain))


def _traced(kernel: Kernel, name: str, arguments: dict[str, Any], tracer: _Tracer) -> PlainCall:
    attention: Callable[..., Any] = kernel.attention
    if source := _function_of(name):
        module, _, function = source.partition(":")
        owner = f"importlib.import_module({module!r})"  # what no statement can import
        if all(part.isidentifier() for part in module.split(".")):
            owner = tracer.imported(module)
        attention = tracer.watched(attention, f"{owner}.{function}")
    try:
        with _watched_libraries(tracer), tracer:
            output = attention(**arguments)
        return tracer.finished(output)
    except Untraceable as error:
        tracer.plain.impossible = str(error)
    except BaseException as error:
        tracer.plain.raised = f"{type(error).__name__}: {error}"
    return tracer.plain


def _call_of_adapter(
    adapter: str, name: str, arguments: dict[str, Any], tracer: _Tracer
) -> PlainCall:
    tracer.imported(adapter)
    owner = tracer.imported("replay.kernels.registry")
    tracer.plain.result = tracer.call(f"{owner}.find({name!r}).attention", (), arguments)
    tracer.keep_stored()
    return tracer.plain


def _adapter_of(name: str) -> str:
    """The module that registers a kernel, if asked before any other was imported.

    Raises:
        Untraceable: it is none of ours.
    """
    package = importlib.import_module(ADAPTERS)
    for module in pkgutil.iter_modules(package.__path__, f"{ADAPTERS}."):
        importlib.import_module(module.name)
        if name.partition("[")[0] in registered():
            return module.name
    raise Untraceable(f"where {name} comes from")


def _function_of(kernel: str) -> str:
    """`module:function` of a user's or an installed package's kernel; empty for ours."""
    path, _, function = kernel.rpartition(":")
    if path.endswith(".py"):
        return f"{Path(path).stem}:{function}"
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if entry_point.name == kernel:
            return entry_point.value
    return ""


@contextlib.contextmanager
def _watched_libraries(tracer: _Tracer) -> Iterator[None]:
    """Adapters get libraries that write down what is asked of them."""
    load = library.Library.load

    def watched(asked: library.Library) -> Any:
        load(asked)
        return tracer.watched(load(asked), tracer.imported(asked.module))

    modules: dict[str, Any] = {}
    with contextlib.suppress(ImportError):  # no Triton
        for each in pkgutil.walk_packages(importlib.import_module(OURS).__path__, f"{OURS}."):
            module = importlib.import_module(each.name)
            if each.name != f"{OURS}.options":  # plain values, which are written as such
                modules[each.name] = tracer.watched(module, each.name)
    with patch.object(library.Library, "load", watched), patch.dict(sys.modules, modules):
        yield


@dataclass(frozen=True)
class _Line:
    """One statement of the source."""

    asked: str
    target: str = ""
    """The name of what it made, if it made anything."""
    is_effect: bool = False
    """Whether it counts even if nobody uses what it made."""
    within: str = ""
    """A `with` that it stands in."""

    def __str__(self) -> str:
        statement = f"{self.target} = {self.asked}" if self.target else self.asked
        return f"{self.within}\n{indent(statement, '    ')}" if self.within else statement


class _Watched:
    """An object of a library as an adapter sees it: calls are written down."""

    def __init__(self, tracer: _Tracer, real: Any, source: str) -> None:
        self.__dict__.update(tracer=tracer, real=real, source=source, __wrapped__=real)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.real, name)
        return found if name.startswith("__") else self.tracer.seen(found, f"{self.source}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.source.startswith(f"{OURS}."):
            self.tracer.imported(self.source.rpartition(".")[0])
        return self.tracer.called(self, args, kwargs)


class _Tracer(TorchFunctionMode):
    """Writes down what PyTorch and libraries are asked, and not what they do for it.

    Args:
        names: tensors that the source has names for.
        stored: a file for other tensors.
        announce: told before each line is run.
    """

    def __init__(
        self,
        package: str,
        names: dict[str, Tensor | None],
        stored: Path,
        announce: Callable[[PlainCall], None],
    ) -> None:
        super().__init__()
        self.plain = PlainCall(library="" if package in ("torch", "triton") else package)
        self._lines: list[_Line] = []
        self._names: dict[int, str] = {}
        self._alive: list[object] = []
        """Whatever has a name: another object must not get its `id`."""
        self._stored: dict[str, Tensor] = {}
        self._file = stored
        self._announce = announce
        self._is_inside = False
        for name, tensor in names.items():
            if tensor is not None:
                self._name(tensor, name)

    def imported(self, module: str) -> str:
        """Have the source import a module; its name there."""
        line = f"import {module}"
        if line not in self.plain.imports:
            self.plain.imports.append(line)
        return module

    def watched(self, real: Any, source: str) -> Any:
        return _Watched(self, real, source)

    def seen(self, value: Any, source: str) -> Any:
        """What an adapter gets of a library: plain values as they are."""
        if isinstance(value, Tensor):
            self._name(value, source)
        if _is_plain(value) or isinstance(value, Tensor):
            return value
        if isinstance(value, tuple | list):
            self._name(value, source)
            for place, each in enumerate(value):
                self.seen(each, f"{source}[{place}]")
            return value
        return self.watched(value, source)

    def called(self, function: _Watched, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Write down a call of a library, and make it."""
        if self._is_inside:
            return function.real(*_real(args), **_real(kwargs))
        line = _Line(self.call(function.source, args, kwargs), is_effect=True)
        self._announce_line(line)
        return self._result(line, self._run(function.real, _real(args), _real(kwargs)))

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_inside:
            return func(*args, **kwargs)
        name = resolve_name(func)
        if name is None:
            raise Untraceable(f"{func} of PyTorch")
        if name.endswith(".__get__") or name in _QUESTIONS:
            result = self._run(func, args, kwargs)
            if not _has_tensors(result):
                return result
            return self._result(_Line(self._asked(name, args, kwargs)), result)
        method = name.rpartition(".")[2]
        is_in_place = method.endswith("_") and not method.endswith("__")
        line = _Line(
            self._asked(name, args, kwargs),
            is_effect=is_in_place or method == "__setitem__" or "out" in kwargs,
            within=_only_backends() if name == _SDPA else "",
        )
        self._announce_line(line)
        return self._result(line, self._run(func, args, kwargs))

    def finished(self, output: Any) -> PlainCall:
        """The source, without lines whose values nobody uses.

        Raises:
            Untraceable: the output came from something else.
        """
        if id(output) not in self._names:
            raise Untraceable("what the kernel does beside calls of PyTorch and of its library")
        used = result = self._names[id(output)]
        kept: list[str] = []
        for line in reversed(self._lines):
            if line.is_effect or re.search(rf"\b{line.target}\b", used):
                kept.append(str(line))
                used += f"\n{line.asked}"
        self.plain.lines, self.plain.result = kept[::-1], result
        return self.plain

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call something without looking at what it does inside."""
        before, self._is_inside = self._is_inside, True
        try:
            return function(*args, **kwargs)
        finally:
            self._is_inside = before

    def _result(self, line: _Line, result: Any) -> Any:
        """Add a line, and name what it made."""
        is_named = isinstance(result, Tensor) and id(result) in self._names
        is_nothing = _is_plain(result) or not (_has_tensors(result) or line.is_effect)
        if is_named or is_nothing:
            self._lines += [line] * line.is_effect
            return result
        target = f"t{len(self._lines)}"
        self._lines.append(replace(line, target=target))
        return self.seen(result, target)

    def _announce_line(self, line: _Line) -> None:
        """Say the source with this line at its end, which may be the last."""
        self.keep_stored()
        self.plain.lines = [str(each) for each in (*self._lines, line)]
        self._announce(self.plain)

    def keep_stored(self) -> None:
        """Write the tensors that are none of the call's."""
        if self._stored:
            self._run(save_file, (self._stored, self._file), {})

    def call(self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """A call as it is written, over several lines where one is too long."""
        listed = self._listed(args, kwargs)
        line = f"{function}({', '.join(listed)})"
        if len(line) <= LONGEST_LINE:
            return line
        return f"{function}(\n    " + ",\n    ".join(listed) + ",\n)"

    def _name(self, value: object, name: str) -> None:
        self._names[id(value)] = name
        self._alive.append(value)

    def _asked(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """A call of PyTorch as somebody would write it."""
        if not name.startswith("torch.Tensor."):
            return self.call(name, args, kwargs)
        owner, (_, _, method) = self._text(args[0]), name.partition("torch.Tensor.")
        if method.endswith(".__get__"):
            return f"{owner}.{method.removesuffix('.__get__')}"
        if method == "__getitem__":
            return f"{owner}[{self._index(args[1])}]"
        if method == "__setitem__":
            return f"{owner}[{self._index(args[1])}] = {self._text(args[2])}"
        return self.call(f"{owner}.{method}", args[1:], kwargs)

    def _index(self, value: Any) -> str:
        """What stands in brackets: `..., :2`."""
        if isinstance(value, tuple) and value:
            return ", ".join(map(self._index, value)) + "," * (len(value) == 1)
        if isinstance(value, slice):
            ends = ["" if each is None else self._text(each) for each in (value.start, value.stop)]
            return ":".join([*ends, self._text(value.step)] if value.step is not None else ends)
        return self._text(value)

    def _listed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        named = (f"{name}={self._text(value)}" for name, value in kwargs.items())
        return [*map(self._text, args), *named]

    def _text(self, value: Any) -> str:
        """An expression that is the value.

        Raises:
            Untraceable: there is none.
        """
        if isinstance(value, _Watched):
            return str(value.source)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if id(value) in self._names and isinstance(value, tuple | list):
            return self._names[id(value)]
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
            return str(value)
        if isinstance(value, slice):
            return self.call("slice", (value.start, value.stop, value.step), {})
        if value is Ellipsis:
            return "..."
        if isinstance(value, dict):
            parts = (f"{self._text(key)}: {self._text(each)}" for key, each in value.items())
            return f"{{{', '.join(parts)}}}"
        if isinstance(value, list):
            return f"[{', '.join(map(self._text, value))}]"
        if isinstance(value, tuple):
            return f"({''.join(f'{self._text(each)}, ' for each in value)})"
        if isinstance(value, enum.Enum):
            kind = type(value)
            return f"{self.imported(kind.__module__)}.{kind.__qualname__}.{value.name}"
        if is_dataclass(value) and not isinstance(value, type):
            return self._made(value)
        if value is None or isinstance(value, bool | int | float | str):
            return repr(value)
        raise Untraceable(f"an argument of type {type(value).__qualname__}")

    def _made(self, value: Any) -> str:
        """Return the expression that makes a dataclass's instance."""
        kind = type(value)
        changed = {
            each.name: getattr(value, each.name)
            for each in fields(value)
            if each.default is MISSING or getattr(value, each.name) != each.default
        }
        return self.call(f"{self.imported(kind.__module__)}.{kind.__qualname__}", (), changed)

    def _tensor(self, tensor: Tensor) -> str:
        if id(tensor) not in self._names:
            name = f"s{len(self._stored)}"
            self._stored[name] = self._run(_copied, (tensor,), {})
            self._name(tensor, f'stored["{name}"]')
        return self._names[id(tensor)]


_QUESTIONS = {"torch.Tensor.stride", "torch.Tensor.size", "torch.Tensor.dim", "torch.Tensor.numel"}
"""What is asked of a tensor and answered with numbers, beside its attributes."""


_SDPA = resolve_name(TORCH_SDPA)


def _only_backends() -> str:
    """A `with` for the backends that PyTorch may choose from; empty if these are all."""
    enabled = [str(backend) for backend, is_enabled in _SWITCHES.items() if is_enabled()]
    if len(enabled) == len(_SWITCHES):
        return ""
    names = ", ".join(f"torch.nn.attention.{each}" for each in enabled)
    return f"with torch.nn.attention.sdpa_kernel([{names}]):"


def _is_plain(value: Any) -> bool:
    kinds = (bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size, type(None))
    return isinstance(value, kinds)


def _has_tensors(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_has_tensors, value))
    return isinstance(value, Tensor)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _real(value: Any) -> Any:
    """A library's own objects again, in arguments too."""
    if isinstance(value, _Watched):
        return value.real
    if type(value) in (tuple, list):
        return type(value)(map(_real, value))
    if type(value) is dict:
        return {key: _real(each) for key, each in value.items()}
    return value
