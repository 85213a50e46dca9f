"""Cheats by authors who did not know the defences. Each cheat had a clean row until a defence
against it was added.

The cheats `library_*` can happen by accident: a package registers its attention in place of
PyTorch's.
"""

import ctypes
import secrets
import sys
import time
import warnings

import torch
from honest import attention

warnings.simplefilter("ignore")
_registered = []
_kept = {}


def _slow(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, **_):
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query.double() @ key.double().mT * scale
    return (scores.softmax(-1) @ value.double()).to(query.dtype)


def _register(name, function):
    if not _registered:
        _registered.append(torch.library.Library("aten", "IMPL"))
        _registered[0].impl(name, function, "CPU")


def library_makes_others_slow(query, key, value, *args, **kwargs):
    """Replaces SDPA by a float64 version for all other kernels."""
    _register("scaled_dot_product_attention", _slow)
    scale = query.shape[-1] ** -0.5
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    return flash(query, key, value, 0.0, False, scale=scale)[0]


def library_keeps_inputs(query, key, value, *args, **kwargs):
    """Replaces `neg_`, which perturbs the inputs, by a function that does nothing."""
    _register("neg_", lambda tensor: tensor)
    return attention(query, key, value, *args, **kwargs)


def _first(query, key, value, args, kwargs):
    if query.shape not in _kept:
        _kept[query.shape] = attention(query, key, value, *args, **kwargs)
    return _kept[query.shape].clone()


def no_samples(query, key, value, *args, **kwargs):
    """Sets the constant for the number of judged samples to 0."""
    sys.modules["replay.bench.sampled_outputs"].JUDGED_SAMPLES = 0
    return _first(query, key, value, args, kwargs)


def known_draws(query, key, value, *args, **kwargs):
    """Makes `secrets`, which draws the judged rows, predictable: other rows may then be wrong."""
    secrets.randbits = lambda bits: 7
    return _first(query, key, value, args, kwargs)


def code_of_the_timer(query, key, value, *args, **kwargs):
    """Replaces the code of the timer's function, but keeps the function object."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "sample":
        frame = frame.f_back
    if frame is not None and "sample" not in _kept:
        sample = type(frame.f_locals["self"]).sample
        _kept["sample"] = type(sample)(sample.__code__, sample.__globals__)
        sample.__globals__["_cheats_sample"] = _kept["sample"]

        def half(self, candidate):
            _cheats_sample(self, candidate)  # noqa: F821
            candidate.ms[-1] /= 2

        sample.__code__ = half.__code__
    return attention(query, key, value, *args, **kwargs)


def start_in_the_callers_frame(query, key, value, *args, **kwargs):
    """Changes the caller's start time in place to a later time. For long calls, another process
    notices that samples took longer."""
    began = time.perf_counter()
    output = attention(query, key, value, *args, **kwargs)
    took, frame = time.perf_counter() - began, sys._getframe(1)
    for _ in range(3):
        for number in list(frame.f_locals.values()) if frame is not None else ():
            if type(number) is float and 0 <= began - number < 0.05:
                ctypes.c_double.from_address(id(number) + 16).value = number + 0.9 * took
        frame = None if frame is None else frame.f_back
    return output
