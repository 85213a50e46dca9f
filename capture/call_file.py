"""The file of one call: its tensors and, in the safetensors header, everything else."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from capture import checksums
from capture.call import AttentionCall, Origin
from capture.errors import DatasetError
from capture.header import Header, dtype_name
from capture.strides import pack, unpack
from capture.tensor_file import write_safetensors

FORMAT = "attention-replay/2"
_HEADER_KEY = "attention-replay"


@dataclass(frozen=True)
class PackedCall:
    """A call ready to be written: header and contiguous CPU tensors."""

    header: Header
    values: dict[str, Tensor]

    @classmethod
    def of(cls, call: AttentionCall) -> PackedCall:
        """Copy `call`'s tensors to the CPU, so that later changes do not affect the file."""
        packed = {name: pack(tensor) for name, tensor in call.tensors().items()}
        return cls(
            Header(
                origin=call.origin,
                is_causal=call.is_causal,
                scale=call.scale,
                enable_gqa=call.enable_gqa,
                dropout_p=call.dropout_p,
                dtypes={name: dtype_name(values.dtype) for name, (values, _) in packed.items()},
                layouts={name: layout for name, (_, layout) in packed.items()},
                mask_is_noop="attn_mask" in packed and masks_nothing(packed["attn_mask"][0]),
            ),
            {name: values for name, (values, _) in packed.items()},
        )

    def write(self, path: Path) -> FileEntry:
        """Write the file and return its manifest entry.

        Raises:
            OSError, ValueError: it cannot be written; what there is of it has been deleted.
        """
        metadata = {_HEADER_KEY: json.dumps(asdict(self.header)), "format": FORMAT}
        try:
            checksum = write_safetensors(path, self.values, metadata)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise
        return FileEntry(path, self.header, path.stat().st_size, checksum)


@dataclass(frozen=True)
class FileEntry:
    """One recorded call on disk; `load` reads its tensors."""

    path: Path
    header: Header
    nbytes: int
    checksum: str | None
    """From the manifest (`capture.checksums`); None if the manifest does not list the file."""

    @property
    def origin(self) -> Origin:
        return self.header.origin

    @classmethod
    def read(cls, path: Path) -> FileEntry:
        """Create the entry of a file that no manifest lists.

        Raises:
            DatasetError: the file is damaged or is not a recorded call.
        """
        with _open(path) as file:
            metadata = file.metadata() or {}
        if _HEADER_KEY not in metadata:
            raise DatasetError(f"{path}: not a call recorded by attention-replay")
        try:
            header = Header.from_json(json.loads(metadata[_HEADER_KEY]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DatasetError(f"{path}: its header is damaged ({error})") from error
        return cls(path, header, path.stat().st_size, None)

    @classmethod
    def from_json(cls, directory: Path, data: dict[str, Any]) -> FileEntry:
        """Create the entry of a file as a manifest lists it.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: `data` is not such an entry.
        """
        return cls(
            directory / Path(data["file"]).name,
            Header.from_json(data["call"]),
            data["bytes"],
            _recorded_checksum(data),
        )

    def to_json(self) -> dict[str, Any]:
        """Return what the manifest says of the file."""
        return {
            "file": self.path.name,
            "bytes": self.nbytes,
            "checksum": self.checksum,
            "call": asdict(self.header),
        }

    def check(self) -> None:
        """Compare the file with its recorded size and checksum.

        Raises:
            DatasetError: the file is missing, truncated or altered.
        """
        if not self.path.is_file():
            raise DatasetError(f"{self.path}: missing")
        nbytes = self.path.stat().st_size
        if nbytes != self.nbytes:
            raise DatasetError(f"{self.path}: {nbytes} bytes, but {self.nbytes} were recorded")
        if self.checksum is not None and not checksums.matches(self.path, self.checksum):
            raise DatasetError(f"{self.path}: altered since it was recorded (checksum differs)")

    def load(self, device: str | torch.device = "cpu") -> AttentionCall:
        """Load the call to `device`, with shapes, dtypes and strides as recorded.

        Raises:
            DatasetError: the file is missing, damaged, or does not match its header.
        """
        with _open(self.path) as file:
            stored = set(file.keys())
            if stored != set(self.header.layouts):
                raise DatasetError(f"{self.path}: tensors {sorted(stored)} do not match its header")
            tensors = {}
            for name, layout in self.header.layouts.items():
                values = file.get_tensor(name)
                if dtype_name(values.dtype) != self.header.dtypes[name]:
                    raise DatasetError(f"{self.path}: {name} is {values.dtype}, not as recorded")
                try:
                    tensors[name] = unpack(values, layout, device)
                except ValueError as error:
                    raise DatasetError(f"{self.path}: {name} has {error}") from error
        return AttentionCall(
            query=tensors["query"],
            key=tensors["key"],
            value=tensors["value"],
            attn_mask=tensors.get("attn_mask"),
            output=tensors.get("output"),
            is_causal=self.header.is_causal,
            scale=self.header.scale,
            enable_gqa=self.header.enable_gqa,
            dropout_p=self.header.dropout_p,
            origin=self.origin,
        )


def _recorded_checksum(item: dict[str, Any]) -> str | None:
    """The checksum in a manifest's entry of a file."""
    if "sha256" not in item:
        return item["checksum"]
    return item["sha256"] and f"{checksums.WHOLE}:{item['sha256']}"


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise DatasetError(f"{path}: missing") from error
    except (SafetensorError, OSError) as error:
        raise DatasetError(f"{path}: not a readable safetensors file ({error})") from error


def masks_nothing(mask: Tensor) -> bool:
    """Whether a bool mask is all True, or a float mask all zero."""
    return bool(mask.all()) if mask.dtype == torch.bool else not bool(mask.any())
