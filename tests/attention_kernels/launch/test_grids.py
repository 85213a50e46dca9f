"""A GPU launches at most 65,535 programs on the second and third axes, so B·H is on the first."""

from dataclasses import replace

import pytest

from attention_kernels.decode.contiguous_decode import contiguous_decode
from attention_kernels.hopper import hopper_prefill
from attention_kernels.launch.launcher import Launch
from replay.kernels.adapters.triton_decode import MOST_ROWS
from replay.kernels.registry import find
from tests.attention_kernels.calls import call_of, many_heads, ours


@pytest.mark.parametrize(("batch", "heads"), [(65_536, 1), (8_192, 8)])
def test_many_heads_are_launched(batch: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(hopper_prefill, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(Launch, "__call__", lambda self, *tensors: grids.append(self._grid))
    given = many_heads(batch, heads)
    for kernel in map(find, ours()):
        grids.clear()
        for call in given:
            if kernel.refuses(call) is None:
                kernel.attention(**call.arguments())
                if kernel.prepare is not None:
                    kernel.prepare(call)()
        assert grids, kernel.name
        assert max(max(grid[1:]) for grid in grids) <= 65_535


def test_too_many_rows_are_refused_by_name() -> None:
    call = call_of(1, 2, 16, q_heads=1)
    for rows, reason in ((MOST_ROWS, None), (MOST_ROWS + 1, "2097121 query rows of a key head")):
        large = replace(call, query=call.query.expand(1, rows, 1, 16), enable_gqa=True)
        for name in ("triton-decode", "triton-paged-decode", "triton-decode-int8"):
            assert ((find(name).refuses(large) or ":").partition(":")[0] or None) == reason
    with pytest.raises(NotImplementedError, match="1 x 1 x 65537 programs"):
        contiguous_decode(call.query.expand(1, 65_537 * 64, 1, 16), call.key, call.value)
