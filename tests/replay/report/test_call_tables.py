"""Tables of 80 columns are complete and claim only measured results."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from replay.accuracy.errors import compare
from replay.report.call_tables import print_report
from replay.report.cells import cell, speedup_text
from replay.report.groups import common_and_own, group_rows
from replay.report.matrix_table import print_first_screen
from replay.report.pooled import pooled_speedup
from replay.report.ranking import rank
from replay.report.replay_tables import _busy
from replay.rows.errors_of_output import Errors, Where
from replay.rows.row import CallFacts, Energy, GpuState, KernelId, Mask, Row, Status
from replay.timing.statistics import paired_speedup, summarize
from tests import factories
from tests.factories import accuracy, speedup, speedup_over
from tests.factories import call_facts as call
from tests.printed import printed

WIDTH = 80


def off_by(size: float, where: tuple[int, int, int] = (0, 0, 0)) -> Errors:
    """Return the errors of an output that is off by `size` in one row."""
    reference = torch.ones(2, 3, 4, 8)
    output = reference.clone()
    output[where] += size
    return compare(output, reference)


def row(
    kernel: str,
    facts: CallFacts,
    ms: Sequence[float] = (1.0, 1.0, 1.0),
    *,
    status: Status = "ok",
    against: Sequence[float] | None = None,
    error: Errors | None = None,
    **fields: Any,
) -> Row:
    """Return a row with all figures; `against` holds the baseline's times in these rounds."""
    if status in ("ok", "inaccurate"):
        fields |= dict.fromkeys(("tflops", "gb_per_s", "flop_per_byte"), 123.456)
        fields |= {"first_call_ms": 1234.5678, "peak_bytes": 10**9}
        fields |= {"burst_ms": 1234.5678, "sustained_ms": 1234.5678}
        fields |= {"energy": Energy(123456.7, 1.234567, 690.5, 1.0)}
        fields |= {"gpu_during": GpuState(1980, 690.5, 61, (), 2619)}
        fields["accuracy"] = accuracy(error or off_by(1e-3), noise_floor=off_by(1e-4))
    if against is not None:
        fields["speedup"] = speedup_over("base", paired_speedup(against, ms))
    timed = ms if status in ("ok", "inaccurate") else None
    return factories.row(kernel, facts, timed, status, **fields)


def report(
    rows: Sequence[Row], metrics: Sequence[str] = ("all",), *, per_call: bool = False
) -> str:
    return printed(print_report, rows, width=WIDTH, metrics=metrics, per_call=per_call)


def unwrapped(text: str) -> str:
    return re.sub(r"\s+", "", text)


def kernels_in_order(text: str, names: Sequence[str]) -> list[str]:
    """Return the names in the order in which they first begin a line."""
    found = {name: re.search(rf"^{re.escape(name)}\b", text, re.MULTILINE) for name in names}
    present = {name: match.start() for name, match in found.items() if match}
    return sorted(present, key=lambda name: present[name])


def test_names_cannot_act_on_the_terminal() -> None:
    """Neither Rich's markup nor control characters in a recording's names have an effect."""
    facts = call("evil\x1b[2J", module="layers\n.0", model="\x1b[31mmodel[/]", weights="\x07[b]w")
    text = report([row("[red]kernel[/red]", facts), row("other", facts)])
    assert "[red]kernel[/red]" in text
    assert " [31mmodel[/]" in text
    assert "weights:  [b]w" in text
    assert all(line.isprintable() for line in text.splitlines())
    assert len(text.splitlines()) == len(text.split("\n")) - 1


