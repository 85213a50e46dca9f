"""A CUDA graph writes the inputs that a judge on a CPU makes."""

import pytest
import torch

from replay.accuracy.reference import same_dtype
from replay.isolation.block_inputs import BlockInputs
from tests.replay.isolation.test_block_inputs import CALLS


@pytest.mark.parametrize("name", CALLS)
def test_graph_writes_the_inputs_that_a_cpu_writes(name: str) -> None:
    judged, call = CALLS[name].to("cpu"), CALLS[name].to("cuda")
    expected, inputs, output = BlockInputs(judged), BlockInputs(call), None
    for seed in (3, 4):
        expected.draw(seed, 4)
        inputs.draw(seed, 4)
        for number in range(4):
            expected.apply(number, output)
            inputs.apply(number, None if output is None else output.to("cuda"))
            for each, tensor in judged.tensors().items():
                found = call.tensors()[each].cpu()
                assert torch.equal(found.float(), tensor.float()), (each, seed, number)
            output = same_dtype(judged)[0]
        expected.restore()
        inputs.restore()
