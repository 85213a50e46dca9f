"""Without a GPU, the Hopper kernel compiles, refuses calls, and fits in shared memory."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.attention_kernels.ptx import Compiled, compile_for_hopper, unfenced_arrivals

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from attention_kernels.hopper import hopper_prefill
from attention_kernels.hopper.head_groups import VisibleKeys
from attention_kernels.hopper.operands import are_loadable, loadable_mask
from attention_kernels.hopper.pipeline import CONSUMERS_NAMED, LOADER_REGISTERS
from attention_kernels.hopper.schedule import (
    MIDDLE,
    NARROW,
    SHARED_BYTES,
    Dims,
    Schedule,
    WholeCall,
    dims_of,
    room_for,
    schedule,
)
from attention_kernels.hopper.scores import ROWS
from attention_kernels.options import INVARIANT, AttentionOptions
from attention_kernels.quantised.quantised_hopper import tile_for

PACKED = (
    "cu_seqlens_q=empty(4, dtype=torch.int32), cu_seqlens_k=empty(4, dtype=torch.int32), "
    "variant=AttentionVariant(max_seqlen_q=4096, max_seqlen_k=4096)"
)
COMPILED: list[Compiled] = [
    (kernel, (1, group, 1, length, length, head_dim, v_head_dim), True, fields)
    for head_dim, v_head_dim, group, length, kernel, fields in (
        (64, 64, 4, 1024, "triton-fa3", "variant=AttentionVariant(True, (127, None))"),
        (128, 128, 1, 4096, "triton-fa3", ""),
        (128, 128, 1, 512, "triton-fa3", "attn_mask=empty(512, 512, dtype=torch.bool)"),
        (256, 256, 1, 512, "triton-fa3", "attn_mask=empty(512, 512, dtype=torch.float16)"),
        (256, 256, 1, 4096, "triton-fa3", "variant=AttentionVariant(softcap=50.0)"),
        (80, 80, 1, 4096, "triton-varlen", PACKED),
        (72, 72, 1, 4096, "triton-fa3", "sinks=empty(1, dtype=torch.bfloat16)"),
    )
]
QUANTISED: list[Compiled] = [
    ("triton-fp8", (1, group, 1, 1024, 1024, head_dim, head_dim), False, "")
    for head_dim, group in ((64, 4), (128, 1))
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Compiled, str], Path]:
    """`compiled(call, program)` returns the file of a program's PTX; all come from one process."""
    directory, calls = tmp_path_factory.mktemp("compiled"), [*COMPILED, *QUANTISED]
    compile_for_hopper(directory, calls)

    def file(call: Compiled, program: str) -> Path:
        (found,) = (directory / str(calls.index(call))).rglob(f"{program}.ptx")
        return found

    return file


@pytest.mark.slow
@pytest.mark.parametrize("call", COMPILED, ids=str)
def test_it_compiles_for_hopper(compiled: Callable[[Compiled, str], Path], call: Compiled) -> None:
    program = compiled(call, "prefill_kernel")
    text = program.read_text()
    assert "wgmma.mma_async" in text
    assert "cp.async.bulk.tensor.4d" in text
    assert "setmaxnreg.inc" in text
    shared = json.loads(program.with_suffix(".json").read_text())["shared"]
    assert shared <= SHARED_BYTES, "more than a multiprocessor gives a block"
    assert unfenced_arrivals(text) == []


@pytest.mark.slow
@pytest.mark.parametrize("call", QUANTISED, ids=str)
def test_8_bit_barriers_are_used(compiled: Callable[[Compiled, str], Path], call: Compiled) -> None:
    """Unused barriers' memory also holds outputs, and another user of the GPU may overwrite it."""
    _, group, _, _, kv_len, head_dim, _ = call[1]
    tile = tile_for(head_dim, group, kv_len)
    queries = 2 * tile.consumers  # two barriers each, full and empty
    full = 2 * tile.stages  # barriers of keys and of values
    empty = 0 if tile.consumers == CONSUMERS_NAMED else full
    text = compiled(call, "quantised_hopper_kernel").read_text()
    assert text.count("mbarrier.init") == queries + full + empty
    assert unfenced_arrivals(text) == []


HEAD_DIMS = (8, 64, 72, 96, 128, 136, 160, 192, 200, 256)
ALL_DIMS = sorted({dims_of(*each) for each in itertools.product(HEAD_DIMS, HEAD_DIMS)})


@pytest.mark.parametrize(
    "plan",
    {MIDDLE, *(plan for plan, _ in NARROW), *(schedule(dims, 1, 4096) for dims in ALL_DIMS)},
    ids=str,
)
def test_registers_of_all_warp_groups_fit(plan: Schedule) -> None:
    threads = 128
    others = (plan.consumers - 1) * plan.registers + LOADER_REGISTERS.value
    left = 65536 // threads - others  # remaining for the first consumer, the kernel's own warps
    assert left >= plan.registers - 8


