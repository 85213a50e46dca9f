"""Models that make given attention calls, and checks that hold for every dataset."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from capture import load, record
from capture.cli.file_checks import check_files
from capture.storage.dataset import Dataset

MakeLayers = Callable[..., Any]


class Caller(nn.Module):
    """Model that makes given SDPA calls."""

    def forward(self, *calls: Callable[[], Tensor]) -> list[Tensor]:
        return [call() for call in calls]


def attend(*args: Any, **kwargs: Any) -> Callable[[], Tensor]:
    return lambda: F.scaled_dot_product_attention(*args, **kwargs)


def recorded(out: Path, *calls: Callable[[], Tensor], **options: Any) -> Dataset:
    model = Caller()
    with record(model, out, **options):
        model(*calls)
    return load(out)


def assert_good(data: Dataset) -> None:
    """Check that checksums match, SDPA repeats all outputs, and the census agrees with the
    files."""
    texts = {finding.text for finding in check_files(data)}
    assert texts <= {"intact; output bit-identical", "intact; no output recorded"}
    for capture in data.captures:
        kept = [entry for entry in data.entries if entry.origin.model == capture.model]
        rows = capture.census["rows"]
        assert sum(row["kept"] for row in rows) == len(kept)
        assert sum(row["calls"] for row in rows) == capture.calls_seen
        for row in rows:
            signature = capture.census["signatures"][row["signature"]]
            here = [
                entry
                for entry in kept
                if (entry.origin.module, entry.origin.phase) == (row["module"], row["phase"])
                and signature["query"][-2:] == list(entry.header.layouts["query"].size[-2:])
                and signature["key"][-2:] == list(entry.header.layouts["key"].size[-2:])
            ]
            assert len(here) >= row["kept"]
            assert row["first_step"] <= row["last_step"]
