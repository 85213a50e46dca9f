"""Fixtures of the tests of our kernels; `tests/conftest.py` sets up how the kernels run."""

import importlib.util
from collections.abc import Iterator

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["*/test_*.py", "test_[!i]*.py"]


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill new memory with NaN."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module", params=["as small", "as large"])
def size(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run tests with loads as in small calls, through pointers, and as in large calls."""
    from attention_kernels.launch.launcher import PlanCache
    from attention_kernels.portable import forward

    with pytest.MonkeyPatch.context() as patched:
        if request.param == "as large":
            patched.setattr(forward, "is_small", lambda *tensors: False)
            patched.setattr(forward, "_calls", PlanCache())
        yield