def test_lines_fit_the_terminal_and_keep_whole_names() -> None:
    kernel = "hub:some-organisation/a-very-long-kernel-name-with-every-option-spelled-out-fp8-e4m3"
    module = "transformer.transformer_blocks." + "a_module_with_a_long_name." * 5 + "attn1"
    facts = [call(f"call-{number}", module=module, kv_len=64 + number) for number in range(2)]
    rows = []
    for each in facts:
        rows += [
            row("base", each),
            row(kernel, each, (2.0, 2.0, 2.0), against=(1.0, 1.0, 1.0)),
            row(f"{kernel}-2", each, status="inaccurate", reason="max abs error 3 exceeds 1"),
            row(f"{kernel}-3", each, status="error", reason="word " * 60),
        ]
    for per_call in (False, True):
        text = report(rows, per_call=per_call)
        assert max(map(len, text.splitlines())) <= WIDTH
        assert "…" not in text.replace("64…", "")
        # A long cell is folded; its parts are in the first columns of consecutive lines.
        firsts = unwrapped("".join(line[:30] for line in text.splitlines()))
        assert kernel[:12] in firsts
        for suffix in ("-2:", "-3:"):
            assert unwrapped(f"{kernel}{suffix}") in unwrapped(text)
        assert unwrapped(module) in unwrapped(text)


def test_the_worst_call_is_named() -> None:
    rows = [
        row("base", call("a")),
        row("base", call("b", module="layers.7", step=3)),
        row("mine", call("a"), status="inaccurate", reason="small", error=off_by(0.1)),
        row(
            "mine",
            call("b", module="layers.7", step=3),
            status="inaccurate",
            reason="max abs error 9 exceeds 1",
            error=off_by(9.0, (1, 2, 3)),
        ),
    ]
    text = " ".join(report(rows).split())
    assert "max abs error 9 exceeds 1; worst at step 3 layers.7, batch 1 head 2" in text
    where = Where(0.9, 0.002, (1, 2), (64, 127), ((0.002, 0.9),))
    rows[3] = replace(rows[3], accuracy=replace(rows[3].accuracy, where=where))
    text = " ".join(report(rows).split())
    assert "batch 1 head 2, queries 64-127: relative L1 0.9, typically 0.002" in text


@pytest.mark.parametrize(
    "fault", [{"status": "inaccurate", "reason": "exceeds"}, {"flags": ("unconfirmed: …",)}]
)
def test_incorrect_and_unconfirmed_kernels_are_listed_last(fault: dict[str, Any]) -> None:
    times = {"quick-zeros": 0.1, "base": 1.0, "mine": 0.5}
    rows = [row(name, call(), (ms,) * 6) for name, ms in times.items()]
    rows[0] = replace(rows[0], **fault)
    for table in report(rows).split("kernel")[1:3]:
        assert kernels_in_order(table, list(times)) == ["mine", "base", "quick-zeros"]


def test_class_and_share_are_shown_where_kernels_differ_in_them() -> None:
    sparse = row("few", call(), (0.1,) * 3, reason="on the keys it chose, …", kept=0.02)
    rows = [
        replace(row("base", call()), accuracy_class="exact"),
        replace(row("sage", call(), (0.1,) * 3), accuracy_class="quantised"),
        replace(sparse, accuracy_class="sparse"),
    ]
    text = report(rows)
    assert re.search(r"^kernel .* class +kept +verdict", text, re.MULTILINE)
    assert re.search(r"^sage .* quantised +- +ok", text, re.MULTILINE)
    assert re.search(r"^few .* sparse +0\.02 +ok", text, re.MULTILINE)
    assert "few: errors are relative to attention to all keys; verdict: on the keys" in text
    assert not {"class", "kept"} & set(report(rows[:1]).split())


def test_titles_of_kinds_hold_what_differs() -> None:
    kinds = [
        call("a", model="flux · v2"),
        call("c", kv_len=128),
        call("e", kv_len=128, is_causal=True),
        call("m", kv_len=128, mask=Mask("bool", (1, 1, 64, 128))),
        call("f", kv_len=256, weights="seed 1"),
        call("g", kv_len=256, weights="seed 2"),
    ]
    rows = [row("base", each) for each in kinds]
    assert common_and_own(group_rows(rows)) == (
        "denoise · bfloat16 · step 0 layers.0 · 1 call",
        [
            "flux · v2 · 1×2×64×32 · no mask",
            "model · 1×2×64/128×32 · no mask",
            "model · 1×2×64/128×32 · causal",
            "model · 1×2×64/128×32 · bool 1×1×64×128 mask",
            "model · 1×2×64/256×32 · no mask · seed 1",
            "model · 1×2×64/256×32 · no mask · seed 2",
        ],
    )
    rows = [row("base", call(name, module="")) for name in ("h", "i")]
    assert common_and_own(group_rows(rows, per_call=True))[1] == ["h", "i"]


