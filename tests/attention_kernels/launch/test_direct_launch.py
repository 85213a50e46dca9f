"""The C function of Triton's launcher gets the same arguments with and without the launcher."""

from typing import Any

import pytest
from triton.backends.nvidia.driver import CudaLauncher

from attention_kernels.launch.direct_launch import direct_launch

GIVEN = ((3, 2, 1), "program", "metadata")
PACK: dict[str, Any] = {"one by one": tuple, "in a tuple": lambda arguments: (arguments,)}


class Launcher(CudaLauncher):  # type: ignore[misc]
    """Installed or other launcher, with a C function that records its arguments."""

    through_triton = launch_cooperative_grid = launch_pdl = profile_scratch_size = 0
    num_ctas = global_scratch_align = profile_scratch_align = 1
    arg_annotations, kernel_signature = "annotations", "signature"

    def __init__(self, version: str, scratch: int) -> None:
        self.version, self.global_scratch_size, self.launched = version, scratch, list[Any]()
        self.launch = lambda *given: self.launched.append(given)

    def __call__(self, *given: Any) -> None:
        self.through_triton += 1
        if self.version == "installed":
            super().__call__(*given)
        else:
            self.launch(*given[:5], False, *given[5:9], *PACK[self.version](given[9:]))


@pytest.mark.parametrize(
    ("version", "scratch"), [("installed", 0), *((each, size) for each in PACK for size in (0, 64))]
)
def test_arguments_are_those_of_tritons_launcher(version: str, scratch: int) -> None:
    run = Launcher(version, scratch)
    launch = direct_launch(run, *GIVEN)
    run(*GIVEN[0], 17, *GIVEN[1:], None, None, None, 5, None)
    launch(17, (5, None))
    assert run.launched[0] == run.launched[1]
    assert run.through_triton == (2 if scratch else 1)
