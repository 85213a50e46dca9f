"""A fault that makes a GPU unusable loses only the row of the faulty kernel."""

from pathlib import Path

import pytest

from tests.gpu.replayed_rows import replayed_rows

BAD = """
import torch
import triton
import triton.language as tl
from torch.nn.functional import scaled_dot_product_attention

calls_of = {}
kept = []

@triton.jit
def _write_far_away(pointer):
    tl.store(pointer + 2**40, 1.0)

def good(query, key, value, *others, **options):
    return scaled_dot_product_attention(query, key, value, *others, **options)

def illegal(query, *others, **options):
    output = torch.empty_like(query)
    _write_far_away[(1,)](output)
    return output

def illegal_when_timed(query, key, value, *others, **options):
    calls_of["illegal"] = calls_of.get("illegal", 0) + 1
    if calls_of["illegal"] == 40:
        _write_far_away[(1,)](torch.empty_like(query))
    return good(query, key, value, *others, **options)

def asserts(query, *others, **options):
    return query[:, :, torch.full((query.shape[2],), 10**6, device=query.device)]

def hang(query, *others, **options):
    for _ in range(1000):
        torch.cuda._sleep(2**40)
    return query

def too_large(query, *others, **options):
    return query.new_empty(2**45)

def keep_memory(query, *others, **options):
    size = 2**33
    while size > 2**12:
        try:
            kept.append(torch.empty(size, dtype=torch.uint8, device=query.device))
        except torch.OutOfMemoryError:
            size //= 2
    raise torch.OutOfMemoryError("all of it is kept")
"""
EXPECTED = {
    "good": "ok",
    "illegal": "crash",
    "illegal_when_timed": "crash",
    "asserts": "crash",
    "hang": "timeout",
    "too_large": "out-of-memory",
    "keep_memory": "out-of-memory",
}


def test_each_fault_costs_one_row(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(BAD)
    kernels = ",".join([*(f"{file}:{name}" for name in EXPECTED), "torch-flash", "torch-math"])
    shape = ("random", "-hq", "4", "-sq", "512", "-d", "64")
    options = ("--rounds", "60", "--timeout", "20", "--kernels", kernels)
    found_rows = replayed_rows(tmp_path, *shape, *options)
    rows = {row["kernel"].rpartition(":")[2]: row for row in found_rows}
    found = {name: row["status"] for name, row in rows.items()}
    assert found == {
        **EXPECTED,
        **dict.fromkeys(("torch-flash", "torch-math", "torch-default"), "ok"),
    }
    for name in ("good", "torch-flash", "torch-math"):
        assert rows[name]["speedup"] is not None
    for name in ("illegal", "illegal_when_timed"):
        assert "illegal memory access" in rows[name]["reason"]


def test_resources_of_a_triton_kernel_are_noted(tmp_path: Path) -> None:
    pytest.importorskip("sageattention")
    shape = ["random", "-b", "1", "-hq", "8", "-sq", "512", "-d", "64", "--rounds", "5"]
    options = ["--kernels", "sage1", "--metric", "time,resources"]
    rows = replayed_rows(tmp_path, *shape, *options)
    (sage,) = (row for row in rows if row["kernel"] == "sage1")
    assert sage["status"] == "ok"
    assert sage["changed_inputs"] == ["key"]
    programs = sage["programs"]
    assert programs
    assert all(program["registers"] > 0 and program["warps"] > 0 for program in programs)
