"""Settings that every test relies on, whatever machine it runs on.

How our Triton kernels run: compiled where there is a GPU, else interpreted. Triton decides that
when a kernel is defined, and for its own library when that is imported, which much of what the
tests import does (diffusers, torch.compile). So it happens here, before any other import, and the
variable does not stay set: processes that tests start, and what they ask our code, see none unless
a test sets it.

And their surroundings: 80 columns, whatever the terminal at hand has, and directories for what
Triton compiles and for how long replays took, where the home may not be one to write to. Ctrl-C
works, also where a shell started the tests in the background. One thread in each process: tensors
here are so small that threads would spend their time waiting for one another, the more so beside
other tests. Libraries read that when they are loaded. What is imported stays for good: nothing
looks for garbage meanwhile, nor among it later.

And chance: Hypothesis tries the same examples in every run, however long one takes, unless
`--hypothesis-profile default` asks for others; and each test begins with the same random numbers,
whichever ran before it.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import pkgutil
import signal
import sys
from collections.abc import Iterator

import pytest

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # it hands out tests, and runs none
    gc.disable()
    import torch

    has_hypothesis = importlib.util.find_spec("hypothesis") is not None
    if has_hypothesis and not config.getoption("--hypothesis-profile", None):
        importlib.import_module("hypothesis").settings.load_profile("ci")
    if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
        if "triton.language" in sys.modules:  # by another conftest, or a plugin
            raise pytest.UsageError("Triton was imported before it could be told to interpret")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            package = importlib.import_module("attention_kernels")
            for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                importlib.import_module(module.name)
            importlib.import_module("tests.interpreter").hasten()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # which processes inherit
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("COLUMNS", "80")
        patch.setenv("TERM", "dumb")
        for name in ("LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            patch.delenv(name, raising=False)
        yield
