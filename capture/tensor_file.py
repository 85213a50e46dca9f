"""Writes safetensors files with torch only.

The format is public and small: the length of a JSON header in 8 bytes, the header, then the tensors
(https://github.com/huggingface/safetensors, "Format"). The library's own function requires numpy,
which torch does not.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from capture import checksums

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> str:
    """Write contiguous CPU tensors to `path` and return the file's checksum (`capture.checksums`).

    The first chunk, with the header, is written last: a file that is not complete has no header.

    Raises:
        OSError: the file cannot be written.
        ValueError: the format does not support the dtype, or a tensor is not contiguous.
    """
    chunks = checksums.chunked(_parts(tensors, metadata))
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:

        def store(index: int) -> bytes:
            _write_at(descriptor, index * checksums.CHUNK, chunks[index])
            return checksums.digest(chunks[index])

        later = range(1, len(chunks))
        if later:
            with ThreadPoolExecutor(checksums.threads()) as pool:
                digests = list(pool.map(store, later))
        else:
            digests = []
        return checksums.combined([store(0), *digests])
    finally:
        os.close(descriptor)


def _write_at(descriptor: int, offset: int, pieces: list[memoryview]) -> None:
    for piece in pieces:
        while piece.nbytes:
            written = os.pwrite(descriptor, piece, offset)
            piece, offset = piece[written:], offset + written


def _parts(
    tensors: Mapping[str, Tensor], metadata: dict[str, str]
) -> Iterator[bytes | ctypes.Array[ctypes.c_char]]:
    # Widest elements first, so that every tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in _DTYPES or not tensor.is_contiguous():
            raise ValueError(f"{name}: {tensor.dtype}, strides {tensor.stride()}, cannot be stored")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for _, tensor in ordered:
        if tensor.numel():  # a view of the tensor's memory, without a copy
            nbytes = tensor.numel() * tensor.element_size()
            yield (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
