"""Tensors are read back with their values, sizes, dtypes and strides."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from capture.call.strides import Layout, copy_with_strides, pack, unpack
from tests.factories import bits

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
]


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """Draw 4-D views like those of models: permuted, sliced with gaps, offset or expanded."""
    size = draw(st.tuples(*[st.integers(1, 4)] * 4))
    order = draw(st.permutations(range(4)))
    margins = draw(st.tuples(*[st.integers(0, 2)] * 4))
    start = draw(st.tuples(*[st.integers(0, 1)] * 4))
    expanded = draw(st.sets(st.integers(0, 3)))
    dtype = draw(st.sampled_from(DTYPES))
    outer = [(1 if dim in expanded else size[dim]) + margins[dim] + start[dim] for dim in range(4)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 100)))
    values = torch.randn([outer[dim] for dim in order], generator=generator)
    base = values > 0 if dtype == torch.bool else values.to(dtype)
    tensor = base.permute([order.index(dim) for dim in range(4)])
    for dim in range(4):
        tensor = tensor.narrow(dim, start[dim], 1 if dim in expanded else size[dim])
    return tensor.expand(size)


@given(views())
def test_round_trip(tensor: Tensor) -> None:
    values, layout = pack(tensor)
    assert values.is_contiguous()
    assert values.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    restored = unpack(values, layout)
    assert restored.shape == tensor.shape
    assert restored.stride() == tensor.stride()
    assert restored.dtype == tensor.dtype
    assert torch.equal(bits(restored), bits(tensor))


@given(views())
def test_copy_has_the_strides_and_memory_of_its_own(tensor: Tensor) -> None:
    copy, again = copy_with_strides(tensor, "cpu"), copy_with_strides(tensor, "cpu")
    assert copy.stride() == tensor.stride()
    memory = [each.as_strided((Layout.of(each).extent,), (1,)) for each in (copy, again)]
    assert torch.equal(*map(bits, memory))
    assert torch.equal(bits(copy), bits(tensor))
    assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_values_are_held_as_they_are_in_memory() -> None:
    """Neither writing nor reading changes the order of the values in memory."""
    bshd = torch.randn(2, 7, 3, 4)
    values, layout = pack(bshd.transpose(1, 2))
    assert torch.equal(values, bshd)
    assert layout == Layout((2, 3, 7, 4), (84, 4, 12, 1), order=(0, 2, 1, 3))
    assert unpack(values, layout).data_ptr() == values.data_ptr()


def test_expanded_dimension_is_held_once() -> None:
    mask = torch.randn(1, 1, 7, 9).expand(3, 5, 7, 9)
    values, layout = pack(mask)
    assert values.shape == (1, 1, 7, 9)
    assert layout == Layout((3, 5, 7, 9), mask.stride())


def test_tensor_without_elements() -> None:
    empty = torch.empty(1, 2, 0, 8)
    assert unpack(*pack(empty)).shape == empty.shape


@pytest.mark.parametrize("expand", [False, True])
def test_overlapping_windows_come_back_contiguous(expand: bool) -> None:
    windows = torch.arange(8.0).unfold(0, 4, 1)[None, None]  # (1, 1, 5, 4), strides 1 and 1
    tensor = windows.expand(2, 3, 5, 4) if expand else windows
    assert not Layout.of(tensor).is_representable
    for restored in (unpack(*pack(tensor)), copy_with_strides(tensor, "cpu")):
        assert torch.equal(restored, tensor)
        assert restored[0, 0].is_contiguous()
        assert restored.untyped_storage().data_ptr() != windows.untyped_storage().data_ptr()


def test_copies_require_no_gradients() -> None:
    tensor = torch.randn(1, 1, 2, 2, requires_grad=True)
    assert not unpack(*pack(tensor)).requires_grad
    assert not copy_with_strides(tensor, "cpu").requires_grad


def test_values_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 2\), but \(2, 3\) was recorded"):
        unpack(torch.zeros(2, 2), Layout((2, 3), (3, 1)))
