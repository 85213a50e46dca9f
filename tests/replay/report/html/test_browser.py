"""Tests of the report in a browser: its drawings, its controls, and its security."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from replay.plan.plan import Budget
from replay.report.html.page_writer import write_html
from tests.replay.report.html import pages

pytest.importorskip("vl_convert", reason="a report requires vl-convert-python")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is installed"),
]

CHARTS = [
    *("tradeoff", "layer-error", "layer-speed", "times", "shapes", "roofline", "where"),
    *("span-0-0", "span-0-1", "clock", "power", "temperature"),
]

WHEN_DRAWN = """
<script>
const waiting = setInterval(async () => {
  if (!document.body.dataset.ready && $("failure").hidden) return;
  clearInterval(waiting);
  const pause = () => new Promise((done) => setTimeout(done, 1500));
  const choose = async (id, value) => {
    $(id).value = value;
    $(id).dispatchEvent(new Event(id === "filter" ? "input" : "change"));
    await pause();
  };
  const names = (selected = false) => [...$("rows").tBodies[0].rows]
    .filter((row) => !selected || row.hasAttribute("aria-selected"))
    .map((row) => row.cells[0].textContent);
  const marks = (id) => $(id).querySelectorAll("svg path, svg text").length;
  let found;
  try { found = await (async () => { SCRIPT })(); }
  catch (error) { found = { failed: String(error) }; }
  document.body.append(element("pre", JSON.stringify(found), { id: "found" }));
}, 100);
</script>
"""


class Seen(NamedTuple):
    """Result of opening a page."""

    found: Any
    """Value that the script returned."""
    console: list[str]
    """Lines that the browser logged, including what the content security policy forbade."""


def opened(page: Path, script: str, *, width: int = 1200) -> Seen:
    """Open a page, run a script after drawing, and return the result."""
    copy = page.with_name("opened.html")
    text = page.read_text("utf-8")
    copy.write_text(text.replace("</body>", WHEN_DRAWN.replace("SCRIPT", script) + "</body>"))
    done = subprocess.run(
        [
            BROWSER,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={page.with_name('profile')}",
            f"--window-size={width},2000",
            "--virtual-time-budget=60000",
            "--enable-logging=stderr",
            "--dump-dom",
            copy.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    result = re.search(r'<pre id="found">([^<]*)</pre>', done.stdout)
    assert result is not None, (console, done.stdout[-2000:])
    unescaped = result[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    return Seen(json.loads(unescaped), console)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two models; the name of one model is markup."""
    out = tmp_path_factory.mktemp("report") / "out.html"
    rows = [*pages.rows(12, 30), *pages.rows(3, 2, model=pages.HOSTILE)]
    checks = pages.checks("kernel-2", pages.HOSTILE)
    write_html(rows, out, checks=checks, budget=Budget("cosine", 0.9995))
    return out


@pytest.mark.parametrize("width", [390, 900, 1400])
def test_all_charts_are_drawn_without_a_network(page: Path, width: int) -> None:
    seen = opened(
        page,
        """return {
            marks: Object.fromEntries(CHARTS.map((id) => [id, marks(id)])),
            failure: $("failure").hidden,
            tooWide: document.documentElement.scrollWidth > window.innerWidth,
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
    )
    assert {id: count > 5 for id, count in seen.found["marks"].items()} == dict.fromkeys(
        CHARTS, True
    )
    assert seen.found["failure"] is True
    assert seen.found["tooWide"] is False
    assert seen.found["budget"] is True
    assert seen.found["repeated"] == []
    assert seen.console == []
    assert seen.found["requests"] == []
    assert pages.HOSTILE in seen.found["title"]
    assert seen.found["images"] == 0


def test_rows_are_sorted_and_filtered(page: Path) -> None:
    seen = opened(
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
    assert seen.found["before"] == ["366 of 366 rows", 200, False]
    assert seen.found["all"] == 366
    assert seen.found["filtered"] == [["kernel-11"], "1 of 366 rows"]
    assert (seen.found["slowest"], seen.found["rising"]) == ("kernel-1", "ascending")
    assert (seen.found["fastest"], seen.found["focused"]) == ("kernel-11", True)
    assert seen.console == []


def test_one_selection_holds_in_all_sections_and_in_the_address(page: Path) -> None:
    seen = opened(
        page,
        """
        const chosen = () => [$("kind").value, $("kernel").value,
          document.querySelector('#matrix [aria-pressed="true"]').dataset.kernel,
          new Set(names(true)).size,
          new URLSearchParams(location.hash.slice(1)).get("kernel")];
        $("more").click();
        const first = chosen();
        const worst = $("call").selectedOptions[0].text;
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
        const marks = [...$("times").querySelectorAll("path")];
        const bar = marks.find((path) => path.__data__?.datum?.kernel === "kernel-5");
        bar.dispatchEvent(new MouseEvent("click", { bubbles: true }));
        await pause();
        const mark = chosen();
        location.hash = "#kind=0&kernel=kernel-3&at=times-title";
        await pause();
        return { first, worst, cell, kernels, labels, row, mark, address: chosen() };
        """,
    )
    assert seen.found["first"] == ["0", "kernel-10", "kernel-10", 1, None]  # the fastest correct
    assert seen.found["worst"] == "kernel-2 · step 0 blocks.1.attn (250000× its tolerance)"
    assert seen.found["kernels"] == ["kernel-1", "torch-default", "kernel-2"]  # the last is wrong
    assert "kernel-2" in seen.found["labels"]
    assert "kernel-10" not in seen.found["labels"]
    assert seen.found["cell"] == ["1", "kernel-1", "kernel-1", 1, "kernel-1"]
    assert seen.found["row"] == ["0", "kernel-11", "kernel-11", 1, "kernel-11"]
    assert seen.found["mark"] == ["0", "kernel-5", "kernel-5", 1, "kernel-5"]
    assert seen.found["address"][:3] == ["0", "kernel-3", "kernel-3"]
    assert seen.console == []


def test_a_chart_is_saved_as_svg_and_as_png(page: Path) -> None:
    seen = opened(
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


def test_sections_without_content_are_absent(tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    rows = [row for row in pages.rows(3, 3, on_gpu=False) if row.kernel != "kernel-2"]
    write_html(rows, out)
    seen = opened(
        out,
        """return [...document.querySelectorAll("section")].filter((each) => each.hidden)
            .map((each) => each.getAttribute("aria-labelledby"));""",
    )
    assert seen.found == ["where-title", "models-title", "machine-title"]
    assert seen.console == []


def test_a_broken_page_says_so(page: Path) -> None:
    broken = page.with_name("broken.html")
    text = page.read_text("utf-8")
    broken.write_text(re.sub(r'(id="data">)[^<]{40}', r"\1", text), "utf-8")
    seen = opened(broken, """return $("failure").hidden ? "" : $("failure").textContent;""")
    assert "The charts cannot be drawn in this browser" in seen.found
