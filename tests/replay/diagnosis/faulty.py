"""Kernels with one fault each, and calls that reveal the fault."""

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_kept: dict[Any, Any] = {}


def right(query, key, value, *others, **options):
    return scaled_dot_product_attention(query, key, value, *others, **options)


def float16_scores(query, key, value, *others, **options):
    """Compute the product of query and key in float16 before scaling."""
    product = (query.half() @ key.mT.half()).float()
    return (product * query.shape[-1] ** -0.5).softmax(-1).to(value.dtype) @ value


def no_maximum(query, key, value, *others, **options):
    """Take exponentials of scores without subtracting the maximum."""
    weights = (query.float() @ key.mT.float() * query.shape[-1] ** -0.5).exp()
    return ((weights / weights.sum(-1, keepdim=True)) @ value.float()).to(value.dtype)


def float16_values(query, key, value, *others, **options):
    return right(query.half(), key.half(), value.half()).to(query.dtype)


def int8_keys(query, key, value, *others, **options):
    scale = key.abs().amax(dim=-1, keepdim=True).float() / 127
    rounded = (key.float() / scale).round() * scale
    return right(query.float(), rounded, value.float()).to(query.dtype)


def with_mask(read: Callable[[Tensor], Tensor | None]) -> Callable[..., Tensor]:
    """Return a kernel that misreads the mask."""

    def kernel(query, key, value, attn_mask, *others, **options):
        return right(query, key, value, read(attn_mask))

    return kernel


def scaled_by(factor: float) -> Callable[..., Tensor]:
    """Return a kernel that multiplies the scale."""

    def kernel(query: Tensor, *tensors: Tensor, **options: Any) -> Tensor:
        scale = options.pop("scale", None) or query.shape[-1] ** -0.5
        return right(query, *tensors, **options, scale=scale * factor)

    return kernel


def in_head_1(query, key, value, **options):
    """Compute one head in a faulty way."""
    output = right(query, key, value, **options)
    output[:, 1] = float16_scores(query, key, value, **options)[:, 1]
    return output


READINGS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "ignored": lambda mask: None,
    "inverted": lambda mask: ~mask,
    "length": lambda mask: torch.arange(mask.shape[-1]) < mask.sum(-1, keepdim=True),
    "added": lambda mask: mask.float(),
    "transposed": lambda mask: mask.mT,
    "shifted": lambda mask: mask.roll(1, -1),
    "first batch": lambda mask: mask[:1],
    "not 0": lambda mask: mask != 0,
    "log2": lambda mask: mask * math.log(2),
    "negated": lambda mask: -mask,
}


def not_rescaled(query, key, value, *others, **options):
    """Compute an online softmax over blocks of 16 keys without rescaling the sum."""
    scores = query.float() @ key.mT.float() * query.shape[-1] ** -0.5
    if options.get("is_causal"):
        rows, keys = scores.shape[-2:]
        scores = scores.masked_fill(~torch.ones(rows, keys).tril().bool(), -math.inf)
    most = torch.full_like(scores[..., :1], -math.inf)
    total, output = torch.zeros_like(most), torch.zeros_like(query.float())
    for first in range(0, scores.shape[-1], 16):
        block = scores[..., first : first + 16]
        most = torch.maximum(most, block.amax(-1, keepdim=True))
        weights = (block - most).exp()
        total = total + weights.sum(-1, keepdim=True)
        output = output + weights @ value[..., first : first + 16, :].float()
    return (output / total).to(query.dtype)


def scales_query(query, key, value, *others, **options):
    query.mul_(query.shape[-1] ** -0.5)
    return right(query, key, value, *others, **{**options, "scale": 1.0})


def rows_unwritten(query, key, value, *others, **options):
    output = torch.empty_like(query)
    output[:, 0] = right(query, key, value, *others, **options)[:, 0]
    output[:, 1, 3:] = right(query, key, value, *others, **options)[:, 1, 3:]
    return output


def tail_of_keys_dropped(query, key, value, *others, **options):
    whole = key.shape[2] // 16 * 16
    return right(query, key[:, :, :whole], value[:, :, :whole])


def bottom_right(query, key, value, *others, **options):
    rows, keys = query.shape[2], key.shape[2]
    mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    return right(query, key, value, mask)


def kept_by_shape(query, key, value, *others, **options):
    return _kept.setdefault(query.shape, right(query, key, value, *others, **options)).clone()


def keys_kept_by_address(query, key, value, *others, **options):
    """Pack keys and values only once per address."""
    place = (key.data_ptr(), value.data_ptr(), key.shape)
    kept = _kept.setdefault(place, (key.clone(), value.clone()))
    return right(query, *kept, *others, **options)


