"""`benchmarks/random_calls.py` draws the documented calls, and detects a wrong output."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks import random_calls
from benchmarks.random_calls import FORMS, check, draw, family
from replay.kernels.registry import Kernel, find

CPU = torch.device("cpu")


def test_every_form_of_every_kernel_is_drawn_and_taken() -> None:
    drawn = {(each.kernel, each.form): each for each in (family(0, n) for n in range(3000))}
    assert set(drawn) == {(kernel, form) for kernel, forms in FORMS.items() for form in forms}
    for each in drawn.values():
        assert find(each.kernel).refuses(draw(each, 0, 0, CPU)) is None, each


def test_wrong_outputs_and_errors_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(query: Tensor, key: Tensor, value: Tensor, **given: object) -> Tensor:
        return query.new_zeros(*query.shape[:3], value.shape[3])

    def fails(*given: object, **more: object) -> Tensor:
        raise ValueError("not today")

    drawn = next(each for n in range(100) if (each := family(0, n)).form == "plain")
    for attention, sentence in ((zeros, ""), (fails, "ValueError: not today")):
        monkeypatch.setattr(random_calls, "find", lambda name, run=attention: Kernel(name, run))
        failures = check(drawn, 0, 3, CPU)
        assert [each.call for each in failures] == [0, 1, 2]
        assert all(sentence in each.sentence for each in failures)
    monkeypatch.setattr(random_calls, "find", lambda name: find("eager"))
    assert check(drawn, 0, 3, CPU) == []


def test_kernels_are_interpreted_where_there_is_no_gpu() -> None:
    drawn = replace(family(0, list(FORMS).index("triton-paged-decode")), head_dim=16, v_head_dim=16)
    assert check(drawn, 0, 2, CPU) == []
