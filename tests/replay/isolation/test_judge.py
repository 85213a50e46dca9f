"""The judge of outputs judges a sparse kernel by the keys that it chose first."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from replay.isolation.block_inputs import BlockInputs
from replay.isolation.judge import LocalJudge
from replay.workloads.random_calls import Spec
from replay.workloads.workload import random_workload

SPEC = Spec(1, 2, 2, 16, 90, 32, 32, dtype=torch.float32)
SEED, DRAWN = 5, 7


def test_sparse_kernel_cannot_choose_fewer_keys_in_a_block() -> None:
    call = random_workload("call", "random", SPEC, 0).load(torch.device("cpu"))
    judge = LocalJudge(call)
    many, few = (torch.arange(90).expand(16, 90) < count for count in (60, 3))

    def output(chosen: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(call.query, call.key, call.value, chosen)

    assert judge.judge("mine", "sparse", output(many), many).finding.status == "ok"
    inputs, outputs = BlockInputs(call, values_only=True), {}
    for name, chosen in {"many": many, "few": few}.items():
        inputs.draw(SEED, 1)
        inputs.apply(0, None)
        outputs[name] = [output(chosen)]
        inputs.restore()
    assert judge.judge_block("mine", "sparse", SEED, outputs["many"], DRAWN, many) == ""
    assert judge.judge_block("mine", "sparse", SEED, outputs["few"], DRAWN, few) != ""
