"""Builds the forward kernels of flash-attn 2 from its source archive, for Hopper.

    python -m benchmarks.build_flash_attn flash_attn-2.8.3.tar.gz DIRECTORY

Builds head dimensions 64, 128 and 256 (smaller ones use the next larger kernel), with windows, soft
caps and split keys, without backward, dropout and ALiBi. Takes 8 minutes on 16 cores. Puts the
package and its library into DIRECTORY, to be named in PYTHONPATH. The archive comes from PyPI. The
machine needs a CUDA build of torch, an `nvcc` of the same CUDA version, and ninja.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

HEAD_DIMS = (64, 128, 256)

HEAD_DIM_SWITCH = r"""
#undef HEADDIM_SWITCH
#define HEADDIM_SWITCH(HEADDIM, ...)                                      \
  [&] {                                                                   \
    if (HEADDIM <= 64) {                                                  \
      constexpr static int kHeadDim = 64;                                 \
      return __VA_ARGS__();                                               \
    } else if (HEADDIM <= 128) {                                          \
      constexpr static int kHeadDim = 128;                                \
      return __VA_ARGS__();                                               \
    } else {                                                              \
      constexpr static int kHeadDim = 256;                                \
      return __VA_ARGS__();                                               \
    }                                                                     \
  }()
"""

NO_BACKWARD = r"""
#include <stdexcept>
#include "namespace_config.h"
#include <cuda.h>
#include <cutlass/numeric_types.h>
#include "flash.h"
namespace FLASH_NAMESPACE {
template <typename T, int Headdim, bool Is_causal>
void run_mha_bwd_(Flash_bwd_params &params, cudaStream_t stream) {
  throw std::runtime_error("built without backward");
}
#define WITHOUT(T, DIM)                                                             \
  template void run_mha_bwd_<T, DIM, false>(Flash_bwd_params &, cudaStream_t);      \
  template void run_mha_bwd_<T, DIM, true>(Flash_bwd_params &, cudaStream_t);
"""

DEFINES = (
    "-DFLASHATTENTION_DISABLE_BACKWARD",
    "-DFLASHATTENTION_DISABLE_DROPOUT",
    "-DFLASHATTENTION_DISABLE_ALIBI",
)
NVCC_FLAGS = (
    "-O3",
    "-std=c++17",
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "--use_fast_math",
)


def _without_backward() -> str:
    """Return a source file in which every backward function only raises an error."""
    lines = [
        f"WITHOUT(cutlass::{dtype}, {dim})"
        for dtype in ("half_t", "bfloat16_t")
        for dim in HEAD_DIMS
    ]
    return NO_BACKWARD + "\n".join(lines) + "\n}\n"


def _prepare(archive: Path, work: Path) -> Path:
    """Unpack the archive below `work` and return its sources, with fewer head dimensions."""
    with tarfile.open(archive) as opened:
        opened.extractall(work, filter="data")
    (root,) = work.iterdir()
    sources = root / "csrc" / "flash_attn"
    with (sources / "src" / "static_switch.h").open("a") as switches:
        switches.write(HEAD_DIM_SWITCH)
    (sources / "src" / "no_backward.cu").write_text(_without_backward())
    return root


def build(archive: Path, directory: Path) -> None:
    """Build the forward kernels of `archive` and put the package into `directory`."""
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
    os.environ.setdefault("MAX_JOBS", str(os.cpu_count()))
    from torch.utils import cpp_extension

    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        root = _prepare(archive, Path(temporary))
        folder = root / "csrc" / "flash_attn"
        kernels = [
            path
            for dim in HEAD_DIMS
            for path in sorted((folder / "src").glob(f"flash_fwd_*hdim{dim}_*_sm80.cu"))
        ]
        if len(kernels) != 8 * len(HEAD_DIMS):
            raise SystemExit(f"{archive} holds {len(kernels)} of the kernels, not 24.")
        cpp_extension.load(
            name="flash_attn_2_cuda",
            sources=[
                str(path)
                for path in (folder / "flash_api.cpp", folder / "src" / "no_backward.cu", *kernels)
            ],
            extra_include_paths=[
                str(folder),
                str(folder / "src"),
                str(root / "csrc" / "cutlass" / "include"),
            ],
            extra_cflags=["-O3", "-std=c++17", *DEFINES],
            extra_cuda_cflags=[*NVCC_FLAGS, *DEFINES],
            build_directory=str(directory),
            is_python_module=False,
            verbose=False,
        )
        for leftover in (*directory.glob("*.o"), *directory.glob("*.ninja*")):
            leftover.unlink()
        for folder_name in ("flash_attn", "flash_attn.egg-info"):
            shutil.copytree(root / folder_name, directory / folder_name, dirs_exist_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build flash-attn 2's forward kernels for Hopper.")
    parser.add_argument("archive", type=Path, help="PyPI's source archive, flash_attn-*.tar.gz")
    parser.add_argument("directory", type=Path, help="directory for the built package")
    options = parser.parse_args()
    build(options.archive, options.directory)


if __name__ == "__main__":
    main()
