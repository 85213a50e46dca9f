"""Process settings changed during calls. Results stay right, but other kernels suffer."""

import gc
import os
import signal
import sys
import warnings

import torch
from honest import attention, first
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_entered: list = []


def _once(name, change, query, key, value, args, kwargs):
    output = attention(query, key, value, *args, **kwargs)
    if first(name):
        change()
    return output


def no_flash(query, key, value, *args, **kwargs):
    """Turns flash and efficient SDPA off, as workarounds for old drivers do."""

    def change():
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)

    return _once("flash", change, query, key, value, args, kwargs)


def no_mkldnn(query, key, value, *args, **kwargs):
    """Turns oneDNN off."""

    def change():
        torch.backends.mkldnn.set_flags(False)

    return _once("mkldnn", change, query, key, value, args, kwargs)


def many_threads(query, key, value, *args, **kwargs):
    """Sets sixteen threads on any machine: in a container, libraries see the host's core count."""
    return _once("threads", lambda: torch.set_num_threads(16), query, key, value, args, kwargs)


def faster_with_threads(query, key, value, *args, **kwargs):
    """Sets four threads for itself and one for the others."""
    torch.set_num_threads(4)
    output = attention(query, key, value, *args, **kwargs)
    torch.set_num_threads(1)
    return output


def default_dtype(query, key, value, *args, **kwargs):
    """Leaves float64 as the default dtype, like code that forgets to restore it."""

    def change():
        torch.set_default_dtype(torch.float64)

    return _once("dtype", change, query, key, value, args, kwargs)


def default_device(query, key, value, *args, **kwargs):
    """Leaves meta as the default device, as models loaded "empty" do."""
    return _once(
        "device", lambda: torch.set_default_device("meta"), query, key, value, args, kwargs
    )


def matmul_precision(query, key, value, *args, **kwargs):
    """Allows TF32 and bfloat16 in float32 products, as most training scripts do."""

    def change():
        torch.set_float32_matmul_precision("medium")
        torch.backends.cuda.matmul.allow_tf32 = True

    return _once("precision", change, query, key, value, args, kwargs)


def seeds(query, key, value, *args, **kwargs):
    """Sets the seed on every call, for dropout that can be repeated."""
    torch.manual_seed(0)
    return attention(query, key, value, *args, **kwargs)


def deterministic(query, key, value, *args, **kwargs):
    """Turns on deterministic algorithms, which also fill every new tensor."""

    def change():
        torch.use_deterministic_algorithms(True)

    return _once("deterministic", change, query, key, value, args, kwargs)


def inference_mode(query, key, value, *args, **kwargs):
    """Enters inference mode and never leaves it."""

    def change():
        _entered.append(torch.inference_mode())
        _entered[-1].__enter__()

    return _once("inference", change, query, key, value, args, kwargs)


def grad_mode(query, key, value, *args, **kwargs):
    """Turns gradients and anomaly detection on."""

    def change():
        torch.set_grad_enabled(True)
        torch.autograd.set_detect_anomaly(True)

    return _once("grad", change, query, key, value, args, kwargs)


def empty_environment(query, key, value, *args, **kwargs):
    """Empties os.environ."""
    return _once("environ", os.environ.clear, query, key, value, args, kwargs)


def gc_off(query, key, value, *args, **kwargs):
    """Turns garbage collection off, as serving engines do."""

    def change():
        gc.disable()
        gc.freeze()

    return _once("gc_off", change, query, key, value, args, kwargs)


def gc_at_every_step(query, key, value, *args, **kwargs):
    """Collects garbage after every allocation, as leak hunts do."""
    return _once("gc", lambda: gc.set_threshold(1, 1, 1), query, key, value, args, kwargs)


def warnings_as_errors(query, key, value, *args, **kwargs):
    """Makes every warning an error."""
    return _once(
        "warnings", lambda: warnings.simplefilter("error"), query, key, value, args, kwargs
    )


def flushed_denormals(query, key, value, *args, **kwargs):
    """Flushes denormals to zero, as libraries built with -ffast-math do when loaded."""
    return _once(
        "denormals", lambda: torch.set_flush_denormal(True), query, key, value, args, kwargs
    )


def alarm(query, key, value, *args, **kwargs):
    """Starts a timer whose handler raises an exception after 50 ms, like a timeout decorator."""

    def ring(*_):
        raise TimeoutError("left by a cheat")

    def change():
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)

    return _once("alarm", change, query, key, value, args, kwargs)


def ignored_signals(query, key, value, *args, **kwargs):
    """Ignores SIGTERM, SIGINT and SIGCHLD, as process managers do."""

    def change():
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(name, signal.SIG_IGN)

    return _once("signals", change, query, key, value, args, kwargs)


def profiled(query, key, value, *args, **kwargs):
    """Leaves a profile function installed, which slows all Python code."""

    def change():
        sys.setprofile(lambda *_: sum(range(2000)))

    return _once("profile", change, query, key, value, args, kwargs)


def low_recursion_limit(query, key, value, *args, **kwargs):
    """Lowers the recursion limit to just above the current depth."""
    return _once("limit", lambda: sys.setrecursionlimit(60), query, key, value, args, kwargs)


class _Slow(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in str(func):
            func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _SlowFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if "attention" in str(func):
            func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def dispatch_mode(query, key, value, *args, **kwargs):
    """Leaves a dispatch mode active, like a FLOP counter; it runs attention twice."""

    def change():
        _entered.append(_Slow())
        _entered[-1].__enter__()

    return _once("dispatch", change, query, key, value, args, kwargs)


def function_mode(query, key, value, *args, **kwargs):
    """Leaves a function mode active, which runs attention twice."""

    def change():
        _entered.append(_SlowFunctions())
        _entered[-1].__enter__()

    return _once("function", change, query, key, value, args, kwargs)


def nice_and_pinned(query, key, value, *args, **kwargs):
    """Pins the process to the busiest core."""

    def change():
        os.nice(10)
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    return _once("nice", change, query, key, value, args, kwargs)
