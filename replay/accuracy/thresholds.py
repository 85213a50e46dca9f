"""The thresholds that outputs are judged by, and a file that changes them. Imports no torch.

`replay --tolerances FILE.toml` reads the thresholds that differ from the defaults. The file has a
table for each class of kernel: `[quantised]` with a line `minimum_cosine = 0.98`.
"""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from attention_replay.errors import Error
from capture.storage.toml_data import read_tables
from replay.rows.errors_of_output import AccuracyClass


class ThresholdsError(Error):
    """Error for an unusable file of thresholds."""


@dataclass(frozen=True)
class ExactThresholds:
    """Thresholds of kernels that compute in the call's 16 or 32 bits."""

    same_dtype_factor: Annotated[float, "× the same-dtype error, of the output and of rows"] = 2.0
    """Factor that FlashAttention's own tests use."""
    rounding_factor: Annotated[float, "× the rounding noise of a row"] = 4.0
    """In tens of thousands of random calls, honest kernels need at most 1.1 (16 bits) and 1.7 (32
    bits)."""


@dataclass(frozen=True)
class QuantisedThresholds:
    """Thresholds of kernels that compute in 8 bits or fewer."""

    minimum_cosine: Annotated[float, "of the whole output"] = 0.99
    """Working 8-bit kernels exceed 0.99 on real inputs. Broken kernels (lost heads, overflow,
    unwritten memory) are far below."""
    maximum_relative_l1: Annotated[float, "of the whole output"] = 0.1
    """Error of a tenth of the signal. Unlike the cosine, this limit reveals a wrong factor."""
    noise_factor: Annotated[
        float, "× the relative L1 of plain 8-bit attention, of the whole output and of each head"
    ] = 1.35
    """For comparison, the loss of 64 of 8,192 random keys makes the error 1.5 times as large."""
    row_factor: Annotated[float, "× the error of plain 8-bit attention in its head's worst row"] = (
        3.0
    )


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of every class of kernel."""

    exact: ExactThresholds = ExactThresholds()
    quantised: QuantisedThresholds = QuantisedThresholds()
    sparse: ExactThresholds = ExactThresholds()
    """Thresholds for attention to the keys that the kernel chose."""

    def of(self, accuracy_class: AccuracyClass) -> ExactThresholds | QuantisedThresholds:
        """Return the thresholds of one class."""
        if accuracy_class == "quantised":
            return self.quantised
        return self.sparse if accuracy_class == "sparse" else self.exact

    def changes(self) -> str:
        """Return the differences from the defaults, e.g. `quantised.minimum_cosine=0.98`."""
        usual = asdict(Thresholds())
        return " ".join(
            f"{table}.{name}={value:g}"
            for table, values in asdict(self).items()
            for name, value in values.items()
            if value != usual[table][name]
        )

    @classmethod
    def from_tables(cls, tables: dict[str, Any], source: object = "tolerances") -> Thresholds:
        """Return the defaults, replaced by the values in `tables`."""
        made = cls()
        for table, values in tables.items():
            _check_name(source, "table", table, [field.name for field in fields(cls)])
            if not isinstance(values, dict):
                raise ThresholdsError(
                    f"{source}: {table} must be a table: write [{table}] on its line"
                )
            usual = getattr(made, table)
            for name, value in values.items():
                _check_name(source, f"key in [{table}]", name, list(vars(usual)))
                if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                    raise ThresholdsError(
                        f"{source}: {table}.{name} must be a number of at least 0, such as "
                        f"{getattr(usual, name):g}, not {value!r}"
                    )
            numbers = {name: float(value) for name, value in values.items()}
            made = replace(made, **{table: replace(usual, **numbers)})
        return made

    @classmethod
    def read(cls, path: Path) -> Thresholds:
        """Return the defaults, replaced by the values in a TOML file.

        Raises:
            ThresholdsError: the file cannot be read or used.
        """
        return cls.from_tables(read_tables(path, ThresholdsError), path)


def _check_name(source: object, kind: str, name: str, known: list[str]) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
    raise ThresholdsError(f"{source}: no {kind} is called {name!r}: {hint}")
