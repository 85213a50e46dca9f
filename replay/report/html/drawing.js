"use strict";
// What every chart needs: its data unpacked, colours, axes, saving.

const $ = (id) => document.getElementById(id);
const DARK = window.matchMedia("(prefers-color-scheme: dark)");
const CLASSES = ["exact", "quantised", "sparse"];
let data;

async function unpacked(id) {
  const bytes = Uint8Array.from(atob($(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function loadCharts() {
  const code = document.createElement("script");
  code.type = "module";
  code.textContent = await unpacked("library");
  const ready = new Promise((done) => window.addEventListener("charts", done, { once: true }));
  document.body.append(code);
  await ready;
}

// Text from the data goes through here, so that it never becomes markup.
function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// Okabe and Ito's colours, which colour-blind people tell apart; shapes say the same.
function colours() {
  return DARK.matches
    ? { page: "#14171c", text: "#e6e9ed", quiet: "#a0a9b4", line: "#363d47", grey: "#3a424c", classes: ["#56b4e9", "#e69f00", "#2fc79a"], good: "#4cc38a", bad: "#ff8a80",
        series: ["#56b4e9", "#e69f00", "#2fc79a", "#f0e442", "#d98cb9", "#ff7f50", "#bbbbbb", "#7aa6ff"] }
    : { page: "#ffffff", text: "#1b1f24", quiet: "#57606a", line: "#d0d7de", grey: "#d5dae0", classes: ["#0072b2", "#d55e00", "#009e73"], good: "#137a45", bad: "#b3261e",
        series: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#a67c00", "#555555", "#7b3fa0"] };
}

function config(width) {
  const { text, quiet, line } = colours();
  return {
    background: "transparent",
    font: "system-ui, sans-serif",
    view: { stroke: null },
    axis: { labelColor: quiet, titleColor: text, gridColor: line, domainColor: line, tickColor: line, labelFontSize: 12, titleFontSize: 12, titleFontWeight: 500, labelLimit: 260, labelSeparation: 6 },
    legend: { labelColor: text, titleColor: text, labelFontSize: 12, titleFontSize: 12, orient: "top", labelLimit: 260 },
    title: { color: text, subtitleColor: quiet, subtitleFontSize: 12, fontSize: 13, anchor: "start", fontWeight: 600, limit: width - 20 },
  };
}

// Draws a chart with buttons that save it; a place without a chart stays empty.
async function draw(place, spec) {
  place.replaceChildren();
  if (!spec) return;
  const chart = element("div", undefined, { class: "drawing" });
  place.append(chart);
  const full = { width: "container", autosize: { type: "fit-x", contains: "padding" }, ...spec, config: config(place.clientWidth) };
  const { view } = await window.vegaEmbed(chart, full, { actions: false, renderer: "svg", logLevel: 1, mode: "vega-lite", tooltip: { theme: DARK.matches ? "dark" : "light" } });
  view.addEventListener("click", (_, item) => item?.datum?.kernel && select(item.datum));
  const save = element("p", undefined, { class: "save" });
  for (const kind of ["svg", "png"]) {
    const button = element("button", kind.toUpperCase(), { type: "button", "aria-label": `save this chart as ${kind.toUpperCase()}: ${spec.description}` });
    button.addEventListener("click", async () => {
      const href = await view.toImageURL(kind, kind === "png" ? 2 : 1);
      element("a", undefined, { href, download: `${spec.description.replace(/\W+/g, "-").toLowerCase()}.${kind}` }).click();
    });
    save.append(button);
  }
  place.append(save);
}

const column = (path) => data.rows[path];
const rowsWhere = (test) => data.rows.name.map((_, at) => at).filter(test);
const pooledOf = (group) => data.pooled.filter((each) => each.group === group);
const isCorrect = (at) => ["ok", "not-timed"].includes(column("status")[at]);
const ofTolerance = (at) => column("units")[at];
const natural = (one, other) => one.localeCompare(other, undefined, { numeric: true });
const short = (value) => String(Number(value.toPrecision(3)));
const narrow = () => window.innerWidth < 600;

// Ticks of a logarithmic axis with distinct labels: powers of ten, or fewer digits' steps.
function logAxis(values, most = 5) {
  const [least, greatest] = [Math.min(...values), Math.max(...values)];
  const between = (steps) => {
    const found = [];
    for (let power = Math.floor(Math.log10(least)); power <= Math.ceil(Math.log10(greatest)); power += 1) {
      for (const step of steps) {
        const tick = Number(`${step}e${power}`);
        if (tick >= least * 0.999 && tick <= greatest * 1.001) found.push(tick);
      }
    }
    return found;
  };
  let ticks = [[1], [1, 3], [1, 2, 5]].map(between).find((found) => found.length >= 3)
    ?? [0, 1, 2, 3].map((at) => least * (greatest / least) ** (at / 3));
  ticks = ticks.filter((_, at) => at % Math.ceil(ticks.length / most) === 0);
  const digits = [0, 1, 2, 3, 4].find((count) => new Set(ticks.map((tick) => tick.toExponential(count))).size === ticks.length) ?? 4;
  return { values: ticks, format: `.${digits}e` };
}

// Colour and shape of the classes that a chart has; one alone needs no legend.
function byClass(values) {
  const there = CLASSES.filter((name) => values.some((each) => each.class === name));
  const of = (all) => there.map((name) => all[CLASSES.indexOf(name)]);
  const legend = { legend: there.length > 1 ? { symbolOpacity: 1 } : null };
  const channel = (range) => ({ field: "class", type: "nominal", title: "class", scale: { domain: there, range }, ...legend });
  return { color: channel(of(colours().classes)), shape: channel(of(["circle", "square", "triangle-up"])) };
}

// Labels the dots in the given order, and leaves out those where another label already stands.
// A label stands to the left of dots beyond `right`, a share of the horizontal axis.
// `width` is that of a label; the axis begins at `from`, and `wide` and `high` are the axes' spans.
function labelled(values, xOf, yOf, { width, from, wide, high, right }) {
  const taken = [];
  for (const each of values) {
    const place = (xOf(each) - from) / wide;
    each.isRight = place > right;
    const spot = [place + (each.isRight ? -width : width) / 2, yOf(each) / high];
    if (taken.some(([x, y]) => Math.abs(x - spot[0]) < width && Math.abs(y - spot[1]) < 0.06)) continue;
    taken.push(spot);
    each.label = each.kernel.split("/").pop();
  }
}
