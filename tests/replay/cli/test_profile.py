"""`replay profile` runs one kernel on one call."""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from replay.cli.profile import WARM_UP
from replay.kernels.registry import Kernel
from tests.in_this_process import RunCli, refusal

SHAPE = ("profile", "random", "-sq", "16", "-hq", "2", "-d", "32", "--device", "cpu")


def test_printed_command_runs_the_same_arguments_once(run_cli: RunCli) -> None:
    code, out, err = run_cli(*SHAPE, "--kernels", "torch-math")
    assert (code, err) == (0, "")
    command = shlex.split(out)
    assert command[:3] == ["ncu", "--profile-from-start", "off"]
    ours = command.index(sys.executable)
    assert command[ours + 1 : ours + 3] == ["-m", "replay"]
    given = command[ours + 3 :]
    assert given == [*SHAPE, "--kernels", "torch-math", "--once"]
    assert run_cli(*given) == (0, "", "")


def test_profile_requires_one_recorded_call(run_cli: RunCli, recorded: Path) -> None:
    given = ("profile", "--dir", str(recorded), "--device", "cpu", "--kernels", "torch-math")
    told = "a profile runs one kernel on one call, got 1 kernel and 3 calls: name one"
    assert refusal(run_cli, *given).startswith(f"replay profile: {told}")
    assert run_cli(*given, "--call", "model-000001", "--once")[0] == 0
    assert run_cli(*given, "--call", "model-000001")[0] == 0


def test_only_the_kernel_runs(run_cli: RunCli, kernels: Callable[..., Kernel]) -> None:
    calls = []

    def mine(query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return scaled_dot_product_attention(query, key, value, *others, **options)

    kernels("mine", mine)
    assert run_cli(*SHAPE, "--kernels", "mine", "--once") == (0, "", "")
    assert calls == [False] * (WARM_UP + 1)