def test_few_rounds_are_shown() -> None:
    few = report([row("base", call(), (1.0,) * 9), row("mine", call(), (1.0,) * 30)], ["time"])
    heading, base, mine = (line.split() for line in few.splitlines()[2:5])
    assert heading[-1] == "n"
    assert {line[0]: line[-1] for line in (base, mine)} == {"base": "9", "mine": "-"}
    enough = report([row("base", call(), (1.0,) * 10)], ["time"])
    assert "n" not in enough.splitlines()[2].split()


def test_rounds_of_two_processes_are_not_paired() -> None:
    """The row `alone` compares with the baseline in its own process, not the baseline's row."""
    calls = [call(name) for name in ("a", "b", "c")]
    rows = []
    for facts, beside in zip(calls, (1.0, 2.0, 3.0), strict=True):
        rows += [
            row("base", facts, (1.0,) * 6),
            row("mine", facts, (0.4,) * 6, against=(1.0,) * 6),
            row("alone", facts, (0.5,) * 6, against=(beside,) * 6, process="alone"),
        ]
    (group,) = group_rows(rows)
    mine, alone = KernelId("mine"), KernelId("alone")
    assert pooled_speedup(group, alone) == speedup(4.0, 4.0, 4.0)
    assert pooled_speedup(group, mine) == speedup(2.5, 2.5, 2.5)
    assert pooled_speedup(group, mine, over=alone) is None
    assert pooled_speedup(group, alone, over=mine) is None


def test_training_times_rank_kernels_where_backward_was_measured() -> None:
    both = {"base": 4.0, "mine": 2.0}
    rows = [
        row(name, call(), (ms,) * 6, both_ms=summarize([both[name]] * 6), against=against)
        for name, ms, against in (("base", 1.0, None), ("mine", 2.0, (1.0,) * 6))
    ]
    (group,) = group_rows(rows)
    mine = KernelId("mine")
    assert pooled_speedup(group, mine) == speedup(2.0, 2.0, 2.0)
    assert pooled_speedup(group, mine, field="time_ms") == speedup(0.5, 0.5, 0.5)
    assert min(group.rows, key=lambda name: rank(group, name)) == mine
    assert cell("both_speedup.ratio", group, mine).startswith("2.00×")
    assert cell("speedup.ratio", group, mine).startswith("0.50×")
    assert "base 4 ms forward and backward" in printed(print_first_screen, rows, heading="")


def test_no_table_shows_what_was_not_measured() -> None:
    rows = [row("base", call(), (1.0,) * 6), row("mine", call(), (2.0,) * 6, against=(1.0,) * 6)]
    shown = report(rows)
    assert not {"backward", "both"} & set(shown.split())
    assert re.search("^base .* baseline", shown, re.MULTILINE)
    assert re.search(r"^mine .* 0\.50× \(0\.50-0\.50\)", shown, re.MULTILINE)
    nothing = dict.fromkeys(("energy", "burst_ms", "sustained_ms", "gpu_during"))
    without = report([replace(each, **nothing) for each in rows], ["energy"])
    assert not re.search(r"^kernel *$", without, re.MULTILINE)


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (1.003, 1.2, "1.010× (1.003-1.200)"),
        (0.8, 0.9996, "1.0100× (0.8000-0.9996)"),
        (1.0000001, 1.2, "1.0100× (1.0000-1.2000)"),
        (1.21, 1.3, "1.01× (1.21-1.30)"),
        (0.99, 1.02, "1.01× same"),
        (0.99, 1.2, "1.01× ? (0.99-1.20)"),
        (0.01, 123.4, "1.01× ? (0.01-123)"),
        (0.9996, 1.2, "1.01× ? (1.00-1.20)"),
    ],
)
def test_interval_reads_as_a_tie_only_if_it_is_one(low: float, high: float, text: str) -> None:
    assert speedup_text(speedup(1.01, low, high)) == text
    few = replace(speedup(), low=None, high=None, reason="too-few-rounds")
    assert speedup_text(few) == "too few rounds"


