"""States of a GPU that NVML reads, and the reasons why NVML cannot read them."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from replay.rows.row import GpuState
from replay.timing import gpu_state
from replay.timing.gpu_state import NoReading, energy_counter, read_gpu_state, why_no_state

GPU = torch.device("cuda")


class FakeNvml(ModuleType):
    """Stand-in for NVML with one GPU and the given results or errors of its functions."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, **answers: Any) -> None:
        super().__init__("pynvml")
        self.answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByUUID": {"GPU-abc": "handle"},
            "nvmlDeviceGetClockInfo": {1: 1980, 2: 2619},
            "nvmlDeviceGetTemperature": {0: 61},
            "nvmlDeviceGetPowerUsage": 690_500,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x404,
            "nvmlDeviceGetTotalEnergyConsumption": 123_456_789_012,
            **answers,
        }

    def __getattr__(self, name: str) -> Any:
        if name not in self.answers:
            raise AttributeError(name)
        answer = self.answers[name]

        def function(*arguments: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer[arguments[-1]] if isinstance(answer, dict) else answer

        return function


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`install(nvml)` makes `import pynvml` return `nvml`, and simulates a GPU."""
    properties = SimpleNamespace(uuid="abc")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def put(nvml: ModuleType | None) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        gpu_state._nvml.cache_clear()

    yield put
    gpu_state._nvml.cache_clear()


def test_state_is_read(install: Any) -> None:
    install(FakeNvml())
    reasons = ("software power cap", "0x400")
    assert read_gpu_state(GPU) == GpuState(1980, 690.5, 61, reasons, 2619)
    assert energy_counter(GPU)() == 123_456_789_012
    assert why_no_state(GPU) == ""


def test_missing_figures_are_none(install: Any) -> None:
    refused = FakeNvml.NVMLError("Not Supported")
    install(FakeNvml(nvmlDeviceGetPowerUsage=refused, nvmlDeviceGetTotalEnergyConsumption=refused))
    state = read_gpu_state(GPU)
    assert (state.sm_clock_mhz, state.power_w) == (1980, None)
    with pytest.raises(NoReading, match="does not count its energy: Not Supported"):
        energy_counter(GPU)


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [
        (None, r"no NVML \(pip install nvidia-ml-py\)"),
        (FakeNvml(nvmlInit=FakeNvml.NVMLError("Driver Not Loaded")), "does not start: Driver"),
        (FakeNvml(nvmlDeviceGetHandleByUUID=FakeNvml.NVMLError("Not Found")), "does not find it"),
    ],
)
def test_missing_nvml_is_explained(install: Any, nvml: Any, reason: str) -> None:
    install(nvml)
    assert read_gpu_state(GPU) is None
    with pytest.raises(NoReading, match=reason):
        energy_counter(GPU)
    sentence = why_no_state(GPU)
    assert sentence.startswith("no clocks, power or energy of the GPU: ")
    assert "\n" not in sentence


def test_cpu_has_no_gpu_state() -> None:
    assert read_gpu_state("cpu") is None
    assert why_no_state(torch.device("cpu")) == ""
    with pytest.raises(NoReading, match="energy needs an NVIDIA GPU"):
        energy_counter("cpu")


@pytest.mark.parametrize(
    ("error", "lost"),
    [(None, False), (torch.OutOfMemoryError("full"), False), (RuntimeError("illegal"), True)],
)
def test_gpu_is_lost_unless_it_still_works_or_is_full(
    error: RuntimeError | None, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def zeros(*_: object, **__: object) -> torch.Tensor:
        if error is not None:
            raise error
        return torch.ones(1)

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert gpu_state.gpu_is_lost(GPU) is lost
