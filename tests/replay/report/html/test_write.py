"""Tests of the report's file: its contents, its size, and invalid requests."""

import base64
import gzip
import html
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from replay.end_to_end.saved_outputs import safe_name
from replay.plan.plan import Budget
from replay.report.html import outputs as saved
from replay.report.html.data import page_data
from replay.report.html.model import answers, model_data
from replay.report.html.page_writer import ReportError, write_html
from replay.report.matrix import matrix
from replay.rows.errors_of_output import GradientErrors, Gradients, Where
from replay.rows.row import Row
from tests import factories
from tests.replay.report.html import pages

pytest.importorskip("vl_convert", reason="a report requires vl-convert-python")


def data_of(page: str) -> dict[str, Any]:
    packed = re.search(r'<script type="text/plain" id="data">([^<]*)</script>', page)
    text = gzip.decompress(base64.b64decode(packed[1]))
    found: dict[str, Any] = json.loads(text, parse_constant=_no_json)
    return found


def _no_json(constant: str) -> None:
    raise ValueError(f"browsers refuse {constant} in JSON")


@pytest.fixture(scope="module", autouse=True)
def _stub_library() -> Iterator[None]:
    """Replace the chart library, which takes seconds to bundle; tests of the command use it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("replay.report.html.chart_library.bundle", lambda: "library")
        yield


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("page") / "out.html"
    rows = [*pages.rows(), *pages.rows(3, 2, model=pages.HOSTILE)]
    checks = pages.checks("kernel-2", "kernel-1")
    write_html(
        rows,
        out,
        checks=checks,
        summary="no plan is faster at a < b",
        command="replay report rows.jsonl",
    )
    return out.read_text("utf-8")


def test_answer_matrix_and_foot_stand_there_without_any_script(page: str) -> None:
    shown = html.unescape(re.sub("<[^>]+>", " ", page.partition("<header>")[2]))
    order = [
        "No plan is faster at a < b",
        "model, one full run, from prompt to output: kernel-1 1.20× (1.18-1.22), predicted 1.21×; "
        "output: PSNR 41.2 dB, SSIM 0.993",
        "model, one denoising step: kernel-1 1.20×",
        "kernel-4: 1.40× in ",
        "kernel-3  quantised  1.30×",
        "kernel-5  quantised  ✗",
        "✗  kernel-2, kernel-5: cosine 0.8 is below 0.99",
        "by  replay report rows.jsonl , attention-replay ",
        "device NVIDIA H200 · torch 2.11.0",
        "SM clock 1500 to 1507 MHz",
    ]
    at = [re.sub(r"\s+", " ", shown).find(re.sub(r"\s+", " ", text)) for text in order]
    assert -1 not in at
    assert re.findall(r'<(\w+) class="[^"]*scripted"[^>]* hidden', page) == [
        "span",
        "div",
        "section",
    ]
    assert at == sorted(at)


def test_a_name_that_is_markup_stays_text(page: str) -> None:
    assert pages.HOSTILE not in page
    assert html.escape(pages.HOSTILE) in page
    assert data_of(page)["groups"][1]["model"] == pages.HOSTILE
    curves = {each["kernel"] for each in data_of(page)["models"]["model"]["losses"]}
    assert curves == {"the model's own, kernel-2"}  # kernel-1 has a single loss
    tags = re.findall(r"<(?:img|script)[^>]*>", page)
    plain = '<script type="text/plain" id="{}">'
    assert tags == [plain.format("data"), plain.format("library"), "<script>"]


def test_curves_of_a_line_width_share_one_line() -> None:
    checks = pages.checks("near", "far")
    for each, offset in zip(checks, (0.0, 0.004, 0.006), strict=True):
        each["curves"]["loss"] = [3.0, 2.0 + offset, math.nan]
    losses = model_data(checks)["losses"]
    assert [each["kernel"] for each in losses] == ["the model's own, near"] * 3 + ["far"] * 3
    assert [each["loss"] for each in losses[3:]] == [3.0, 2.006, None]
    assert {each["kernel"] for each in model_data(checks[:2])["losses"]} == {"all kernels"}


def test_wrong_training_is_marked_and_recommended_nowhere() -> None:
    own, _, wrong = checks = pages.checks("right", "wrong")
    for each in checks:
        each["steps"] = 4
    wrong["wrong"] = "grad_key is wrong"
    *_, last = model_data(checks)["kernels"]
    assert (last["status"], last["reason"]) == ("trains wrongly", "grad_key is wrong")
    assert own["measured"]["run"]["seconds"] == 0.1
    assert [each["ms/step"] for each in model_data(checks)["kernels"]] == [25.0, 22.727, 20.833]
    run, *_ = answers(checks)
    assert run.startswith("one full run of 4 training steps: right 1.10×")


def test_foretold_shares_are_those_of_the_check() -> None:
    checks = pages.checks("kernel-1", "kernel-2", "kernel-3")
    checks[2]["foretold"] = pages.foretold()
    unmapped = ("columns", "by_place")  # an older check lacks them
    old = {name: each for name, each in pages.foretold().items() if name not in unmapped}
    checks[3]["foretold"] = old
    (found,) = model_data(checks)["foretold"]
    assert found["name"] == "kernel-2"
    assert found["error"] == "PSNR 41.0 dB (± 0.5 dB)"
    assert (found["axis"], found["columns"]) == ("phase or denoising step", ["encode", "0", "1"])
    assert found["shares"]["blocks.1.attn"] == [None, 0.15, -0.005]
    checks[2]["foretold"]["columns"] = ["prefill", "decode"]
    assert model_data(checks)["foretold"][0]["axis"] == "phase"


def test_page_forbids_network_requests(page: str) -> None:
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    rules = dict(part.split(maxsplit=1) for part in policy[1].split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    assert not {"connect-src", "font-src", "frame-src"} & rules.keys()
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)


def test_figures_are_those_of_the_rows() -> None:
    rows = pages.rows()
    data = page_data(rows, matrix(rows), None)
    assert data["rows"]["name"] == [str(row.id) for row in rows]
    assert data["rows"]["time_ms.p50"] == [
        pytest.approx(row.time_ms.p50, rel=1e-4) for row in rows if row.time_ms
    ]
    slowest = next(each for each in data["pooled"] if each["kernel"] == "kernel-1")
    assert slowest["ratio"] == pytest.approx(1.1, rel=0.01)
    assert slowest["error"] == pytest.approx(1e-5)
    assert slowest["of_tolerance"] == pytest.approx(1e-5 / pages.LIMITS[1])
    assert data["groups"][0]["tolerance"] == pytest.approx(pages.LIMITS[0])
    wrong = next(each for each in data["pooled"] if each["kernel"] == "kernel-5")
    assert (wrong["correct"], wrong["status"]) == (False, "inaccurate")


def test_worst_gradient_is_drawn_in_place_of_a_right_output() -> None:
    where = Where(0.5, 0.01, (0, 1), (2, 3), ((0.01, 0.01), (0.01, 0.5)))
    right, wrong = GradientErrors(0.5, 1e-4, 1e-4), GradientErrors(20.0, 0.25, 0.1, where)
    rows = [
        factories.row("torch-default", accuracy=factories.accuracy(tolerance_ratio=0.1)),
        factories.row(
            "mine",
            status="inaccurate",
            accuracy=factories.accuracy(tolerance_ratio=0.1, where=where),
            gradients=Gradients(right, wrong, right),
        ),
    ]
    data = page_data(rows, matrix(rows), None)
    assert (data["rows"]["of"], data["rows"]["units"]) == (["output", "grad_key"], [0.1, 20.0])
    assert (data["rows"]["error"][1], data["rows"]["positions"][1]) == (0.25, 64)
    assert data["fields"][0] is None
    assert [len(line) for line in data["fields"][1]] == [2, 2]


def test_nonfinite_figures_are_missing(tmp_path: Path) -> None:
    nan = float("nan")
    rows = [
        replace(
            row,
            time_ms=row.time_ms and replace(row.time_ms, p10=nan, p50=nan, p90=nan),
            accuracy=factories.accuracy(factories.errors(relative_l1=nan, cosine=nan)),
        )
        for row in pages.rows(3, 2)
    ]
    write_html(rows, tmp_path / "out.html", checks=pages.checks("kernel-1"))
    data = data_of((tmp_path / "out.html").read_text("utf-8"))
    assert {each["error"] for each in data["pooled"]} == {None}
    assert {each["p50"] for each in data["pooled"]} == {None}
    losses = [each["loss"] for each in data["models"]["model"]["losses"]]
    assert losses == [3.25, 2.5, 2.25, None]


def test_errors_are_drawn_in_the_budgets_metric() -> None:
    rows = pages.rows()
    data = page_data(rows, matrix(rows), Budget("cosine", 0.9995))
    assert data["budget"]["limit"] == pytest.approx(5e-4)
    found = {each["kernel"]: each["error"] for each in data["pooled"]}
    assert found["kernel-3"] == pytest.approx(1e-3)


def test_unavailable_kernels_are_named_once(tmp_path: Path) -> None:
    rows = [replace(row, kernel=row.kernel.replace("-1", ".py:k")) for row in pages.rows(2, 3)]
    absent = [
        replace(row, kernel="fa<3>", status="unavailable", reason="no wheel", accuracy=None)
        for row in rows[::2]
    ]
    write_html([*rows, *absent], tmp_path / "out.html")
    page = (tmp_path / "out.html").read_text("utf-8")
    assert page.count("fa&lt;3&gt;: no wheel") == 1
    assert '<th scope="row">kernel.<wbr>py:<wbr>k <' in page  # lines of a phone end there
    assert "fa<3>" not in data_of(page)["rows"]["name"]


def test_a_large_field_of_errors_keeps_its_worst_cells() -> None:
    rows = pages.rows(1, 1, heads=80)
    accuracy = rows[0].accuracy
    field = [[1e-5] * 64 for _ in range(80)]
    field[41][20] = 1e-1
    field[3][63] = float("nan")
    where = replace(accuracy.where, relative_l1=tuple(map(tuple, field)))
    rows[0] = replace(rows[0], accuracy=replace(accuracy, where=where))
    data = page_data(rows, matrix(rows), None)
    (cells,) = data["fields"]
    assert (len(cells), {len(line) for line in cells}) == (32, {32})
    levels = data["levels"]

    def error(cell: str) -> float:
        level: float = (ord(cell) - ord(levels["first"])) / levels["decade"]
        return levels["least"] * 10**level

    counted = sorted({error(cell) for line in cells for cell in line if cell != levels["nan"]})
    assert counted == [pytest.approx(1e-5), pytest.approx(1e-1)]
    assert [line.count(levels["nan"]) for line in cells] == [0, 1] + [0] * 30


def test_saved_pictures_and_texts_stand_side_by_side(tmp_path: Path) -> None:
    checks = pages.checks("kernel-1", "a/b.py:f", "nothing saved")
    for check in checks[:3]:
        place = tmp_path / "model" / safe_name(check["kernel"])
        place.mkdir(parents=True)
        for at in range(9):
            Image.new("RGB", (900, 600), (20 * at, 0, 0)).save(place / f"frame-{at:03d}.png")
        (place / "text.txt").write_text("<b>new tokens</b>\n")
    found = saved.saved_outputs(tmp_path, checks)["model"]
    assert [each["kernel"] for each in found] == ["the model's own", "kernel-1", "a/b.py:f"]
    assert [len(each["pictures"]) for each in found] == [3, 3, 3]
    assert all(url.startswith("data:image/jpeg;base64,") for url in found[0]["pictures"])
    assert found[2]["text"] == "<b>new tokens</b>\n"


def test_a_report_is_small(tmp_path: Path) -> None:
    """The limit is for 100 kernels × 50 calls, without the chart library of 0.4 MB."""
    few, more = tmp_path / "few.html", tmp_path / "more.html"
    write_html(pages.rows(2, 1, heads=48), few)
    write_html(pages.rows(10, 10, heads=48), more)
    growth = (more.stat().st_size - few.stat().st_size) / 98
    assert few.stat().st_size + 5000 * growth < 7.6e6


@pytest.mark.parametrize("rows", [[], [factories.unreadable()]])
def test_report_without_rows_is_refused(tmp_path: Path, rows: list[Row]) -> None:
    with pytest.raises(ReportError, match="replay a call first"):
        write_html(rows, tmp_path / "out.html")


def test_a_page_is_for_one_type_of_device(tmp_path: Path) -> None:
    rows = [
        replace(row, machine=replace(row.machine, device=device))
        for device in ("H100", "H200")
        for row in pages.rows(1, 1)
    ]
    with pytest.raises(ReportError, match="the rows are of H100 and H200, but a page is for one"):
        write_html(rows, tmp_path / "out.html")
    assert not list(tmp_path.iterdir())