@pytest.mark.parametrize("mask_size", [0, 1, 2, 4])
@pytest.mark.parametrize("seen", [1024, 4096])
@pytest.mark.parametrize("dims", ALL_DIMS)
def test_everything_fits_in_shared_memory(dims: Dims, seen: int, mask_size: int) -> None:
    whole = WholeCall(VisibleKeys(seen, seen, 0, None, None, 1, 1), 4, 132)
    for call in (None, whole):
        check_room(dims, schedule(dims, 4, seen, mask_size, call), mask_size)


def check_room(dims: Dims, plan: Schedule, mask_size: int) -> None:
    room = room_for(dims, plan, mask_size)
    rows, keys = plan.consumers * ROWS.value, plan.stages * plan.keys
    numbers = (rows + keys) * dims.of_query + keys * dims.of_value
    numbers += rows * (room.output_columns + dims.value_rest)
    mask = rows * plan.keys * room.mask_stages * mask_size
    assert 2 * numbers + mask <= SHARED_BYTES
    assert room.mask_stages in ((1, 2) if mask_size else (0,))
    assert dims.value // room.output_columns in (1, 2, 4)
    assert dims.value % room.output_columns == 0


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads_side_by_side_share_their_keys(head_dim: int, group: int) -> None:
    plan = schedule(dims_of(head_dim, head_dim), group, 1024)
    assert group % plan.heads == 0
    assert plan.consumers % plan.heads == 0


@pytest.mark.parametrize("head_dim", [264, 20, 0])
def test_refuses_head_dims(head_dim: int) -> None:
    query = torch.zeros(1, 1, 4, head_dim, dtype=torch.float16)
    with pytest.raises(ValueError, match=f"head_dim {head_dim}"):
        hopper_prefill.hopper_prefill(query, query, query)
    narrow = torch.zeros(1, 1, 4, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match=f"head_dim {head_dim}"):
        hopper_prefill.hopper_prefill(narrow, narrow, query)


