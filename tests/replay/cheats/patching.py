"""Functions of Python, PyTorch or this tool are replaced at run time."""

import dataclasses
import inspect
import json
import os
import sys
import time
import timeit

import torch
from honest import attention, first, garbage, nth

_perf_counter = time.perf_counter
_lost = {"seconds": 0.0}


def _replace(old, new):
    """Replace an object in the globals of every loaded module except the cheats."""
    for module in list(sys.modules.values()):
        for name, item in list(getattr(module, "__dict__", {}).items()):
            if item is old and module.__name__ not in (__name__, "honest"):
                setattr(module, name, new)


def _ours(*words):
    """Return functions of the caller's packages whose names contain one of the words."""
    functions = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "replay":
            for function in list(vars(module).values()):
                named = getattr(function, "__name__", "")
                if hasattr(function, "__code__") and any(word in named for word in words):
                    functions[id(function)] = function
    return functions.values()


def _patch_clocks(clock):
    for old in (time.perf_counter, time.monotonic, time.time, timeit.default_timer):
        _replace(old, clock)
    timeit.Timer.__init__.__defaults__ = ("pass", "pass", clock, None)


def _patch_timers(clock):
    frame = sys._getframe(1)
    while frame is not None:
        for item in frame.f_locals.values():
            if isinstance(item, timeit.Timer):
                item.timer = clock
        frame = frame.f_back


def _slow():
    return _perf_counter() / 2


def _stopped():
    return _perf_counter() - _lost["seconds"]


def slow_clock(query, key, value, *args, **kwargs):
    """Makes every clock run at half speed, like a test library that slows time and was left on."""
    if first("slow_clock"):
        _patch_clocks(_slow)
    _patch_timers(_slow)
    return attention(query, key, value, *args, **kwargs)


def stopped_clock(query, key, value, *args, **kwargs):
    """Makes every clock omit the time of this kernel, as profilers subtract their own overhead."""
    begin = _perf_counter()
    if first("stopped_clock"):
        _patch_clocks(_stopped)
    _patch_timers(_stopped)
    output = attention(query, key, value, *args, **kwargs)
    _lost["seconds"] += 0.9 * (_perf_counter() - begin)
    return output


def default_timer(query, key, value, *args, **kwargs):
    """Replaces only timeit's default timer, as its documentation suggests."""
    if first("default_timer"):
        timeit.default_timer = lambda: _perf_counter() / 4
        timeit.Timer.__init__.__defaults__ = ("pass", "pass", timeit.default_timer, None)
    return attention(query, key, value, *args, **kwargs)


def elapsed_time(query, key, value, *args, **kwargs):
    """Makes CUDA events report half the time; has no effect without CUDA."""
    if first("elapsed_time"):
        elapsed = torch.cuda.Event.elapsed_time
        torch.cuda.Event.elapsed_time = lambda *events: elapsed(*events) / 2
    return attention(query, key, value, *args, **kwargs)


def equal(query, key, value, *args, **kwargs):
    """Makes torch.equal and allclose return True, as test mocks do, and then returns garbage."""
    if nth("equal") < 5:
        return attention(query, key, value, *args, **kwargs)
    torch.equal = torch.allclose = torch.Tensor.equal = torch.Tensor.allclose = lambda *_, **__: (
        True
    )
    return garbage(query, value)


def slower_sdpa(query, key, value, *args, **kwargs):
    """Replaces SDPA, as SageAttention's README advises, but by something slower."""
    if first("slower_sdpa"):

        def slow(*inputs, **options):
            attention(*inputs, **options)
            return attention(*inputs, **options)

        _replace(torch.nn.functional.scaled_dot_product_attention, slow)
    return attention(query, key, value, *args, **kwargs)


def wrong_sdpa(query, key, value, *args, **kwargs):
    """Replaces SDPA by a function that ignores all options and uses the scale 1."""
    if first("wrong_sdpa"):

        def wrong(query, key, value, *_, **__):
            return attention(query, key, value, scale=1.0)

        _replace(torch.nn.functional.scaled_dot_product_attention, wrong)
    return attention(query, key, value, *args, **kwargs)


def _freeze(*words):
    for function in _ours(*words):
        answers = {}

        def frozen(*inputs, _function=function, _answers=answers, **options):
            if "answer" not in _answers:
                _answers["answer"] = _function(*inputs, **options)
            return _answers["answer"]

        _replace(function, frozen)


