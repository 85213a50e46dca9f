"""The inline assembly of the Hopper kernels is run without a GPU."""

import math

import pytest
import torch
from torch import Tensor

from tests.attention_kernels.ptx import THREADS, run

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from attention_kernels.hopper import exponentials, rescale

ROWS, KEYS = 16, 128
"""Numbers of rows and columns in a warp's block of scores."""
COUNT = ROWS * KEYS // THREADS
BLOCKS = 5
LIMIT = 2.0**15
LOG2_E = math.log2(math.e)
THREAD = torch.arange(THREADS)


def places(count: int) -> list[tuple[Tensor, Tensor]]:
    """Return the row and column of each of a thread's numbers in a (16, count · 2) product of
    `wgmma` (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16")."""
    return [
        (THREAD // 4 + 8 * (i // 2 % 2), i // 4 * 8 + THREAD % 4 * 2 + i % 2) for i in range(count)
    ]


class Softmax:
    """Attention of a warp's rows, computed block by block like a consumer."""

    def __init__(self, dtype: torch.dtype, v_dim: int = 8) -> None:
        self.dtype = dtype
        self.text = exponentials._instructions(COUNT, dtype == torch.bfloat16, LIMIT)
        self.reference = torch.full((ROWS,), -math.inf)
        self.total = torch.zeros(ROWS)
        self.output = torch.zeros(ROWS, v_dim)
        self.began_anew = 0

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Add a block: scores (16, 128) in base e, values (128, v_dim)."""
        starts = [COUNT // 2 + k * COUNT for k in range(6)]
        sums, moved, shrink, of_scores, of_scale, of_reference = starts
        registers: dict[str, Tensor] = {}
        for i, (row, column) in enumerate(places(COUNT)):
            registers[f"${of_scores + i}"] = scores[row, column]
            registers[f"${of_scale + i}"] = torch.full((THREADS,), LOG2_E)
            registers[f"${of_reference + i}"] = self.reference[row]
        self.began_anew += run(self.text, registers)

        weights = torch.zeros(ROWS, KEYS)
        for i, (row, column) in enumerate(places(COUNT)):
            half = registers[f"${i // 2}"] >> 16 * (i % 2) & 0xFFFF
            bits = torch.where(half >= 2**15, half - 2**16, half).to(torch.int16)
            weights[row, column] = bits.view(self.dtype).float()
        rows = {0: THREAD // 4, 2: THREAD // 4 + 8}
        found = torch.zeros(3, ROWS)
        for i, row in rows.items():
            for k, start in enumerate((sums, moved, shrink)):
                found[k].index_add_(0, row, registers[f"${start + i}"])
        found[1:] /= 4  # four threads share a row, and each holds the row's number
        sums_of_rows, self.reference, factor = found
        # A row's first block has no earlier sums.
        self.total = torch.where(factor == 0, 0.0, self.total * factor) + sums_of_rows
        before = torch.where(factor[:, None] == 0, 0.0, self.output * factor[:, None])
        self.output = before + weights @ values

    def result(self) -> Tensor:
        return self.output / self.total[:, None]


def blocks(count: int, deviation: float, rise: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return scores (count, 16, 128) that rise by `rise` from block to block, and values."""
    generator = torch.Generator().manual_seed(0)
    scores = deviation * torch.randn(count, ROWS, KEYS, generator=generator)
    scores += rise * torch.arange(count)[:, None, None]
    return scores, torch.randn(count, KEYS, 8, generator=generator)


def attention(scores: Tensor, values: Tensor) -> Tensor:
    every = scores.double().movedim(0, 1).flatten(1)
    return (every.softmax(-1) @ values.double().flatten(0, 1)).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("deviation", "rise", "least", "most"),
    [
        (1.0, 0.0, 1, 1),
        (3.0, 0.0, 1, 1),
        (0.0, 0.0, 1, 1),
        (1.0, 3.0, 2, BLOCKS - 1),
        (1.0, 30.0, BLOCKS, BLOCKS),
        (1.0, -30.0, 1, 1),
    ],
)
def test_softmax(deviation: float, rise: float, least: int, most: int, dtype: torch.dtype) -> None:
    """A warp changes its reference in the first block, and when weights would exceed 2^15."""
    scores, values = blocks(BLOCKS, deviation, rise)
    softmax = Softmax(dtype)
    for of_block in zip(scores, values, strict=True):
        softmax.add(*of_block)
    bound = 0.02 if dtype == torch.bfloat16 else 0.003
    torch.testing.assert_close(
        softmax.result(), attention(scores, values), rtol=bound, atol=bound / 4
    )
    assert least <= softmax.began_anew <= most


@pytest.mark.parametrize("rising", [3, 11])
def test_a_row_gets_the_bits_that_it_gets_beside_others(rising: int) -> None:
    scores, values = blocks(3, 2.0)
    beside, alone = scores.clone(), scores.clone()
    beside[1, rising] += 40.0  # large enough to change the warp's reference
    beside[2, 12] = math.nan
    results = []
    for each in (beside, alone):
        softmax = Softmax(torch.float16)
        for of_block in zip(each, values, strict=True):
            softmax.add(*of_block)
        results.append(softmax.result())
    others = [row for row in range(ROWS) if row not in (rising, 12)]
    assert torch.equal(results[0][others], results[1][others])
    assert results[0][12].isnan().all()
    expected = attention(beside, values)[rising]
    torch.testing.assert_close(results[0][rising], expected, rtol=0.003, atol=0.001)


@pytest.mark.parametrize("columns", [64, 128])
def test_an_output_is_multiplied_where_a_factor_is_not_1(columns: int) -> None:
    count = ROWS * columns // THREADS
    text = rescale._instructions(count)
    output = torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(0))
    for factors in (torch.ones(ROWS), torch.ones(ROWS).index_fill(0, torch.tensor(9), 0.25)):
        registers: dict[str, Tensor] = {}
        for i, (row, column) in enumerate(places(count)):
            registers[f"${count + i}"] = output[row, column]
            registers[f"${2 * count + i}"] = factors[row]
        multiplied = run(text, registers)
        assert multiplied == bool((factors != 1).any())
        for i, (row, column) in enumerate(places(count)):
            expected = output[row, column] * factors[row]
            assert torch.equal(registers[f"${i}"], expected)
