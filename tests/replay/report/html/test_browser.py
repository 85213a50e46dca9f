"""Tests of the report in a browser: its drawings, its controls, and its security."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from replay.plan.plan import Budget
from replay.report.html.page_writer import write_html
from tests.replay.report.html import pages
from tests.replay.report.html.browser import BROWSER, BROWSERS, Browser, started
from tests.replay.report.sweep_rows import sweep

pytest.importorskip("vl_convert", reason="a report requires vl-convert-python")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is installed"),
]

CHARTS = [
    *("tradeoff", "layer-error", "layer-speed", "times", "shapes", "roofline", "where"),
    *("span-0-0", "span-0-1", "foretold-0", "clock", "power", "temperature"),
]

LAYOUT = """
const inside = (inner, around) => inner.left >= around.left - 2
  && inner.right <= around.right + 2 && inner.top >= around.top - 2
  && inner.bottom <= around.bottom + 2;
const channels = (color) => color.match(/[\\d.]+/g)
  .map((each, at) => Number(each) * (at < 3 && color.startsWith("color(") ? 255 : 1));
const light = ([red, green, blue]) => [red, green, blue].map((each) => each / 255)
  .map((each) => (each <= 0.04 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4))
  .reduce((sum, each, at) => sum + each * [0.2126, 0.7152, 0.0722][at], 0);
const behind = (node) => {
  const [red, green, blue, alpha = 1] = channels(getComputedStyle(node).backgroundColor);
  return alpha === 1 || !node.parentElement ? [red, green, blue] : behind(node.parentElement);
};
const contrast = (node) => {
  const style = getComputedStyle(node);
  const chart = node.closest("svg");
  let color = channels(chart ? style.fill : style.color);
  if (chart && getComputedStyle(chart).filter !== "none") color = color.map((each) => 255 - each);
  const [dark, bright] = [light(color), light(behind(node))].sort((one, other) => one - other);
  return (bright + 0.05) / (dark + 0.05);
};
const box = (node) => node.getBoundingClientRect();
const isShown = (node) => node.checkVisibility({ opacityProperty: true });
const texts = [...document.querySelectorAll("body *")].filter((node) => isShown(node)
  && !["SCRIPT", "OPTION", "STYLE"].includes(node.tagName)
  && [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim()));
const drawn = texts.filter((node) => node.closest("svg"));
const layout = {
  tooWide: document.documentElement.scrollWidth > WIDTH,
  faint: texts.filter((node) => getComputedStyle(node).stroke === "none")  // others are outlines
    .filter((node) => contrast(node) < 4.5).map((node) => node.textContent),
  cut: drawn.filter((node) => !inside(box(node), box(node.closest("svg"))))
    .map((node) => node.textContent),
  clipped: [...document.querySelectorAll(".drawing svg")]
    .filter((chart) => box(chart).left < 0 || box(chart).right > WIDTH).length,
};
"""
"""Sentences about the whole page: texts that are faint or cut off, and charts that do not fit."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started() as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of three models; the name of one model is markup."""
    out = tmp_path_factory.mktemp("report") / "out.html"
    rows = [*pages.rows(12, 30), *pages.rows(3, 2, model=pages.HOSTILE)]
    rows += [
        row if row.kernel == "torch-default" else replace(row, kernel="a-library:its-long-name")
        for row in pages.rows(2, 2, model="other")
    ]
    checks = pages.checks("kernel-2", pages.HOSTILE)
    checks[1]["foretold"] = pages.foretold()
    command = f"replay report --kernels {','.join(['mine.py:attention'] * 20)}"
    write_html(rows, out, checks=checks, budget=Budget("cosine", 0.9995), command=command)
    return out


