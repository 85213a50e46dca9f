"""Exceptions of the program's own signal handlers are distinguished from others."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from capture.hooks.signals import is_meant_for_program


class Expired(Exception):
    """The program's time limit."""


def expire(number: int, frame: FrameType | None) -> None:
    raise Expired


def expire_as(kind: type[Exception], number: int, frame: FrameType | None) -> None:
    raise kind


class Limit:
    def expire(self, number: int, frame: FrameType | None) -> None:
        raise Expired

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.expire(number, frame)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "handler", [expire, functools.partial(expire_as, Expired), Limit().expire, Limit()]
)
def test_signal_handler_s_error(handler: Callable[[int, FrameType | None], None]) -> None:
    signal.signal(signal.SIGUSR1, handler)
    with pytest.raises(Expired) as caught:
        signal.raise_signal(signal.SIGUSR1)
    assert is_meant_for_program(caught.value)


def test_same_error_of_another_program() -> None:
    signal.signal(signal.SIGUSR1, expire)
    with pytest.raises(Expired) as caught:
        Limit().expire(0, None)
    assert not is_meant_for_program(caught.value)
    assert not is_meant_for_program(Expired())