MASKS = {
    "as it is": torch.ones(2, 3, 40, 64, dtype=torch.bool),
    "for all": torch.ones(40, 64, dtype=torch.bool),
    "one of a batch": torch.ones(1, 3, 40, 64, dtype=torch.bool).expand(2, -1, -1, -1),
    "by key": torch.ones(2, 1, 1, 64, dtype=torch.bool),
    "odd length": torch.ones(40, 61, dtype=torch.bool),
    "numbers": torch.ones(1, 3, 40, 61, dtype=torch.bfloat16),
    "numbers, apart": torch.ones(1, 1, 64, 40).mT,
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_tma_can_address(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = MASKS[name]
    values = torch.randn(mask.shape, generator=generator)
    mask = (values > 0 if mask.dtype == torch.bool else values.to(mask.dtype)).expand(mask.shape)
    if name == "one of a batch":
        mask = mask[:1].expand(2, -1, -1, -1)
    q_len, kv_len = 40, mask.shape[-1]
    loadable = loadable_mask(mask, (2, 3, q_len, kv_len))
    assert are_loadable(loadable)
    numbers = loadable
    if mask.dtype == torch.bool:
        assert loadable.dtype == torch.uint16
        numbers = loadable.view(torch.bool)
    expected = mask.expand(2, 3, q_len, kv_len)
    assert torch.equal(numbers[..., :kv_len].expand_as(expected), expected)
    if name in ("as it is", "for all", "one of a batch"):
        assert loadable.data_ptr() == mask.data_ptr(), "nothing was copied"


def test_other_masks_become_float32_or_are_refused() -> None:
    mask = torch.randn(40, 64, dtype=torch.float64)
    assert torch.equal(loadable_mask(mask, (2, 3, 40, 64))[0, 0], mask.float())
    with pytest.raises(RuntimeError, match="expand"):
        loadable_mask(torch.ones(3, 1, 40, 64), (2, 3, 40, 64))


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build plans as if on a Hopper GPU, from meta tensors."""
    monkeypatch.setattr(hopper_prefill, "multiprocessors", lambda device: 132)


def empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def plan_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Any = None,
    sinks: tuple[int, ...] | None = None,
    options: AttentionOptions | None = None,
) -> hopper_prefill._PlannedPrefill:
    tensors = (query, key, value, query)
    return hopper_prefill._planned(
        tuple(each.shape for each in tensors),
        tuple(each.stride() for each in tensors),
        (query.dtype, key.dtype, value.dtype),
        (query.device, key.device, value.device),
        False,
        None,
        options,
        lengths,
        None,
        None,
        (False, None),
        sinks,
    )


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_only_invariant_calls_of_any_size_cut_up_keys_alike(head_dim: int) -> None:
    def plans(options: AttentionOptions | None) -> set[tuple[int | None, ...]]:
        found = set()
        for batch, length in ((1, 64), (1, 4250), (2, 2048), (40, 4096)):
            tensor = empty(batch, 10, length, head_dim)
            launch = plan_of(tensor, tensor, tensor, options=options).call.launch
            last = dict(zip(launch._kernel.arg_names[::-1], launch._rest[::-1], strict=False))
            names = ("CONSUMERS", "HEADS", "KEYS", "share_row", "share_each")
            found.add(tuple(last[name] for name in names))
        return found

    assert len(plans(INVARIANT)) == 1 < len(plans(None))


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("q_len", "begins_early"), [(1000, True), (1024, False), (16384, False)])
def test_tma_stores_no_tile_that_begins_before_the_first_query(
    q_len: int, begins_early: bool
) -> None:
    options = AttentionOptions(bottom_right=True, window=(None, 0), invariant=True)
    query, key = empty(1, 4, q_len, 128), empty(1, 4, 16384, 128)
    assert plan_of(query, key, key, options=options).has_pointer == begins_early
    padded = plan_of(query, key, key, ("padded", 1, q_len), options=options)
    assert padded.has_pointer, "only the GPU knows where tiles begin"


@pytest.mark.usefixtures("on_hopper")
def test_a_dimension_of_one_may_have_any_stride() -> None:
    wide = empty(1, 1, 1, 65)[..., :64]
    assert wide.stride(0) % 8
    assert are_loadable(torch.zeros(1, 1, 1, 65, dtype=torch.float16)[..., :64])
    again = empty(4, 4, 16, 64)[:1, :1].expand(4, 4, 16, 64)[:1, :1]
    assert again.stride()[:2] == (0, 0)
    for tensor in (wide, again):
        assert plan_of(tensor, tensor, tensor).call.descriptors is not None


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("query", "key", "value", "sentence"),
    [
        (empty(1, 6, 8, 64), empty(1, 4, 8, 64), empty(1, 4, 8, 64), "not a multiple of 4"),
        (empty(1, 2, 8, 64), empty(1, 2, 80, 64), empty(1, 2, 8, 64), "do not fit together"),
        (
            empty(1, 2, 8, 64, dtype=torch.bfloat16),
            empty(1, 2, 8, 64),
            empty(1, 2, 8, 64),
            "bfloat16, float16, float16: needs one type of 16 bits",
        ),
        (*3 * (empty(1, 2, 8, 64, dtype=torch.float32),), "needs one type of 16 bits"),
    ],
)
def test_refuses_what_does_not_fit_together(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        plan_of(query, key, value)


@pytest.mark.usefixtures("on_hopper")
def test_refuses_too_few_sinks() -> None:
    tensor = empty(1, 4, 8, 64)
    assert plan_of(tensor, tensor, tensor, sinks=(4,)).call.descriptors is not None
    with pytest.raises(ValueError, match="needs one for each of 4 query heads"):
        plan_of(tensor, tensor, tensor, sinks=(3,))


def test_plans_are_not_repeated_for_tensors_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: set[Any] = set()

    def planned(*arguments: Any) -> None:
        plans.add(arguments)
        raise NotImplementedError

    monkeypatch.setattr(hopper_prefill, "_planned", planned)
    tensor, sinks = torch.zeros(1, 4, 8, 64, dtype=torch.float16), torch.zeros(4)
    offsets = torch.zeros(2, dtype=torch.int32)
    for far in range(4):
        query, key, sink, starts = (
            each.to("meta") if number == far else each
            for number, each in enumerate((tensor, tensor, sinks, offsets))
        )
        lengths = hopper_prefill.Lengths("packed", 1, 8, offsets, starts)
        with pytest.raises(NotImplementedError):
            hopper_prefill.forward_hopper(
                query, key, tensor, False, None, lengths, False, sinks=sink
            )
    assert len(plans) == 4


def test_without_keys_there_is_the_sink() -> None:
    query, key = torch.randn(2, 3, 5, 64).half(), torch.empty(2, 3, 0, 64).half()
    sinks = torch.tensor([1.0, -2.0, 3.0])
    output, lse = hopper_prefill.hopper_prefill(query, key, key, sinks=sinks, return_lse=True)
    assert not output.any()
    assert torch.equal(lse, sinks[:, None].expand(2, 3, 5))


def test_refuses_a_negative_scale() -> None:
    query = torch.zeros(1, 1, 4, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="must not be negative"):
        hopper_prefill.hopper_prefill(query, query, query, scale=-1.0)


def test_what_tma_can_address() -> None:
    tensor = torch.zeros(2, 8, 3, 64, dtype=torch.float16)
    assert are_loadable(tensor)
    assert are_loadable(tensor.transpose(1, 2))
    assert not are_loadable(tensor.mT), "elements of a head must be adjacent"
    assert not are_loadable(tensor.flatten()[1:-63].view(-1, 1, 1, 64)[:4]), "16 bytes aligned"
    assert not are_loadable(tensor[:, :, :1].expand(2, 8, 3, 64)), "a stride of 0"
    assert not are_loadable(torch.zeros(1, 1, 4, 68, dtype=torch.float16)[..., :64]), "odd rows"