@pytest.mark.parametrize(
    ("width", "scheme", "media"),
    [
        (390, "light", ""),
        (390, "dark", ""),
        (900, "light", ""),
        (1400, "dark", ""),
        (718, "light", "print"),
        (718, "dark", "print"),
    ],
)
def test_all_charts_are_drawn_legibly_without_a_network(
    browser: Browser, page: Path, width: int, scheme: str, media: str
) -> None:
    seen = browser.opened(
        page,
        LAYOUT.replace("WIDTH", str(width))
        + """return {
            ...layout,
            marks: Object.fromEntries(CHARTS.map((id) => [id, marks(id)])),
            failure: $("failure").hidden,
            requests: performance.getEntriesByType("resource").map((entry) => entry.name),
            title: document.title, images: document.images.length,
            budget: $("tradeoff").textContent.includes("budget cosine ≥ 0.9995"),
            repeated: [...document.querySelectorAll("g.role-axis-label")].filter((axis) => {
              const texts = [...axis.querySelectorAll("text")];
              const labels = texts.map((text) => text.textContent).filter(Boolean);
              return new Set(labels).size < labels.length;
            }).map((axis) => axis.textContent),
        };""".replace("CHARTS", json.dumps(CHARTS)),
        width=width,
        scheme=scheme,
        media=media,
    )
    assert {id: count > 5 for id, count in seen.found["marks"].items()} == dict.fromkeys(
        CHARTS, True
    )
    assert seen.found["failure"] is True
    assert (seen.found["tooWide"], seen.found["clipped"]) == (False, 0)
    assert (seen.found["faint"], seen.found["cut"]) == ([], [])
    assert seen.found["budget"] is True
    assert seen.found["repeated"] == []
    assert seen.console == []
    assert seen.found["requests"] == []
    assert pages.HOSTILE in seen.found["title"]
    assert seen.found["images"] == 0


def test_rows_are_sorted_and_filtered(browser: Browser, page: Path) -> None:
    seen = browser.opened(
        page,
        """
        const before = [$("count").textContent, names().length, $("more").hidden];
        $("more").click();
        const all = names().length;
        await choose("filter", "kernel-11 inaccurate");
        const filtered = [names(), $("count").textContent];
        await choose("filter", "");
        const ratio = document.querySelector('#rows th[data-path="speedup.ratio"]');
        const button = ratio.querySelector("button");
        button.focus();
        button.click();
        const slowest = names()[0];
        const rising = ratio.getAttribute("aria-sort");
        button.click();
        const focused = document.activeElement === button;
        return { before, all, filtered, slowest, rising, fastest: names()[0], focused };
        """,
    )
    assert seen.found["before"] == ["370 of 370 rows", 200, False]
    assert seen.found["all"] == 370
    assert seen.found["filtered"] == [["kernel-11"], "1 of 370 rows"]
    assert (seen.found["slowest"], seen.found["rising"]) == ("kernel-1", "ascending")
    assert (seen.found["fastest"], seen.found["focused"]) == ("kernel-11", True)
    assert seen.console == []


def test_one_selection_holds_in_all_sections_and_in_the_address(
    browser: Browser, page: Path
) -> None:
    seen = browser.opened(
        page,
        """
        const chosen = () => [$("kind").value, $("kernel").value,
          document.querySelector('#matrix [aria-pressed="true"]').dataset.kernel,
          new Set(names(true)).size,
          new URLSearchParams(location.hash.slice(1)).get("kernel")];
        $("more").click();
        const first = chosen();
        const worst = $("call").selectedOptions[0].text;
        const ink = [...$("where").querySelectorAll(`path[fill="${colours().text}"]`)];
        const nonfinite = ink.filter((each) => each.__data__?.datum?.units === null).length;
        document.querySelector('#matrix [data-kernel="kernel-1"][data-kind="1"]').click();
        await pause();
        const kernels = [...$("kernel").options].map((option) => option.value);
        const labels = $("tradeoff").textContent;
        const cell = chosen();
        await choose("filter", "kernel-11 inaccurate");
        $("rows").tBodies[0].rows[0].click();
        await pause();
        const row = chosen();
        await choose("filter", "");
        const bars = [...$("times").querySelectorAll("path")];
        const bar = bars.find((path) => path.__data__?.datum?.kernel === "kernel-5");
        bar.dispatchEvent(new MouseEvent("click", { bubbles: true }));
        await pause();
        const mark = chosen();
        location.hash = "#kind=0&kernel=kernel-3&at=times-title";
        await pause();
        return { first, worst, nonfinite, cell, kernels, labels, row, mark, address: chosen() };
        """,
    )
    assert seen.found["first"] == ["1", "kernel-2", "kernel-2", 1, None]  # the worst wrong one
    assert seen.found["nonfinite"] == 1
    assert seen.found["worst"] == "kernel-2 · step 0 blocks.1.attn (250× its tolerance)"
    assert seen.found["kernels"] == ["kernel-1", "torch-default", "kernel-2"]  # the last is wrong
    assert "kernel-2" in seen.found["labels"]
    assert "kernel-10" not in seen.found["labels"]
    assert seen.found["cell"] == ["1", "kernel-1", "kernel-1", 1, "kernel-1"]
    assert seen.found["row"] == ["0", "kernel-11", "kernel-11", 1, "kernel-11"]
    assert seen.found["mark"] == ["0", "kernel-5", "kernel-5", 1, "kernel-5"]
    assert seen.found["address"][:3] == ["0", "kernel-3", "kernel-3"]
    assert seen.console == []


