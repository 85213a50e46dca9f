"use strict";
// Draws the report. Whatever comes from the data is set as text, never as markup.

const $ = (id) => document.getElementById(id);
const DARK = window.matchMedia("(prefers-color-scheme: dark)");
const CLASSES = ["exact", "quantised", "sparse"];
const MOST_TIMES = 40; // kernels in one chart
const MOST_LINES = 8; // kernels in one chart of shapes
const PAGE = 200; // rows of the table at a time
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

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// Okabe and Ito's colours, which colour-blind people tell apart; shapes say the same.
function colours() {
  return DARK.matches
    ? { text: "#e6e9ed", quiet: "#a0a9b4", line: "#363d47", classes: ["#56b4e9", "#e69f00", "#2fc79a"], bad: "#ff8a80",
        series: ["#56b4e9", "#e69f00", "#2fc79a", "#f0e442", "#d98cb9", "#ff7f50", "#bbbbbb", "#7aa6ff"] }
    : { text: "#1b1f24", quiet: "#57606a", line: "#d0d7de", classes: ["#0072b2", "#d55e00", "#009e73"], bad: "#b3261e",
        series: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#a67c00", "#555555", "#7b3fa0"] };
}

function config() {
  const { text, quiet, line } = colours();
  return {
    background: "transparent",
    font: "system-ui, sans-serif",
    view: { stroke: null },
    axis: { labelColor: quiet, titleColor: text, gridColor: line, domainColor: line, tickColor: line, labelFontSize: 12, titleFontSize: 12, titleFontWeight: 500, labelLimit: 260 },
    legend: { labelColor: text, titleColor: text, labelFontSize: 12, titleFontSize: 12, orient: "top", labelLimit: 260 },
    title: { color: text, subtitleColor: quiet, subtitleFontSize: 12, fontSize: 13, anchor: "start", fontWeight: 600 },
  };
}

async function draw(id, spec, empty) {
  const place = $(id);
  if (!spec) {
    place.replaceChildren(element("p", empty, { class: "empty" }));
    return;
  }
  const full = { width: "container", autosize: { type: "fit-x", contains: "padding" }, ...spec, config: config() };
  await window.vegaEmbed(place, full, { actions: false, renderer: "svg", logLevel: 1, mode: "vega-lite", tooltip: { theme: DARK.matches ? "dark" : "light" } });
}

const chosenGroup = () => Number($("group").value);
const chosenKernel = () => $("kernel").value;
const pooledOf = (group) => data.pooled.filter((each) => each.group === group);
const column = (path) => data.rows[path];

function rowsWhere(test) {
  return data.rows.name.map((_, at) => at).filter(test);
}

const isCorrect = (at) => ["ok", "not-timed"].includes(column("status")[at]);

// Colour and shape of the classes that a chart has; one alone needs no legend.
function byClass(values) {
  const there = CLASSES.filter((name) => values.some((each) => each.class === name));
  const of = (all) => there.map((name) => all[CLASSES.indexOf(name)]);
  const legend = { legend: there.length > 1 ? { symbolOpacity: 1 } : null };
  const channel = (range) => ({ field: "class", type: "nominal", title: "class", scale: { domain: there, range }, ...legend });
  return { color: channel(of(colours().classes)), shape: channel(of(["circle", "square", "triangle-up"])) };
}

// The dots that get a label: the fastest first, and none where another label already stands.
function labelled(values) {
  const [xs, ys] = [values.map((each) => Math.log(each.shown)), values.map((each) => each.ratio)];
  const span = (all) => Math.max(...all) - Math.min(...all) || 1;
  const taken = [];
  for (const each of [...values].sort((one, other) => other.chosen - one.chosen || other.ratio - one.ratio)) {
    const spot = [Math.log(each.shown) / span(xs), each.ratio / span(ys)];
    if (taken.some(([x, y]) => Math.abs(x - spot[0]) < (narrow() ? 0.4 : 0.15) && Math.abs(y - spot[1]) < 0.05)) continue;
    taken.push(spot);
    each.label = each.kernel;
  }
}
const ERROR_TITLES = { cosine: "worst error (1 − cosine)", relative_l1: "worst relative L1 error", rmse: "worst RMSE" };

function tradeoff() {
  const all = pooledOf(chosenGroup()).filter((each) => each.ratio !== null && each.error !== null);
  if (!all.length) return null;
  const positive = all.map((each) => each.error).filter((error) => error > 0);
  const least = positive.length ? Math.min(...positive) : 1e-9;
  const values = all.map((each) => ({ ...each, shown: Math.max(each.error, least / 3), chosen: each.kernel === chosenKernel() }));
  labelled(values);
  const { color, shape } = byClass(values);
  const x = { field: "shown", type: "quantitative", scale: { type: "log", nice: false, padding: 24 }, title: ERROR_TITLES[data.metric], axis: { format: ".0e", tickCount: 6, grid: false } };
  const y = { field: "ratio", type: "quantitative", scale: { zero: false, padding: 12 }, title: "speed-up (×)" };
  const layers = [
    { data: { values: [{ y: 1 }] }, mark: { type: "rule", strokeDash: [4, 4], color: colours().quiet }, encoding: { y: { field: "y", type: "quantitative" } } },
    { mark: { type: "rule", opacity: 0.6 }, encoding: { x, y: { ...y, field: "low" }, y2: { field: "high" }, color } , transform: [{ filter: "isValid(datum.low)" }] },
    {
      mark: { type: "point", filled: true, size: 90, opacity: 1 },
      encoding: {
        x, y,
        color,
        shape,
        fillOpacity: { condition: { test: "datum.correct", value: 1 }, value: 0.08 },
        stroke: { condition: { test: "!datum.correct", value: colours().bad } },
        tooltip: [
          { field: "kernel" }, { field: "status" }, { field: "ratio", title: "speed-up", format: ".3f" },
          { field: "low", format: ".3f" }, { field: "high", format: ".3f" }, { field: "error", format: ".2e" }, { field: "p50", title: "ms", format: ".4~g" },
        ],
      },
    },
    { transform: [{ filter: "isValid(datum.label)" }], mark: { type: "text", align: "left", dx: 8, dy: -6, fontSize: 12 }, encoding: { x, y, text: { field: "label" }, color: { value: colours().text }, opacity: { condition: { test: "datum.correct", value: 1 }, value: 0.6 } } },
  ];
  if (data.budget) {
    const rule = { type: "rule", strokeWidth: 2, color: colours().bad };
    layers.push({ data: { values: [{ x: data.budget.limit, text: `budget ${data.budget.text}` }] }, layer: [
      { mark: rule, encoding: { x: { field: "x", type: "quantitative" } } },
      { mark: { type: "text", align: "right", dx: -4, baseline: "top", color: colours().bad }, encoding: { x: { field: "x", type: "quantitative" }, y: { value: 0 }, text: { field: "text" } } },
    ] });
  }
  return { height: 360, data: { values }, layer: layers, description: "Speed-up against the worst error, one dot for each kernel" };
}

// Time and error of one kernel on every call of the chosen model and phase, by layer and step.
function layerCells() {
  const { model, phase } = data.groups[chosenGroup()];
  const here = rowsWhere((at) => column("call.model")[at] === model && column("call.phase")[at] === phase && column("call.module")[at]);
  const baseline = new Map();
  for (const at of here) {
    const { baseline: name } = data.groups[column("group")[at]];
    if (column("name")[at] === name) baseline.set(column("call.name")[at], column("time_ms.p50")[at]);
  }
  const path = `accuracy.reference.${data.metric}`;
  return here.filter((at) => column("name")[at] === chosenKernel()).map((at) => {
    const [figure, ms, own] = [column(path)[at], column("time_ms.p50")[at], baseline.get(column("call.name")[at])];
    return {
      layer: column("call.module")[at], step: column("call.step")[at], status: column("status")[at],
      error: figure === null ? null : data.metric === "cosine" ? Math.max(1 - figure, 0) : figure,
      saved: ms === null || own === undefined || own === null ? null : own - ms,
    };
  });
}

function heat(cells, field, title, scale, format) {
  const values = cells.filter((cell) => cell[field] !== null);
  if (!values.length) return null;
  const layers = [...new Set(values.map((cell) => cell.layer))].sort(natural);
  return {
    title, height: 22 * layers.length, data: { values },
    mark: { type: "rect", tooltip: true, stroke: "transparent" },
    encoding: {
      x: { field: "step", type: "ordinal", title: "step", axis: { labelAngle: 0, labelOverlap: true } },
      y: { field: "layer", type: "nominal", sort: layers, title: null, axis: { labelLimit: 200, labelExpr: "length(datum.value) > 28 ? '…' + slice(datum.value, -27) : datum.value" } },
      color: { field, type: "quantitative", aggregate: field === "error" ? "max" : "mean", scale, legend: { title: null, format, gradientLength: 140, orient: "top" } },
      tooltip: [{ field: "layer" }, { field: "step" }, { field, aggregate: field === "error" ? "max" : "mean", format, title: field === "error" ? "worst error" : "ms saved" }],
    },
    description: title,
  };
}

const natural = (one, other) => one.localeCompare(other, undefined, { numeric: true });

function layerError() {
  const cells = layerCells().map((cell) => ({ ...cell, error: cell.error === null ? null : Math.max(cell.error, 1e-9) }));
  const errors = cells.map((cell) => cell.error).filter((error) => error !== null);
  const least = Math.min(...errors, 1), most = Math.max(...errors, 1e-9);
  const room = Math.max(2 / Math.sqrt(most / least), 1); // errors that differ by a hair get one colour
  return heat(cells, "error", "Error", { type: "log", scheme: "viridis", domain: [least / room, most * room] }, ".1e");
}

function layerSaved() {
  const cells = layerCells();
  const most = Math.max(...cells.map((cell) => Math.abs(cell.saved ?? 0)), 1e-9);
  return heat(cells, "saved", "Time saved over the baseline, ms a call", { scheme: DARK.matches ? "blueorange" : "purpleorange", domain: [-most, most], reverse: true }, ".2~g");
}

function times() {
  const timed = pooledOf(chosenGroup()).filter((each) => each.p50 !== null).sort((one, other) => one.p50 - other.p50);
  const values = timed.slice(0, MOST_TIMES);
  if (!values.length) return null;
  const title = values.length < timed.length ? { title: `The fastest ${values.length} of ${timed.length} kernels` } : {};
  const y = { field: "kernel", type: "nominal", sort: { field: "p50", op: "min" }, title: null };
  const x = { type: "quantitative", scale: { type: "log", nice: false, padding: 30 }, title: "ms", axis: { tickCount: 6, format: "~g" } };
  const { color, shape } = byClass(values);
  return {
    ...title, height: 22 * values.length, data: { values }, description: "Time of each kernel",
    layer: [
      { mark: { type: "bar", height: 8, opacity: 0.35 }, encoding: { y, x: { ...x, field: "p10" }, x2: { field: "p90" }, color } },
      { mark: { type: "point", filled: true, size: 60, opacity: 1 }, encoding: { y, x: { ...x, field: "p50" }, color, shape,
        tooltip: [{ field: "kernel" }, { field: "status" }, { field: "p10", title: "p10 ms", format: ".4~g" }, { field: "p50", title: "median ms", format: ".4~g" }, { field: "p90", title: "p90 ms", format: ".4~g" }] } },
      { mark: { type: "text", align: "left", dx: 10, fontSize: 11 }, encoding: { y, x: { ...x, field: "p90" }, text: { field: "p50", format: ".4~g" }, color: { value: colours().quiet } } },
    ],
  };
}

function shapes() {
  if (data.groups.length < 2) return null;
  const ratios = data.pooled.filter((each) => each.correct && each.ratio !== null);
  const best = data.groups.map((_, at) => ratios.filter((each) => each.group === at).sort((one, other) => other.ratio - one.ratio)[0]);
  const names = [...new Set([chosenKernel(), ...best.filter(Boolean).map((each) => each.kernel)])].slice(0, MOST_LINES);
  const values = ratios.filter((each) => names.includes(each.kernel)).map((each) => ({ ...each, title: data.groups[each.group].short }));
  if (!values.length) return null;
  const y = { field: "title", type: "nominal", sort: data.groups.map((group) => group.short), title: null, axis: { labelLimit: 340, labelFontSize: 11 } };
  const color = { field: "kernel", type: "nominal", sort: names, scale: { range: colours().series }, title: "kernel" };
  if (narrow()) y.axis = { ...y.axis, labelLimit: 130 };
  return {
    title: "Speed-up by shape", height: 14 * names.length * new Set(values.map((each) => each.title)).size, data: { values }, description: "Speed-up by shape",
    layer: [
      { data: { values: [{ x: 1 }] }, mark: { type: "rule", strokeDash: [4, 4], color: colours().quiet }, encoding: { x: { field: "x", type: "quantitative" } } },
      { mark: { type: "rule" }, transform: [{ filter: "isValid(datum.low)" }], encoding: { y, yOffset: { field: "kernel", sort: names }, x: { field: "low", type: "quantitative" }, x2: { field: "high" }, color } },
      { mark: { type: "point", filled: true, size: 60, opacity: 1 }, encoding: { y, yOffset: { field: "kernel", sort: names }, x: { field: "ratio", type: "quantitative", scale: { zero: false, padding: 10 }, title: "speed-up (×)" }, color,
        tooltip: [{ field: "kernel" }, { field: "title", title: "calls" }, { field: "ratio", title: "speed-up", format: ".3f" }, { field: "p50", title: "ms", format: ".4~g" }] } },
    ],
  };
}

const short = (value) => String(Number(value.toPrecision(3)));
const narrow = () => window.innerWidth < 600;

function roofline() {
  const { model } = data.groups[chosenGroup()];
  const here = rowsWhere((at) => column("call.model")[at] === model && isCorrect(at) && column("tflops")[at]);
  if (!here.length) return null;
  const values = here.map((at) => ({
    kernel: column("name")[at], class: column("accuracy_class")[at], intensity: column("flop_per_byte")[at],
    tflops: column("tflops")[at], gb: column("gb_per_s")[at], share: column("roof_share")[at], call: column("place")[at], chosen: column("name")[at] === chosenKernel(),
  }));
  const intensities = values.map((each) => each.intensity);
  const [from, to] = [Math.min(...intensities) / 8, Math.max(...intensities) * 8];
  const lines = new Map();
  for (const at of here) {
    const [peak, bandwidth] = [column("roof.tflops")[at], column("roof.gb_per_s")[at]];
    if (peak) lines.set(column("call.dtype")[at], { peak, bandwidth });
  }
  $("roof-note").hidden = !lines.size;
  const roof = [...lines].flatMap(([dtype, { peak, bandwidth }]) => {
    const ridge = (peak / bandwidth) * 1e3;
    const at = [from, ...(ridge > from && ridge < to ? [ridge] : []), to];
    return at.map((intensity) => ({ dtype, intensity, tflops: Math.min(peak, (bandwidth * intensity) / 1e3) }));
  });
  const x = { field: "intensity", type: "quantitative", scale: { type: "log", nice: false }, title: "FLOP per byte", axis: { tickCount: 6, format: "~s" } };
  const y = { field: "tflops", type: "quantitative", scale: { type: "log" }, title: "TFLOPS", axis: { tickCount: 6, format: "~g" } };
  const layers = [
    { mark: { type: "point", filled: true, size: 45 }, encoding: { x, y, ...byClass(values),
      opacity: { condition: { test: "datum.chosen", value: 1 }, value: 0.35 },
      tooltip: [{ field: "kernel" }, { field: "call" }, { field: "tflops", title: "TFLOPS", format: ".4~g" }, { field: "gb", title: "GB/s", format: ".4~g" }, { field: "share", title: "share of the roof", format: ".0%" }] } },
  ];
  if (roof.length) {
    layers.unshift({ data: { values: roof }, mark: { type: "line", color: colours().quiet, strokeWidth: 2 }, encoding: { x, y, detail: { field: "dtype" } } });
    const labels = [...lines].map(([dtype, { peak, bandwidth }]) => ({ intensity: to, tflops: Math.min(peak, (bandwidth * to) / 1e3), text: `${dtype}: ${short(peak)} TFLOPS, ${short(bandwidth)} GB/s` }));
    layers.push({ data: { values: labels }, mark: { type: "text", align: "right", dy: -9, color: colours().quiet }, encoding: { x, y, text: { field: "text" } } });
  }
  return { height: 320, data: { values }, layer: layers, description: "Throughput against arithmetic intensity" };
}

function callsOfKernel() {
  return rowsWhere((at) => column("group")[at] === chosenGroup() && column("name")[at] === chosenKernel() && data.fields[at]);
}

function where() {
  const at = Number($("call").value);
  const field = $("call").value === "" ? null : data.fields[at];
  if (!field) return null;
  const { decade, least, first, nan } = data.levels;
  const values = field.flatMap((cells, head) => [...cells].map((cell, range) => ({
    head, range, finite: cell !== nan, error: cell === nan ? 1 : least * 10 ** ((cell.charCodeAt(0) - first.charCodeAt(0)) / decade),
  })));
  const x = { field: "range", type: "ordinal", title: "queries, from the first to the last", axis: { labels: false, ticks: false } };
  const y = { field: "head", type: "ordinal", title: "head", axis: { labelOverlap: true } };
  return {
    height: Math.max(7, Math.min(22, 400 / field.length)) * field.length, data: { values }, description: "Error of each head over the queries",
    mark: { type: "rect" },
    encoding: {
      x, y,
      color: { condition: { test: "!datum.finite", value: colours().bad }, field: "error", type: "quantitative", scale: { type: "log", scheme: "viridis" }, legend: { title: "relative L1", format: ".0e", gradientLength: 160 } },
      tooltip: [{ field: "head" }, { field: "range", title: "range of queries" }, { field: "error", format: ".1e" }],
    },
  };
}

const READINGS = [["clock", "gpu_during.sm_clock_mhz", "SM clock, MHz"], ["power", "gpu_during.power_w", "power, W"], ["temperature", "gpu_during.temperature_c", "temperature, °C"]];

function reading(path, title) {
  const values = rowsWhere((at) => column(path)[at] !== null).map((at, order) => ({ order: order + 1, value: column(path)[at], kernel: column("name")[at], call: column("place")[at] }));
  if (!values.length) return null;
  return {
    height: 90, data: { values }, description: title, mark: { type: "point", filled: true, size: 14, color: colours().classes[0] },
    encoding: {
      x: { field: "order", type: "quantitative", title: "row, in the order of measurement" }, y: { field: "value", type: "quantitative", scale: { zero: false }, title },
      tooltip: [{ field: "kernel" }, { field: "call" }, { field: "value", title }],
    },
  };
}

async function drawMachine() {
  const [[first]] = READINGS;
  for (const [id, path, title] of READINGS) {
    const none = id === first ? "No clocks, power or temperature were read: the rows were measured on a CPU, or NVML was not available." : "";
    await draw(id, reading(path, title), none);
  }
}

async function drawModels() {
  const names = Object.keys(data.models);
  $("models").hidden = !names.length;
  $("checks").replaceChildren();
  for (const [index, name] of names.entries()) {
    const { spans, kernels } = data.models[name];
    const block = $("checks");
    block.append(element("h3", name));
    for (const [place, span] of [...new Set(spans.map((each) => each.span))].entries()) {
      const id = `span-${index}-${place}`;
      block.append(element("div", undefined, { class: "chart", id }));
      await draw(id, modelChart(span, spans.filter((each) => each.span === span)), "");
    }
    block.append(table(`Results of each kernel in ${name}`, ["kernel", "answered", "fell back", "output", "status", "reason"], kernels));
    const outputs = data.outputs[name] ?? [];
    if (!outputs.length) continue;
    block.append(element("h3", "Outputs"));
    const grid = element("div", undefined, { class: "outputs" });
    for (const { kernel, pictures, text } of outputs) {
      const figure = element("figure");
      figure.append(element("figcaption", kernel));
      for (const [at, src] of pictures.entries()) figure.append(element("img", undefined, { src, alt: `picture ${at + 1} with ${kernel}` }));
      if (text !== null) figure.append(element("pre", text, { tabindex: "0", role: "region", "aria-label": `text with ${kernel}` }));
      grid.append(figure);
    }
    block.append(grid);
  }
}

function modelChart(span, lines) {
  const own = lines.find((each) => !each.measured);
  const values = lines.filter((each) => each.measured).map((each) => ({ kernel: each.kernel, ms: each.ms, measured: each.measured.ratio, low: each.measured.low, high: each.measured.high,
    predicted: each.predicted?.value ?? null, from: each.predicted?.low ?? null, to: each.predicted?.high ?? null }));
  if (!values.length) return null;
  const y = { field: "kernel", type: "nominal", sort: { field: "measured", op: "max", order: "descending" }, title: null };
  const x = { type: "quantitative", scale: { zero: false, padding: 10 }, title: "speed-up of the model (×)" };
  const [blue, orange] = colours().classes;
  const tooltip = [{ field: "kernel" }, { field: "measured", format: ".3f" }, { field: "predicted", format: ".3f" }, { field: "ms", format: ".4~g" }];
  return {
    title: { text: span, subtitle: own ? `${short(own.ms)} ms with the model's own attention` : "" }, height: 28 * values.length, data: { values }, description: `Speed-up of ${span}`,
    layer: [
      { data: { values: [{ x: 1 }] }, mark: { type: "rule", strokeDash: [4, 4], color: colours().quiet }, encoding: { x: { field: "x", type: "quantitative" } } },
      { transform: [{ filter: "isValid(datum.low)" }], mark: { type: "rule", color: blue, strokeWidth: 2, yOffset: -4 }, encoding: { y, x: { ...x, field: "low" }, x2: { field: "high" } } },
      { mark: { type: "point", filled: true, opacity: 1, color: blue, size: 70, yOffset: -4 }, encoding: { y, x: { ...x, field: "measured" }, tooltip } },
      { transform: [{ filter: "isValid(datum.from)" }], mark: { type: "rule", color: orange, yOffset: 5 }, encoding: { y, x: { ...x, field: "from" }, x2: { field: "to" } } },
      { transform: [{ filter: "isValid(datum.predicted)" }], mark: { type: "point", shape: "diamond", filled: false, color: orange, size: 70, strokeWidth: 2, opacity: 1, yOffset: 5 }, encoding: { y, x: { ...x, field: "predicted" }, tooltip } },
    ],
  };
}

function table(label, headings, lines) {
  const made = element("table");
  const head = element("tr");
  headings.forEach((heading) => head.append(element("th", heading, { scope: "col" })));
  made.append(element("thead"), element("tbody"));
  made.tHead.append(head);
  for (const line of lines) {
    const row = element("tr", undefined, line.status && line.status !== "ok" ? { class: "wrong" } : {});
    headings.forEach((heading) => row.append(element("td", line[heading] ?? "", { class: typeof line[heading] === "number" ? "number" : "text", title: String(line[heading] ?? "") })));
    made.tBodies[0].append(row);
  }
  const scroll = element("div", undefined, { class: "scroll", tabindex: "0", role: "region", "aria-label": label });
  scroll.append(made);
  return scroll;
}

// The table of all rows.

const TABLE = ["name", "status", "call.model", "call.phase", "place", "shape", "call.dtype", "accuracy_class"];
const AFTER = ["flags", "reason"];
const HEADINGS = { name: "kernel", place: "call", shape: "shape", status: "verdict", "call.model": "model", "call.phase": "phase", "call.dtype": "dtype", accuracy_class: "class", flags: "noticed", reason: "reason" };
const tableState = { paths: [], sort: "", descending: false, shown: PAGE, texts: [] };

function prepareTable() {
  const figures = Object.keys(data.columns).filter((path) => data.columns[path].heading && !TABLE.includes(path) && isFigure(path));
  tableState.paths = [...TABLE, ...figures, ...AFTER].filter((path) => column(path).some((value) => value !== null && value !== ""));
  tableState.texts = data.rows.name.map((_, at) => tableState.paths.map((path) => column(path)[at] ?? "").join(" ").toLowerCase());
  const line = element("tr");
  for (const path of tableState.paths) {
    const { heading, meaning } = data.columns[path] ?? {};
    const cell = element("th", undefined, { scope: "col", "data-path": path });
    if (isFigure(path)) cell.classList.add("number");
    const sort = element("button", HEADINGS[path] ?? heading, { type: "button", title: meaning ?? "" });
    sort.addEventListener("click", () => {
      tableState.descending = tableState.sort === path ? !tableState.descending : false;
      tableState.sort = path;
      fillTable();
    });
    cell.append(sort);
    line.append(cell);
  }
  $("rows").tHead.replaceChildren(line);
}

const isFigure = (path) => column(path).some((value) => typeof value === "number");

function formatted(path, value) {
  if (value === null) return "";
  if (typeof value !== "number") return value;
  const scaled = value * (data.columns[path]?.factor ?? 1);
  if (path.includes("cosine")) return (Math.floor((scaled + 1e-12) * 1e6) / 1e6).toFixed(6);
  if (path === "roof_share") return `${(100 * scaled).toFixed(0)} %`;
  if (Number.isInteger(scaled)) return String(scaled);
  return Math.abs(scaled) < 1e-3 ? scaled.toExponential(1) : String(Number(scaled.toPrecision(4)));
}

function fillTable() {
  const { paths, sort, descending, shown, texts } = tableState;
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const order = texts.map((_, at) => at).filter((at) => words.every((word) => texts[at].includes(word)));
  if (sort) {
    const values = column(sort);
    const sign = descending ? -1 : 1;
    order.sort((one, other) => {
      const [a, b] = [values[one], values[other]];
      if (a === null || b === null) return (a === null) - (b === null); // what is missing comes last
      return sign * (typeof a === "number" ? a - b : natural(String(a), String(b)));
    });
  }
  for (const cell of $("rows").tHead.rows[0].cells) {
    if (cell.dataset.path === sort) cell.setAttribute("aria-sort", descending ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  }
  $("rows").tBodies[0].replaceChildren(...order.slice(0, shown).map((at) => {
    const line = element("tr", undefined, isCorrect(at) ? {} : { class: "wrong" });
    for (const path of paths) {
      const text = formatted(path, column(path)[at]);
      line.append(element("td", text, isFigure(path) ? { class: "number" } : { class: "text", title: text }));
    }
    return line;
  }));
  $("count").textContent = `${order.length} of ${texts.length} rows`;
  $("more").hidden = order.length <= shown;
}

function fillSelect(select, options, chosen) {
  const wanted = options.some(([value]) => value === chosen) ? chosen : options[0]?.[0];
  select.replaceChildren(...options.map(([value, text]) => element("option", text, { value })));
  if (wanted !== undefined) select.value = wanted;
}

function fillKernels() {
  const pooled = pooledOf(chosenGroup()).filter((each) => each.kernel !== data.groups[chosenGroup()].baseline);
  const ranked = [...pooled].sort((one, other) => Number(other.correct) - Number(one.correct) || (other.ratio ?? 0) - (one.ratio ?? 0));
  const all = pooledOf(chosenGroup()).filter((each) => !pooled.includes(each));
  fillSelect($("kernel"), [...ranked, ...all].map((each) => [each.kernel, each.kernel]), chosenKernel());
}

function fillCalls() {
  const path = "accuracy.reference.relative_l1";
  const calls = callsOfKernel().sort((one, other) => (column(path)[other] ?? Infinity) - (column(path)[one] ?? Infinity));
  fillSelect($("call"), calls.map((at) => [String(at), `${column("place")[at]} (${formatted(path, column(path)[at])})`]), $("call").value);
}

async function drawAll() {
  fillKernels();
  fillCalls();
  const random = "These calls do not come from layers of a model.";
  await draw("tradeoff", tradeoff(), "No kernel has both a speed-up and an error.");
  await draw("layer-error", layerError(), random);
  await draw("layer-saved", layerSaved(), "No times can be compared.");
  await draw("times", times(), "Nothing was timed.");
  const byShape = shapes();
  $("shapes-note").hidden = !byShape;
  await draw("shapes", byShape, "");
  await draw("roofline", roofline(), "Nothing was timed.");
  await draw("where", where(), "No output of this kernel was compared.");
}

async function begin() {
  data = JSON.parse(await unpacked("data"));
  await loadCharts();
  fillSelect($("group"), data.groups.map((group, at) => [String(at), group.title]));
  prepareTable();
  fillTable();
  $("filter").addEventListener("input", () => { tableState.shown = PAGE; fillTable(); });
  $("more").addEventListener("click", () => { tableState.shown += PAGE; fillTable(); });
  $("group").addEventListener("change", drawAll);
  $("kernel").addEventListener("change", drawAll);
  $("call").addEventListener("change", () => draw("where", where(), ""));
  const everything = async () => { await drawAll(); await drawModels(); await drawMachine(); };
  DARK.addEventListener("change", everything);
  await everything();
  document.body.dataset.ready = "yes";
}

begin().catch((error) => {
  $("failure").textContent = `The charts cannot be drawn in this browser (${error.message}). The answers above are complete; a newer browser also draws the charts.`;
  $("failure").hidden = false;
});