def scale_kept_by_shape(query, key, value, **options):
    """Use the scale of the first call of each shape."""
    options["scale"] = _kept.setdefault(("scale", query.shape), options.get("scale"))
    return scaled_dot_product_attention(query, key, value, **options)


def value_told_apart_by_its_first_element(query, key, value, *others, **options):
    kept = _kept.setdefault(("first element", float(value.flatten()[0])), value.clone())
    return scaled_dot_product_attention(query, key, kept, *others, **options)


def first_memory(query, key, value, *others, **options):
    """Replay a graph that reads the memory of the captured call."""
    captured = _kept.setdefault(("graph", query.shape), (query, key, value))
    return right(*captured, *others, **options)


def one_row_off(query, key, value, *others, **options):
    output = right(query, key, value, *others, **options)
    output[:, 1, 2] += 1
    return output


def wrong_once(query, key, value, *others, **options):
    output = right(query, key, value, *others, **options)
    if "called" not in _kept:
        _kept["called"] = True
        output += 1
    return output


def racing(seed: int, share: float) -> Callable[..., Tensor]:
    """Return a kernel with a wrong row in a share of its calls, drawn at random."""
    draw = random.Random(seed)
    return lambda *each, **named: (one_row_off if draw.random() < share else right)(*each, **named)


racing_by_half = racing(0, 0.5)


def reading(read: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Tensor]:
    """Return a kernel that computes attention of other tensors."""
    return lambda query, key, value, **_: right(*read(query, key, value))


without_options = reading(lambda *each: each)


def wrong_if(
    is_wrong: Callable[[Tensor, Tensor], Any], *, raises: bool = False
) -> Callable[..., Tensor]:
    """Return a kernel that is wrong for some queries and keys, or raises for them."""

    def kernel(query, key, value, *others, **options):
        output = right(query, key, value, *others, **options)
        if raises and is_wrong(query, key):
            raise ValueError(f"cannot read {tuple(key.shape)}")
        return output.flip(-1) * 1.1 if is_wrong(query, key) else output

    return kernel


def wrong_from(number: int, dim: int) -> Callable[..., Tensor]:
    """Return a kernel whose sequences, heads, queries or columns from a number on are wrong."""

    def kernel(query, key, value, *others, **options):
        output = right(query, key, value, *others, **options)
        output.transpose(0, dim)[number:] *= -1.1
        return output

    return kernel


def read_as_bshd(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(
        each.reshape(each.shape[0], each.shape[2], each.shape[1], -1).transpose(1, 2)
        for each in tensors
    )


def swapped(query, key, value, **options):
    """Take (B, H, S, D) for (B, S, H, D)."""
    return right(*(each.transpose(1, 2) for each in (query, key, value))).transpose(1, 2)


def written_as_bshd(*arguments, **options):
    output = right(*arguments, **options)
    return output.transpose(1, 2).reshape(output.shape)


def reads_as_dense(name: str) -> Callable[..., Tensor]:
    """Return a kernel that ignores the strides of one tensor."""

    def kernel(**arguments):
        tensor = arguments[name]
        if 0 in tensor.stride():  # the memory beyond the tensor has other numbers
            dense = tensor * torch.linspace(1, 2, tensor.shape[1])[:, None, None]
        else:
            size = tensor.contiguous().stride()
            dense = tensor.as_strided(tensor.shape, size)
        return scaled_dot_product_attention(**{**arguments, name: dense})

    return kernel


def float8_values(query, key, value, *others, **options):
    return right(query, key, value.to(torch.float8_e4m3fn).to(value.dtype), *others, **options)


def black(query, key, value, *others, **options):
    """Replace the NaN of an overflow by 0."""
    return float16_scores(query, key, value).nan_to_num(0.0)


def clamped_scores(query, key, value, *others, **options):
    scores = (query.float() @ key.mT.float() * query.shape[-1] ** -0.5).clamp(-20, 20)
    return (scores.softmax(-1) @ value.float()).to(query.dtype)


def multiplied(query, key, value, attn_mask, *others, **options):
    return (query @ key.mT * query.shape[-1] ** -0.5 * attn_mask).softmax(-1) @ value


def in_one_buffer(query, key, value, *others, **options):
    """Reuse one output buffer, whose last rows are never written."""
    # The buffer is not `empty_like`, whose memory may be zeros and look written.
    output: Tensor = _kept.setdefault(query.shape, torch.full_like(query, 0.7))
    output[:, :, :-5] = right(query, key, value, *others, **options)[:, :, :-5]
    return output.clone()


def without_itself(query, key, value, *others, **options):
    """Mask each query's own key; the first query then sees no key and gets NaN."""
    hidden = ~torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(-1)
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ value


def forget() -> None:
    _kept.clear()