def test_a_chart_is_saved_as_svg_and_as_png(browser: Browser, page: Path) -> None:
    seen = browser.opened(
        page,
        """
        const saved = [];
        HTMLAnchorElement.prototype.click = function () { saved.push([this.download, this.href]); };
        for (const button of $("times").querySelectorAll(".save button")) button.click();
        await pause();
        return saved.map(([name, url]) => [name.slice(-4), url.slice(0, 5)]).sort();
        """,
    )
    assert seen.found == [[".png", "data:"], [".svg", "blob:"]]
    assert seen.console == []


def test_sections_without_content_are_absent(browser: Browser, tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    rows = [row for row in pages.rows(3, 3, on_gpu=False) if row.kernel != "kernel-2"]
    write_html(rows, out)
    seen = browser.opened(
        out,
        """return [...document.querySelectorAll("section")].filter((each) => each.hidden)
            .map((each) => each.getAttribute("aria-labelledby"));""",
    )
    assert seen.found == ["models-title", "sweeps-title", "where-title", "machine-title"]
    assert seen.console == []


def test_foretold_error_is_drawn_by_layer_and_step(
    browser: Browser, page: Path, tmp_path: Path
) -> None:
    script = """
    const cells = [...document.querySelectorAll("#foretold-0 .mark-rect.role-mark path")];
    const shown = cells.map((path) => path.__data__.datum);
    const grey = cells.filter((path) => path.getAttribute("fill") === colours().grey);
    const tips = [];
    for (const path of cells) {
      path.dispatchEvent(new PointerEvent("pointermove", { bubbles: true }));
      await pause();
      tips.push($("vg-tooltip-element")?.textContent ?? "");
    }
    return { cells: shown.map((each) => [each.layer, each.column, each.text]), tips,
      grey: grey.map((path) => path.__data__.datum.layer),
      colours: new Set(cells.map((path) => path.getAttribute("fill"))).size,
      says: $("checks").textContent.includes("Foretold error of the output by layer and step") };
    """
    seen = browser.opened(page, script)
    assert seen.found["cells"] == [
        ["encoder.attn", "encode", "0 %"],
        ["blocks.0.attn", "0", "60 %"],
        ["blocks.0.attn", "1", "25.5 %"],
        ["blocks.1.attn", "0", "15 %"],
        ["blocks.1.attn", "1", "-0.5 %"],
    ]
    assert seen.found["grey"] == ["encoder.attn"]
    assert seen.found["colours"] == 5
    for part in ("blocks.0.attn", "denoising step", "25.5 %"):
        assert part in seen.found["tips"][2]
    assert seen.found["says"] is True
    assert seen.console == []
    out = tmp_path / "out.html"
    write_html(pages.rows(3, 3), out, checks=pages.checks("kernel-2"))
    without = browser.opened(out, script).found
    assert (without["cells"], without["says"]) == ([], False)


def test_sweeps_of_correct_kernels_are_drawn_with_their_crossovers(
    browser: Browser, tmp_path: Path
) -> None:
    out = tmp_path / "out.html"
    wrong = sweep((0.8, "inaccurate"), q=16)
    interrupted = sweep((0.9, 1.0, "unsupported", 1.25), dim=128)
    write_html([*sweep((0.5, 0.8, 1.25, 1.5)), *interrupted, *wrong], out)
    seen = browser.opened(
        out,
        """
        const points = [...$("sweeps").querySelectorAll(".mark-symbol.role-mark path")];
        const diamonds = points.filter((path) => path.__data__.datum.place).length;
        const charts = [...$("sweeps").children];
        const texts = charts.map((each) => each.textContent);
        const lines = charts.map((each) => each.querySelectorAll(".mark-line path").length);
        const longest = points.find((path) => path.__data__.datum.length === 4096);
        longest.dispatchEvent(new MouseEvent("click", { bubbles: true }));
        await pause();
        const named = texts.map((text) => text.includes("about 1,400"));
        return [named, diamonds, lines, $("kind").value];
        """,
    )
    assert seen.found == [[True, False], 1, [1, 2], "3"]
    assert seen.console == []


def test_a_broken_page_says_so(browser: Browser, page: Path) -> None:
    broken = page.with_name("broken.html")
    text = page.read_text("utf-8")
    broken.write_text(re.sub(r'(id="data">)[^<]{40}', r"\1", text), "utf-8")
    seen = browser.opened(broken, """return $("failure").hidden ? "" : $("failure").textContent;""")
    assert "The charts cannot be drawn in this browser" in seen.found
