"""Kernels of a few lines, and a function that returns their rows."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.bench.runner import replay_here
from replay.bench.settings import Settings
from replay.kernels.registry import Kernel
from replay.rows.row import Row
from replay.workloads.workload import Workload

MakeCall = Callable[..., AttentionCall]


Register = Callable[..., Kernel]


MakeWorkload = Callable[..., Workload]


Replayed = Callable[..., dict[str, Row]]


def sdpa(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, **options)


def raising(error: BaseException) -> Callable[..., Tensor]:
    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        raise error

    return attention


def rows_of(
    call: AttentionCall, workload: MakeWorkload, settings: Settings, *chosen: Kernel
) -> dict[str, Row]:
    return {row.kernel: row for row in replay_here([workload(call)], chosen, settings)}