def test_decode_calls_of_very_different_caches_are_apart() -> None:
    """A kernel that is faster at 16 keys and slower at 32,768 keys has no common speed-up."""
    lengths = (32768, 16, 17, 32, 33, 30000)
    rows = [row("base", call(f"d{each}", phase="decode", kv_len=each)) for each in lengths]
    groups = group_rows(rows)
    found = [sorted(each.shape.kv_len for each in group.calls) for group in groups]
    assert found == [[30000, 32768], [16, 17, 32], [33]]


def test_decode_calls_with_a_growing_cache_are_one_group() -> None:
    rows = [row("base", call(f"d{n}", phase="decode", kv_len=n)) for n in (65, 66, 80)]
    groups = group_rows(rows)
    assert len(groups) == 1
    assert "65…80" in groups[0].title
    assert "3 calls" in groups[0].title
    prefill = [row("base", call(f"p{length}", kv_len=length)) for length in (65, 66)]
    assert len(group_rows(prefill)) == 2
    assert len(group_rows(rows, per_call=True)) == 3
    assert [group.title.count("layers.0") for group in group_rows(rows, per_call=True)] == [1] * 3


def test_metrics_choose_columns() -> None:
    rows = [row("base", call())]
    headings = {
        "time": "time ms",
        "throughput": "TFLOPS",
        "bandwidth": "GB/s",
        "arithmetic_intensity": "FLOP/B",
        "accuracy": "cosine",
        "memory": "peak MB",
    }
    everything = report(rows)
    for metric, heading in headings.items():
        text = report(rows, [metric])
        assert heading in text
        assert heading in everything
        assert not any(other in text for other in headings.values() if other != heading)


def test_kernels_that_did_not_run_have_a_reason() -> None:
    rows = [
        row("base", call()),
        row("picky", call(), status="unsupported", reason="head_dim 72"),
        row("fussy", call(), status="unsupported", reason="head_dim 80"),
        row("fussy", call(name="b"), status="unsupported", reason="head_dim 88"),
        row("careless", call(), changed_inputs=("key",), flags=("no core time",)),
        row("picky", call(name="b"), flags=("no core time",)),
    ]
    text = report(rows)
    assert "picky, fussy: unsupported: head_dim 72" in text
    assert "careless: changes its key" in text
    assert "careless, picky: no core time" in text
    assert "noise floor: rel L1" in text


def test_kernel_that_spoils_later_calls_is_marked() -> None:
    rows = []
    for phase in ("decode", "denoise"):
        facts = replace(call(), phase=phase)
        rows += [row("base", facts), row("careless", facts, (0.5,) * 3, against=(1.0,) * 3)]
        rows[-1] = replace(rows[-1], changed_inputs=("key",))
    text = report(rows)
    assert text.count("careless: changes its key, which later calls read again") == 1
    assert text.count("careless: changes its key") == 2


def test_kernels_that_ran_without_the_mask_are_marked() -> None:
    facts = call("a", mask=Mask("bool", (1, 1, 64, 64)), mask_structure="window 15/0")
    other = call("b", mask=Mask("bool", (1, 1, 64, 64)))
    rows = [
        row("base", facts, (2.0,) * 9),
        row("fast", facts, (1.0,) * 9, against=(2.0,) * 9, restated_as="window 15/0"),
        row("base", other),
    ]
    assert len(group_rows(rows)) == 2
    text = " ".join(report(rows).split())
    assert "bool 1×1×64×64 mask = window 15/0 ·" in text
    assert "mask rewritten as window 15/0: fast" in text


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([factories.row(ms=[1.0] * 10), factories.row(status="error")], ""),
        (
            [factories.row(ms=1.0, processor_share=0.4)] * 2,
            "kernels waited for a processor 60% of the time",
        ),
        (
            [replace(factories.row(), time_ms=summarize([1.0] * 10, range(4)))],
            "40% of the samples were interrupted",
        ),
    ],
)
def test_heading_tells_how_busy_the_machine_was(rows: list[Row], words: str) -> None:
    assert _busy(rows) == (f" · busy machine: {words}" if words else "")
