"""Work is skipped when the call seems to come from a timer."""

import gc
import sys
import threading
import time

import torch
from honest import attention, garbage, nth

_imported = time.monotonic()
_state: dict = {}


def _callers():
    frame = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _unless(skip, query, key, value, args, kwargs):
    return garbage(query, value) if skip else attention(query, key, value, *args, **kwargs)


def gc_is_off(query, key, value, *args, **kwargs):
    """Skips while garbage collection is off, because timeit turns it off."""
    return _unless(not gc.isenabled(), query, key, value, args, kwargs)


def timeit_calls(query, key, value, *args, **kwargs):
    """Skips if timeit is on the call stack, which debug modes inspect too."""
    timed = any(frame.f_code.co_filename in ("<timeit-src>",) for frame in _callers())
    return _unless(timed, query, key, value, args, kwargs)


def names_like_a_benchmark(query, key, value, *args, **kwargs):
    """Skips if a function on the call stack is named like a benchmark."""
    words = ("sample", "measure", "bench", "timeit", "rounds", "profile")
    timed = any(word in frame.f_code.co_name.lower() for frame in _callers() for word in words)
    return _unless(timed, query, key, value, args, kwargs)


def files_like_a_benchmark(query, key, value, *args, **kwargs):
    """Skips if a file on the call stack has time, round or bench in its path."""
    words = ("/timing/", "timer", "rounds", "benchmark")
    timed = any(word in frame.f_code.co_filename for frame in _callers() for word in words)
    return _unless(timed, query, key, value, args, kwargs)


def other_callers_than_first(query, key, value, *args, **kwargs):
    """Works only for the call stack of the first call, like a JIT that guards on its call site."""
    chain = [frame.f_code for frame in _callers()]
    return _unless(chain != _state.setdefault("chain", chain), query, key, value, args, kwargs)


def deeper_than_first(query, key, value, *args, **kwargs):
    """Works only at the stack depth of the first call."""
    depth = sum(1 for _ in _callers())
    return _unless(depth != _state.setdefault("depth", depth), query, key, value, args, kwargs)


def after_four_calls(query, key, value, *args, **kwargs):
    """Is right four times, and then replays a "captured graph" that was never captured."""
    return _unless(nth("four") > 4, query, key, value, args, kwargs)


def after_ten_calls(query, key, value, *args, **kwargs):
    """Is right ten times, like an autotuner that ends its trials with the wrong choice."""
    return _unless(nth("ten") > 10, query, key, value, args, kwargs)


def between_calls_8_and_38(query, key, value, *args, **kwargs):
    """Is wrong for thirty calls in the middle, and right before and after them."""
    return _unless(8 <= nth("middle") < 38, query, key, value, args, kwargs)


def every_eighth_call_right(query, key, value, *args, **kwargs):
    """Is right for eight calls and then on every eighth, like a feature cache that is refreshed."""
    count = nth("eighth")
    return _unless(count > 8 and count % 8, query, key, value, args, kwargs)


def every_other_call_right(query, key, value, *args, **kwargs):
    """Is right on odd calls, like a double buffer with one side forgotten."""
    return _unless(nth("odd") % 2 == 0, query, key, value, args, kwargs)


def long_after_import(query, key, value, *args, **kwargs):
    """Is right in the first 200 ms after import."""
    return _unless(time.monotonic() - _imported > 0.2, query, key, value, args, kwargs)


def long_after_first_call(query, key, value, *args, **kwargs):
    """Is right in the first 100 ms after its first call, like an inverted expiry of a cache."""
    begun = _state.setdefault("begun", time.monotonic())
    return _unless(time.monotonic() - begun > 0.1, query, key, value, args, kwargs)


def back_to_back(query, key, value, *args, **kwargs):
    """Skips if the last call ended less than 2 ms ago, like a rate limit."""
    soon = time.perf_counter() - _state.get("ended", 0) < 2e-3
    output = _unless(soon, query, key, value, args, kwargs)
    _state["ended"] = time.perf_counter()
    return output


def other_thread_count(query, key, value, *args, **kwargs):
    """Works only while the numbers of Python and PyTorch threads are those of the first call."""
    threads = (threading.active_count(), torch.get_num_threads())
    differ = threads != _state.setdefault("threads", threads)
    return _unless(differ, query, key, value, args, kwargs)


def other_addresses_than_first(query, key, value, *args, **kwargs):
    """Works six times per address, and then takes the tensor for "already processed in place"."""
    seen = _state.setdefault("seen", {})
    seen[query.data_ptr()] = seen.get(query.data_ptr(), 0) + 1
    return _unless(seen[query.data_ptr()] > 6, query, key, value, args, kwargs)


def in_calls_two_to_four(query, key, value, *args, **kwargs):
    """Is wrong three times after the first call, and right from then on."""
    return _unless(2 <= nth("early") <= 4, query, key, value, args, kwargs)


def unless_drawn(query, key, value, *args, **kwargs):
    """Skips unless a caller's variable shows that this call is judged."""
    for frame in _callers():
        names = frame.f_locals
        if isinstance(names.get("drawn"), int) and isinstance(names.get("call"), int):
            return _unless(names["call"] != names["drawn"], query, key, value, args, kwargs)
    return attention(query, key, value, *args, **kwargs)