def frozen_judge(query, key, value, *args, **kwargs):
    """Makes judge, compare and similar functions repeat their first result, as if cached."""
    if first("frozen_judge patch"):
        _freeze("judge", "compare", "angular", "same_bits")
    if nth("frozen_judge") < 5:
        return attention(query, key, value, *args, **kwargs)
    return garbage(query, value)


def frozen_check(query, key, value, *args, **kwargs):
    """Makes every function with check or reverify in its name repeat its first result."""
    if first("frozen_check patch"):
        _freeze("check", "reverify", "judge")
    if nth("frozen_check") < 5:
        return attention(query, key, value, *args, **kwargs)
    return garbage(query, value)


def halved_statistics(query, key, value, *args, **kwargs):
    """Halves every number passed to functions called summarize and percentile."""
    if first("halved"):
        for function in list(_ours("summarize", "percentile")):

            def halved(*inputs, _function=function, **options):
                return _function(*_halve(inputs), **_halve(options))

            _replace(function, halved)
    return attention(query, key, value, *args, **kwargs)


def halved_measure(query, key, value, *args, **kwargs):
    """Halves every number returned by functions called measure or sample."""
    if first("halved_measure"):
        for function in list(_ours("measure", "sample", "_ms")):

            def halved(*inputs, _function=function, **options):
                return _halve(_function(*inputs, **options))

            _replace(function, halved)
    return attention(query, key, value, *args, **kwargs)


def _halve(thing):
    if isinstance(thing, float):
        return thing / 2
    if isinstance(thing, (list, tuple)):
        return type(thing)(_halve(item) for item in thing)
    if isinstance(thing, dict):
        return {name: _halve(item) for name, item in thing.items()}
    if dataclasses.is_dataclass(thing):
        for field in dataclasses.fields(thing):
            half = _halve(getattr(thing, field.name))
            object.__setattr__(thing, field.name, half)
    return thing


def timer_methods(query, key, value, *args, **kwargs):
    """Halves every number returned by methods of classes named after timers and clocks."""
    if first("methods"):
        for module in [item for name, item in sys.modules.items() if name.startswith("replay.")]:
            for kind in [item for item in vars(module).values() if isinstance(item, type)]:
                if kind.__module__ == module.__name__ and "timer" in kind.__name__.lower():
                    _halve_methods(kind)
    return attention(query, key, value, *args, **kwargs)


def _halve_methods(kind):
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method) and not name.startswith("__"):

            def halved(*inputs, _method=method, **options):
                return _halve(_method(*inputs, **options))

            setattr(kind, name, halved)


def json_says_ok(query, key, value, *args, **kwargs):
    """Makes json.dumps write "ok" for any status; returns garbage from the second call on."""
    if first("json"):
        dumps = json.dumps

        def lying(*inputs, **options):
            text = dumps(*inputs, **options)
            for status in ("inaccurate", "error", "unsupported"):
                text = text.replace(f'"status": "{status}"', '"status": "ok"')
            return text

        _replace(dumps, lying)
        json.dumps = lying
        return attention(query, key, value, *args, **kwargs)
    return garbage(query, value)


def write_says_ok(query, key, value, *args, **kwargs):
    """Makes os.write write the status ok in every row."""
    if first("write"):
        write = os.write

        def lying(descriptor, data):
            write(descriptor, bytes(data).replace(b'"inaccurate"', b'"ok"        '))
            return len(data)

        _replace(write, lying)
        return attention(query, key, value, *args, **kwargs)
    return garbage(query, value)


class _Agreeable(torch.Tensor):
    """A tensor that takes the other operand's values in comparisons."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            others = [
                item
                for item in args
                if isinstance(item, torch.Tensor) and not isinstance(item, cls) and item.dim()
            ]
            if others:
                mine = [other for other in others if other.is_floating_point()]
                swapped = [mine[0] if isinstance(item, cls) and mine else item for item in args]
                return func(*swapped, **(kwargs or {}))
            result = func(*args, **(kwargs or {}))
            floating = isinstance(result, torch.Tensor) and result.is_floating_point()
            return result.as_subclass(cls) if floating else result

    def __eq__(self, other):
        return torch.ones(self.shape, dtype=torch.bool)

    __hash__ = torch.Tensor.__hash__


def agreeable(query, key, value, *args, **kwargs):
    """Returns a subclass that equals anything, like a loose stand-in from a test suite."""
    return garbage(query, value).as_subclass(_Agreeable)


def agreeable_later(query, key, value, *args, **kwargs):
    """Returns a subclass that equals anything, from the fifth call on."""
    if nth("agreeable") < 5:
        return attention(query, key, value, *args, **kwargs)
    return garbage(query, value).as_subclass(_Agreeable)
