"""Figures that `benchmarks/tables` derives from rows of speed, and calls of the benchmarks."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import results
from benchmarks.attention_kernels import per_pair
from benchmarks.attention_kernels.rivals import PARTS, Case
from benchmarks.tables import rivals
from capture.call.attention_variant import AttentionVariant
from replay.kernels.registry import Kernel, select
from tests.factories import random_call


def lines(table: str) -> list[list[str]]:
    """Return the cells in a table's heading and lines."""
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in table.splitlines()
        if line.startswith("| ")
    ]


def test_rivals_are_listed_relative_to_our_time(tmp_path: Path) -> None:
    """Cores count, the fastest kernel of a library counts, and the fastest rival is in bold."""
    shape = {"batch": 1, "q_heads": 2, "kv_heads": 2, "q_len": 8, "kv_len": 8}
    shape |= {"head_dim": 64, "v_head_dim": 64}
    call = {"model": "prefill", "name": "FLUX", "is_causal": True, "shape": shape}
    machine = {"device": "a GPU", "torch": "2"}

    def timed(kernel: str, ms: float, **changes: Any) -> dict[str, Any]:
        found = {"kernel": kernel, "call": call, "status": "ok", "time_ms": {"p50": ms}}
        return found | {"machine": machine} | changes

    failed = timed("cudnn-fp8", 0.1, status="inaccurate")
    rows = [
        timed("triton-fa3", 2.0),
        timed("fa3", 9.0, core_time_ms={"p50": 3.0}, version="3.0.0b1"),
        timed("fa3-kvcache", 5.0, environment="fa3", version="3.0.0b1"),
        timed("torch-flash", 2.5, version="2"),
        failed,
    ]
    results.write(rows, tmp_path / "rivals_one.csv")
    other = {"machine": machine | {"device": "another GPU"}}
    results.write([each | other for each in rows[:2]], tmp_path / "rivals_two.csv")
    table = rivals.rivals(tmp_path)
    heading, first = "rival's time / ours", "prefill, FLUX: 1×2×8×64 causal"
    assert lines(table) == [
        [heading, "FlashAttention 2", "FlashAttention 3"],
        [first, "**1.25**", "1.50"],
        [heading, "FlashAttention 3"],
        [first, "**1.50**"],
    ]
    assert "prefill 1.25 to 1.25. a GPU, torch 2, FlashAttention 3 3.0.0b1." in table
    results.write([failed], tmp_path / "rivals_one.csv")
    assert rivals.rivals(tmp_path, "rivals_one.csv") == ""


@pytest.mark.parametrize("part", PARTS)
def test_our_kernel_takes_every_case_of_the_rivals(part: str) -> None:
    """Pages hold the same keys as the plain call."""
    for names, cases in PARTS[part].items():
        ours, *_ = select(names)[0]
        assert ours.name.startswith(rivals.OURS)
        for case in cases.values():
            spec = replace(case.spec, batch=2, q_len=min(case.spec.q_len, 8), kv_len=256)
            call = Case(spec, case.lengths and (9, 256), case.page_size).call(part)
            assert ours.refuses(call) is None
            assert call.value_is_in_key == (part == "mla")
            plain = spec.call("cpu", torch.Generator().manual_seed(0))
            lengths = [256, 256] if call.seqused_k is None else call.seqused_k.tolist()
            for key, right, length in zip(
                call.without_pages().key, plain.key, lengths, strict=True
            ):
                assert torch.equal(key[:, :length], right[:, :length])


def test_a_pair_s_time_is_relative_to_the_plain_call_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ratios are computed per round, for cores too; unsupported calls have no line."""
    plain = random_call(q_len=8, kv_len=8, is_causal=True)
    # In a window of two keys, 15 of the 36 causal pairs are visible.
    calls = {
        "plain-window": replace(plain, variant=AttentionVariant(True, (1, None))),
        "plain-cap": replace(plain, variant=AttentionVariant(softcap=5.0)),
    }
    kernel = Kernel(
        "one",
        lambda *args, **options: torch.empty(0),
        prepare=lambda call: lambda: torch.empty(0),
        features=frozenset({"window"}),
    )
    ms = {
        ("plain", "drop-in"): (3.6, 7.2, 3.6),
        ("plain-window", "drop-in"): (3.0, 3.0, 1.5),
        ("plain", "core"): (3.6, 3.6, 3.6),
        ("plain-window", "core"): (1.5, 1.5, 1.5),
    }

    def timed(candidates: Any, *_: Any) -> dict[Any, Any]:
        assert candidates.keys() == ms.keys()
        return {key: SimpleNamespace(ms=ms[key]) for key in candidates}

    monkeypatch.setattr(per_pair, "timed", timed)
    monkeypatch.setattr(per_pair, "select", lambda names: ([kernel], {}))
    found = list(per_pair.compare("plain", plain, calls, "one", torch.device("cpu")))
    assert [(line["call"], line["beside"], line["part"]) for line in found] == [
        ("plain-window", "plain", "drop-in"),
        ("plain-window", "plain", "core"),
    ]
    # A visible pair takes 2, 1 and 1 times as long with the window as without it.
    assert [line["time per pair"] for line in found] == pytest.approx([1.0, 1.0])
    assert (found[0]["low"], found[0]["high"]) == pytest.approx((1.0, 2.0))
    assert found[0]["pairs"] * 36 == found[0]["plain, pairs"] * 15
