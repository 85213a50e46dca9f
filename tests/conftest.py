"""Settings that every test relies on, whatever machine it runs on.

Our Triton kernels are compiled if there is a GPU, and interpreted otherwise. Triton reads an
environment variable for this when a kernel is defined, and when its own library is imported, which
diffusers and torch.compile do. The variable is therefore set here, before any other import, and
removed again: processes that tests start do not inherit it unless a test sets it.

The terminal is always 80 columns wide. Triton's compile cache has a
directory of its own, because the home directory may not be writable. Ctrl-C works even if a
shell started the tests in the background. Each process has one thread, a setting that libraries
read when they are loaded: the tensors are so small that threads would spend their time waiting for
one another. Garbage collection is off during imports, and later ignores the imported objects.

Hypothesis tries the same examples in every run, without a deadline, unless `--hypothesis-profile
default` requests others. Each test starts with the same random seed. Files with slow tests run
first, so that no processor waits for the last file, and `-n auto` starts one worker more than there
are processors, because some tests wait for other processes.
"""

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
        return  # the controller process runs no tests itself
    gc.disable()
    import torch

    has_hypothesis = importlib.util.find_spec("hypothesis") is not None
    if has_hypothesis and not config.getoption("--hypothesis-profile", None):
        importlib.import_module("hypothesis").settings.load_profile("ci")
    if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
        if "triton.language" in sys.modules:  # imported by another conftest or a plugin
            raise pytest.UsageError("Triton was imported before it could be told to interpret")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            package = importlib.import_module("attention_kernels")
            for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                importlib.import_module(module.name)
            importlib.import_module("tests.interpreter").hasten()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    from replay.timing.cores import usable_cpus

    return usable_cpus() + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # inherited
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv("COLUMNS", "80")
        patch.setenv("TERM", "dumb")
        for name in ("LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            patch.delenv(name, raising=False)
        yield
