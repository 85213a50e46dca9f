"""Tests of charts: their contents, their files, and names that are never markup."""

import json
import logging
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from capture.call.shape import Shape
from capture.text.printable import printable
from replay.report.charts.chart import Chart
from replay.report.charts.chart_files import charts, write_plots
from replay.report.charts.models import model_charts
from replay.report.charts.sweeps import MOST_LINES, sweep_charts
from replay.report.groups import group_rows
from replay.report.pooled import pooled_speedup
from replay.rows.row import CallFacts, KernelId, Machine, Row
from tests.factories import accuracy, call_facts, errors, row, speedup, speedup_over

H200 = Machine("NVIDIA H200")
HOSTILE = '<script>alert("x")</script> & {{datum.x}}\x00\x1b\u202e'


def random_facts(length: int, *, dim: int = 64, causal: bool = False, q_len: int = 0) -> CallFacts:
    facts = call_facts(f"{length}-{dim}-{causal}", "", "synthetic", is_causal=causal)
    return replace(facts, model="sage", shape=Shape(4, 32, 32, q_len or length, length, dim, dim))


def swept(kernel: str = "fast", ms: float = 2.0, **shape: Any) -> list[Row]:
    """Return a kernel's rows at two lengths, 1k and 2k."""
    return [
        row(
            kernel,
            random_facts(length, **shape),
            ms=ms * times,
            tflops=600 / ms / times,
            gb_per_s=50.0,
            machine=H200,
            accuracy_class="exact",
        )
        for length, times in ((1024, 1.0), (2048, 3.0))
    ]


def in_a_model(kernel: str, ratio: float = 1.5, layers: int = 3, **fields: Any) -> list[Row]:
    """Return a row of the kernel and one of the baseline for each layer `blocks.N.attn`."""
    found = []
    for layer in range(layers):
        facts = call_facts(f"call {layer}", f"blocks.{layer}.attn", call_index=layer)
        found += [
            row("torch-default", facts, ms=[3.0] * 8, machine=H200, accuracy_class="exact"),
            row(
                kernel,
                facts,
                **{
                    "ms": [3.0 / ratio] * 8,
                    "speedup": speedup_over(against=speedup(ratio, ratio, ratio)),
                    "accuracy": accuracy(errors(relative_l1=0.01 * (layer + 1))),
                    "accuracy_class": "quantised",
                    "machine": H200,
                    **fields,
                },
            ),
        ]
    return found


def values(chart: Chart) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chart.spec["data"]["values"]
    return found


def words(svg: Path) -> list[str]:
    root = ElementTree.fromstring(svg.read_text("utf-8"))
    return ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]


def test_a_sweep_has_the_figures_of_its_rows() -> None:
    rows = [*swept(dim=64), *swept(dim=128, causal=True), *swept("slow", 6.0)]
    times = row(ms=[1.0, 2.0, 2.0, 2.0, 4.0]).time_ms  # bars reach over 80 % of them
    rows = [replace(each, time_ms=times) for each in rows]
    (chart,) = sweep_charts(rows)
    assert chart.name == "sweep-sage-bfloat16-b-4-h-32-nvidia-h200"
    assert chart.spec["title"]["text"] == "NVIDIA H200"
    assert chart.spec["facet"]["sort"] == ["head_dim 64, not causal", "head_dim 128, causal"]
    figures = {(each["panel"], each["kernel"], each["length"]): each for each in values(chart)}
    assert len(figures) == len(rows)
    for of_row in rows:
        facts = of_row.call
        panel = f"head_dim {facts.shape.head_dim}, {'causal' if facts.is_causal else 'not causal'}"
        each = figures[panel, of_row.kernel, f"{facts.shape.kv_len // 1024}k"]
        assert each["value"] == of_row.tflops
        assert each["low"] == pytest.approx(of_row.tflops * 2.0 / times.p90)
        assert each["high"] == pytest.approx(of_row.tflops * 2.0 / times.p10)


def test_decoding_is_shown_by_bandwidth_and_machines_apart() -> None:
    elsewhere = [replace(each, machine=Machine("NVIDIA H100")) for each in swept()]
    found = list(sweep_charts([*swept(), *swept(q_len=1), *elsewhere]))
    assert [chart.name for chart in found] == [
        "sweep-sage-bfloat16-b-4-h-32-nvidia-h200",
        "sweep-sage-decode-bfloat16-b-4-h-32-nvidia-h200",
        "sweep-sage-bfloat16-b-4-h-32-nvidia-h100",
    ]
    assert {each["value"] for each in values(found[1])} == {50.0}


def test_a_kernel_that_is_incorrect_once_is_named_and_not_shown() -> None:
    right, wrong = swept("wrong", 0.1)
    (chart,) = sweep_charts([*swept(), right, replace(wrong, status="inaccurate")])
    assert {each["kernel"] for each in values(chart)} == {"fast"}
    assert "incorrect and not shown: wrong" in chart.spec["title"]["subtitle"]
    *right, wrong = in_a_model("wrong")
    assert list(model_charts([*right, replace(wrong, status="inaccurate")])) == []


