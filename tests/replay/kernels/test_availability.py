"""Messages explain unusable libraries, and libraries are imported as late as possible."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from replay.kernels import libraries
from replay.kernels.registry import catalogue


def test_kernels_of_libraries_say_how_to_install_them_and_need_a_gpu() -> None:
    for kernel in catalogue().values():
        # Kernels that other tests registered have no library.
        if kernel.library not in ("", "torch", "triton") and not kernel.variant_of:
            assert "install" in kernel.install
            assert kernel.about
            assert kernel.unavailable(torch.device("cpu")) == "needs a CUDA GPU"
            assert kernel.own_process == kernel.name.startswith("te-")


CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["triton-fa2", "triton-varlen"])
def test_our_own_kernels_name_why_they_cannot_run(
    monkeypatch: pytest.MonkeyPatch, gpu: Callable[[int, int], torch.device], name: str
) -> None:
    def reason(
        device: torch.device, interpret: str = "0", version: str = "3.4.0", missing: str = ""
    ) -> str | None:
        with monkeypatch.context() as patch:
            libraries._import.cache_clear()
            patch.setenv("TRITON_INTERPRET", interpret)
            patch.setattr(libraries, "version", lambda package: version)
            patch.setitem(sys.modules, "triton.tools.tensor_descriptor", ModuleType("found"))
            if missing:
                patch.setitem(sys.modules, missing, None)
            return catalogue()[name].unavailable(device)

    checked = "TRITON_INTERPRET=1 to be checked on the CPU"
    install = "pip install ./attention_kernels"
    descriptor = "triton.tools.tensor_descriptor"
    assert reason(CPU) == f"needs a CUDA GPU, or {checked}"
    assert reason(CPU, version="") == f"needs a CUDA GPU, or {install} and {checked}"
    assert reason(CPU, "1") is None
    assert reason(CPU, "1", "", missing=descriptor) == f"not installed: {install}"
    assert reason(CPU, "1", "3.2.0", missing=descriptor) == (
        "needs Triton 3.4, which PyTorch 2.8 brings, or newer (3.2.0 is installed)"
    )
    assert reason(CPU, "1", missing="attention_kernels") == f"not installed: {install}"
    assert reason(gpu(8, 0), missing="attention_kernels") == f"not installed: {install}"
    assert reason(gpu(8, 0)) is None
    assert reason(gpu(7, 5)) == "needs compute capability 8.0 or higher (this GPU has 7.5)"


def test_catalogue_imports_no_library_and_its_names_look_known() -> None:
    """The test runs in a separate process, because other tests register kernels."""
    program = (
        "import sys\n"
        "from replay.kernels.kernel_names import look_known\n"
        "from replay.kernels.registry import catalogue\n"
        "assert catalogue()\n"
        "import torch\n"
        "for kernel in catalogue().values(): kernel.unavailable(torch.device('cpu'))\n"
        "print([name for name in ('flash_attn', 'flash_attn_interface', 'sageattention', 'triton',"
        " 'sageattn3', 'spas_sage_attn', 'xformers', 'transformer_engine', 'flashinfer', 'kernels',"
        " 'huggingface_hub') if name in sys.modules])\n"
        "print([name for name in catalogue() if not look_known(name)])"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["[]", "[]"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError("a.so: undefined x\nmore"), "cannot be imported: a.so: undefined x"),
        (RuntimeError("already registered"), "cannot be imported: already registered"),
        (ValueError(), "cannot be imported: ValueError"),
        (ModuleNotFoundError("No einops", name="einops"), "cannot be imported: No einops"),
        (ModuleNotFoundError("no", name="flash_attn"), "not installed: pip install --pre flash"),
        (ModuleNotFoundError("no", name="flash_attn.cute"), "not installed: pip install --pre"),
        (ModuleNotFoundError("No flash", name="flash"), "cannot be imported: No flash"),
    ],
)
def test_failed_import_is_explained(
    monkeypatch: pytest.MonkeyPatch,
    unavailable: Callable[..., str | None],
    error: Exception,
    reason: str,
) -> None:
    tried = []

    def fail(name: str) -> ModuleType:
        tried.append(name)
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    ask = libraries.Library("flash_attn.cute", "flash-attn-4", "pip install --pre flash-attn-4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    said = ask.unavailable(torch.device("cuda"))
    assert said.startswith(reason)
    with pytest.raises(ImportError, match=said.partition(":")[0]):
        ask.load()
    assert tried == ["flash_attn.cute"], "a failed import is not repeated"


def test_capability_is_named_before_a_wrong_version(
    install: Callable[..., ModuleType], unavailable: Callable[..., str | None]
) -> None:
    install("sageattention", version=("sageattention", "2.2.0"))
    assert unavailable("sage1", 7, 5) == (
        "needs compute capability 8.0 or higher (this GPU has 7.5)"
    )
    assert unavailable("sage1") == (
        "version 2.2.0 is installed, this kernel is 1.x: pip install sageattention==1.0.6"
    )
    install("sageattention", version=("sageattention", "1.0.6"))
    assert "version 1.0.6 is installed, this kernel is 2.x" in str(unavailable("sage2"))
    assert unavailable("sage1") == "sageattention 1.0.6 has no sageattn"
    install("sageattention", version=("sageattention", None), sageattn=len)
    assert unavailable("sage1") is None


@pytest.mark.parametrize("name", ["vllm-flash-attn", "vllm-triton"])
def test_vllm_is_not_imported_before_its_kernels_run(
    name: str,
    gpu: Callable[[int, int], torch.device],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, kernel = gpu(9, 0), catalogue()[name]
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert kernel.unavailable(device) == f"not installed: {kernel.install}"
    (tmp_path / "vllm.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm")
    assert kernel.unavailable(device) is None
