"""Writes and reads the file of a call; the safetensors header holds all but the tensors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall, Origin
from capture.call.attention_variant import VARIANT_TENSORS, key_ranges
from capture.call.mask_structure import found_in
from capture.call.strides import pack, unpack
from capture.errors import DatasetError, InvalidCall
from capture.storage import checksums
from capture.storage.header import CallHeader, dtype_name, stored_tensors
from capture.storage.json_data import parsed, required
from capture.storage.names import FILE
from capture.storage.tensor_file import TensorFile, write_safetensors
from capture.storage.value_rules import value_fault

FORMAT = "attention-replay/2"
_HEADER_KEY = "attention-replay"


@dataclass(frozen=True)
class PackedCall:
    """A call that is ready to be written: header and contiguous CPU tensors."""

    header: CallHeader
    values: dict[str, Tensor]

    @classmethod
    def of(cls, call: AttentionCall) -> PackedCall:
        """Copy `call`'s tensors to the CPU, so that later changes do not affect the file.

        Raises:
            InvalidCall: see `with_values`.
        """
        tensors = stored_tensors(call)
        packed = {name: pack(tensor) for name, tensor in tensors.items()}
        layouts = {name: layout for name, (_, layout) in packed.items()}
        return cls.with_values(
            replace(CallHeader.of(call), layouts=layouts),
            {name: values for name, (values, _) in packed.items()},
        )

    @classmethod
    def with_values(cls, header: CallHeader, values: dict[str, Tensor]) -> PackedCall:
        """Check the values of lengths and pages, and add the mask's structure to `header`.

        Raises:
            InvalidCall: the model's call is invalid, so that the file could not be loaded.
        """
        if fault := value_fault(header, values, sum(each.nbytes for each in values.values())):
            raise InvalidCall(fault, header.origin.module, header.origin.step)
        return cls(replace(header, mask_structure=_mask_structure(header, values)), values)

    def write(self, path: Path) -> FileEntry:
        """Write the file and return its manifest entry."""
        metadata = {_HEADER_KEY: json.dumps(self.header.to_json()), "format": FORMAT}
        try:
            checksum = write_safetensors(path, self.values, metadata)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise
        return FileEntry(path, self.header, path.stat().st_size, checksum)


@dataclass(frozen=True)
class FileEntry:
    """A recorded call on disk; `load` reads its tensors."""

    path: Path
    header: CallHeader
    nbytes: int
    checksum: str | None
    """Checksum in the manifest (see `checksums`); None if the manifest does not list the file."""
    fetch: Callable[[FileEntry], None] | None = field(default=None, compare=False, repr=False)
    """Function that copies the file to `path` before it is read; None for a local file."""

    @property
    def origin(self) -> Origin:
        return self.header.origin

    @classmethod
    def read(cls, path: Path) -> FileEntry:
        """Create the entry of a file that no manifest lists."""
        with TensorFile.opened(path) as file:
            entry = cls(path, _header(file), file.nbytes, None)
            entry._compare(file)
        return entry

    @classmethod
    def from_json(cls, directory: Path, data: Any) -> FileEntry:
        """Create the entry of a file from a manifest's data about the file."""
        path, header = file_path(directory, data), required(data, "call", dict[str, Any])
        checksum = required(data, "checksum", str | None)
        if checksum is not None and not checksums.PATTERN.fullmatch(checksum):
            raise ValueError(f"unknown kind of checksum: {checksum[:40]!r}")
        return cls(path, CallHeader.from_json(header), required(data, "bytes", int), checksum)

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's entry of the file."""
        return {
            "file": self.path.name,
            "bytes": self.nbytes,
            "checksum": self.checksum,
            "call": self.header.to_json(),
        }

    def with_checksum(self) -> FileEntry:
        """Compute the checksum if it is missing and the file is the recorded call."""
        if self.checksum:
            return self
        with contextlib.suppress(DatasetError):
            with TensorFile.opened(self.path, self.nbytes) as file:
                self._compare(file)
            return replace(self, checksum=checksums.checksum(self.path))
        return self

    def check(self) -> None:
        """Compare the file with its recorded size, header and checksum."""
        self._read(check=True)

    def load(self, device: str | torch.device = "cpu", *, check: bool = True) -> AttentionCall:
        """Load the call to `device`, with shapes, dtypes and strides as recorded.

        Args:
            check: compare the checksum, if one was recorded. Without this check, loading is faster
                but altered values are not detected.

        Raises:
            DatasetError: the file is missing, damaged or altered, or requires memory or work out
                of proportion to its size.
        """
        values = self._read(check=check)
        if fault := value_fault(self.header, values, self.nbytes):
            raise DatasetError(fault, self.path)
        tensors = {
            name: unpack(values.pop(name), layout, device)
            for name, layout in self.header.layouts.items()
        }
        if columns := self.header.value_in_key:
            tensors["value"] = tensors["key"][..., :columns]
        tensors.update(
            (name, tensors[name][(0,) * (4 - dimensions)])
            for name, dimensions in (*VARIANT_TENSORS.items(), ("grad_sinks", 1))
            if name in tensors
        )
        return AttentionCall(
            **tensors,
            is_causal=self.header.is_causal,
            scale=self.header.scale,
            enable_gqa=self.header.enable_gqa,
            dropout_p=self.header.dropout_p,
            variant=self.header.variant,
            origin=self.origin,
        )

    def _read(self, *, check: bool) -> dict[str, Tensor]:
        if self.fetch is not None:
            self.fetch(self)
        with TensorFile.opened(self.path, self.nbytes) as file:
            self._compare(file)
            return file.read(self.checksum if check else None)

    def _compare(self, file: TensorFile) -> None:
        """Raise if the header differs from the recorded header, before allocating any memory."""
        if _header(file) != self.header:
            raise DatasetError("its header differs from the manifest", self.path)
        stored = {name: (dtype_name(dtype), shape) for name, (dtype, shape) in file.tensors.items()}
        described = {
            name: (self.header.dtypes[name], layout.stored)
            for name, layout in self.header.layouts.items()
        }
        if stored != described:
            raise DatasetError("its tensors differ from its header", self.path)
        if excess := self.header.excess(file.nbytes):
            raise DatasetError(excess, self.path)


def file_path(directory: Path, data: Any) -> Path:
    """Return the path of the file that a manifest's entry names."""
    name = required(data, "file", str)
    if not FILE.fullmatch(name):
        raise ValueError(f"invalid file name {name[:80]!r} (must be in the directory)")
    return directory / name


def _header(file: TensorFile) -> CallHeader:
    if _HEADER_KEY not in file.metadata:
        raise DatasetError("not a call recorded by attention-replay", file.path)
    try:
        return CallHeader.from_json(parsed(file.metadata[_HEADER_KEY]))
    except ValueError as error:
        raise DatasetError(f"its header is damaged ({error})", file.path) from error


def _mask_structure(header: CallHeader, values: dict[str, Tensor]) -> str:
    """Return the structure of the mask in packed values, as text; empty without a structure."""
    if "attn_mask" not in values or values.keys() & {"cu_seqlens_q", "seqused_k"}:
        return ""
    q_len, kv_len = header.shape.q_len, header.shape.kv_len
    mask = header.layouts["attn_mask"].logical(values["attn_mask"])
    within = key_ranges(
        q_len, kv_len, mask.device, is_causal=header.is_causal, variant=header.variant
    )
    return str(found_in(mask, within, q_len, kv_len) or "")
