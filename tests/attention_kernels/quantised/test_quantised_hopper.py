"""Machine code of the 8-bit prefill for Hopper, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attention_kernels.ptx import compiled_for_hopper, unfenced_arrivals

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from attention_kernels.hopper.pipeline import CONSUMERS_NAMED
from attention_kernels.quantised.quantised_hopper import tile_for


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "group", "kv_len"), [(64, 4, 1024), (128, 1, 1024)])
def test_there_are_no_barriers_but_those_in_use(
    head_dim: int, group: int, kv_len: int, tmp_path: Path
) -> None:
    """The memory of unused barriers is used for outputs too, and a GPU that is shared may overwrite
    it."""
    sizes = (1, group, 1, kv_len, kv_len, head_dim, head_dim)
    program = compiled_for_hopper(tmp_path, "triton-fp8", sizes, "quantised_hopper_kernel")
    tile = tile_for(head_dim, group, kv_len)
    queries = 2 * tile.consumers  # full and empty
    full = 2 * tile.stages  # of keys and of values
    empty = 0 if tile.consumers == CONSUMERS_NAMED else full
    text = program.read_text()
    assert text.count("mbarrier.init") == queries + full + empty
    assert unfenced_arrivals(text) == []