def test_fastest_of_many_kernels_are_shown_first() -> None:
    rows = [each for place in range(12) for each in swept(f"kernel-{place}", 12.0 - place)]
    (chart,) = sweep_charts(rows)
    shown = chart.spec["spec"]["encoding"]["color"]["scale"]["domain"]
    assert shown == [f"kernel-{place}" for place in range(11, 11 - MOST_LINES, -1)]
    assert {each["kernel"] for each in values(chart)} == set(shown)
    assert f"the fastest {MOST_LINES} of 12 correct kernels" in chart.spec["title"]["subtitle"]


def test_the_baseline_of_another_environment_is_not_a_line_of_its_own() -> None:
    there = [replace(each, environment="fa4") for each in [*swept("base"), *swept()]]
    there[2:] = [replace(each, speedup=speedup_over("base")) for each in there[2:]]
    (chart,) = sweep_charts([*swept("base"), *there])
    assert {each["kernel"] for each in values(chart)} == {"base", "fast@fa4"}


def test_a_model_has_the_speedups_of_the_tables() -> None:
    rows = [*in_a_model("slow", 0.5), *in_a_model("fast", 2.0)]
    rows = [
        replace(each, time_ms=row(ms=[3.0, 3.1, 2.9, 3.2, 2.8, 3.3, 3.0, 2.7]).time_ms)
        if each.kernel == "torch-default"
        else each
        for each in rows
    ]
    (chart,) = model_charts(rows)
    assert chart.name == "speedup-model-nvidia-h200"
    (group,) = group_rows(rows)
    (panel,) = chart.spec["vconcat"]
    assert [each["kernel"] for each in panel["data"]["values"]] == ["fast", "slow"]
    for each in panel["data"]["values"]:
        pooled = pooled_speedup(group, KernelId(each["kernel"]))
        assert pooled.low < pooled.ratio
        assert (each["ratio"], each["low"], each["high"]) == (pooled.ratio, pooled.low, pooled.high)


def everything(name: str = "mine") -> list[Row]:
    rows = [*swept(), *swept("slow", 6.0), *swept(q_len=1), *in_a_model("mine")]
    return [
        replace(
            each,
            kernel=each.kernel.replace("mine", name),
            machine=Machine(f"H200 {name}"),
            call=replace(
                each.call,
                model=f"model {name}",
                weights=name,
                module=each.call.module and f"{each.call.module}{name}",
                phase=each.call.phase if each.call.phase == "synthetic" else name,
                dtype=f"bfloat16{name}",
            ),
        )
        for each in rows
    ]


def test_every_chart_has_three_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("vl_convert")
    caplog.set_level(logging.WARNING)
    rows = everything()
    written = write_plots(rows, tmp_path / "made" / "here")
    names = [chart.name for chart in charts(rows)]
    assert len(names) == 3
    assert [path.name for path in written] == [
        f"{name}{suffix}" for name in names for suffix in (".vl.json", ".svg", ".png")
    ]
    assert caplog.messages == [], "Vega-Lite warns of what it does not understand"
    for path in written:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
        if path.suffix == ".json":
            assert json.loads(path.read_text("utf-8"))["$schema"].startswith("https://vega.github")
    sweep = words(tmp_path / "made" / "here" / f"{names[0]}.svg")
    assert {"TFLOPS", "sequence length", "1k", "2k", "fast", "slow"} <= set(sweep)
    model = words(tmp_path / "made" / "here" / f"{names[2]}.svg")
    assert {"1.50×", "speed-up over torch-default"} <= set(model)


def test_names_from_a_recording_stay_text(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    written = write_plots(everything(HOSTILE), tmp_path)
    assert len(written) == 9
    assert all(path.parent == tmp_path for path in written)
    pictures = [path for path in written if path.suffix == ".svg"]
    for path in pictures:
        assert f"H200 {printable(HOSTILE).strip()}" in " ".join(words(path))
        kinds = {each.tag.rpartition("}")[2] for each in ElementTree.parse(path).iter()}
        assert kinds.isdisjoint({"script", "a", "image", "foreignObject"})
    for each in charts(everything(HOSTILE)):
        text = json.dumps(each.spec, ensure_ascii=False)
        assert text.isprintable()
        assert "\\u00" not in text


def test_charts_with_like_names_have_files_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    rows = [
        replace(each, call=replace(each.call, model=model))
        for model in ("org/model", "org model")
        for each in in_a_model("mine", layers=1)
    ]
    written = write_plots(rows, tmp_path)
    assert len(set(written)) == len(written) == 2 * 3
    assert tmp_path / "speedup-org-model-nvidia-h200-2.svg" in written
    titles = {json.loads(path.read_text())["title"]["text"] for path in tmp_path.glob("*.json")}
    assert titles == {row.call.model for row in rows}
