// Charts of the calls: speed against error, layers and steps, times, roofline, places of errors.

const MOST_KINDS = 12; // small charts of speed against error
const MOST_TIMES = 40; // kernels in one chart
const MOST_LINES = 8; // kernels in one chart of shapes
const BESIDE_DOT = { align: { expr: "datum.isRight ? 'right' : 'left'" }, dx: { expr: "datum.isRight ? -8 : 8" } };
const ERROR_TITLES = { cosine: "worst error (1 − cosine)", relative_l1: "worst relative L1 error", rmse: "worst RMSE" };

// The chosen kind of call, then the others of its model.
function kindsShown() {
  const others = data.groups.map((_, at) => at).filter((at) => at !== state.kind && data.groups[at].model === data.groups[state.kind].model);
  return [state.kind, ...others].slice(0, MOST_KINDS).sort((one, other) => one - other);
}

function errorDomain(kinds) {
  const figures = kinds.flatMap((kind) => [data.groups[kind].noise, data.groups[kind].tolerance, data.budget?.limit, ...pooledOf(kind).map((each) => each.error)]).filter((error) => error > 0);
  const [least, most] = figures.length ? [Math.min(...figures), Math.max(...figures)] : [1e-9, 1e-6];
  return [least / 2, most * 3];
}

// Speed-ups of all charts, so that their heights compare.
function speedDomain(kinds) {
  const all = [1, ...kinds.flatMap(pooledOf).flatMap((each) => [each.ratio, each.low, each.high]).filter((ratio) => ratio !== null)];
  const [least, most] = [Math.min(...all), Math.max(...all)];
  const room = Math.max((most - least) / 12, 0.02);
  return [least - room, most + room];
}

function tradeoff(kind, domain, speeds) {
  const all = pooledOf(kind).filter((each) => each.ratio !== null && each.error !== null);
  if (!all.length) return null;
  const { title, short: name, noise, tolerance, baseline } = data.groups[kind];
  const rank = (each) => (each.kernel === state.kernel ? 3 : each.kernel === baseline ? 2 : 0) + (each.correct ? 1 : 0);
  const { bad, quiet, text: ink } = colours();
  const values = all.map((each) => ({ ...each, kind, shown: Math.max(each.error, domain[0]), chosen: each.kernel === state.kernel, isBaseline: each.kernel === baseline, isUndecided: each.outcome === "inconclusive" }))
    .sort((one, other) => rank(other) - rank(one) || other.ratio - one.ratio);
  labelled(values, (each) => Math.log(each.shown), (each) => each.ratio, { width: 0.4, from: Math.log(domain[0]), wide: Math.log(domain[1] / domain[0]), high: speeds[1] - speeds[0], right: 0.5 });
  for (const each of values) if (each.label && each.isUndecided) each.label += " ?";
  const { color, shape } = byClass(values);
  for (const channel of [color, shape]) if (channel.legend) channel.legend = { ...channel.legend, orient: "bottom", title: null };
  const scale = { type: "log", domain, nice: false };
  const x = { field: "shown", type: "quantitative", scale, title: ERROR_TITLES[data.metric], axis: { ...logAxis(domain, 4), grid: false } };
  const y = { field: "ratio", type: "quantitative", scale: { domain: speeds, nice: false, zero: false }, title: "speed-up (×)", axis: { tickCount: 5 } };
  const edge = (field) => ({ field, type: "quantitative", scale });
  const bands = [[domain[0], noise, "noise floor", 0.3, -3], [noise ?? domain[0], tolerance, "tolerance", 0.12, -14]].filter(([from, to]) => to && to > from).map(([from, to, text, opacity, height]) => ({ from, to: Math.min(to, domain[1]), text, opacity, height }));
  const layers = [
    { data: { values: bands }, mark: { type: "rect", color: colours().quiet }, encoding: { x: edge("from"), x2: { field: "to" }, opacity: { field: "opacity", type: "quantitative", scale: null, legend: null } } },
    { data: { values: bands }, mark: { type: "text", align: "left", baseline: "bottom", fontSize: 10, color: colours().quiet }, encoding: { x: edge("from"), y: { field: "height", type: "quantitative", scale: null, axis: null }, text: { field: "text" } } },
    { data: { values: [{ y: 1 }] }, mark: { type: "rule", strokeDash: [4, 4], color: colours().quiet }, encoding: { y: { field: "y", type: "quantitative" } } },
    { transform: [{ filter: "isValid(datum.low)" }], mark: { type: "rule", opacity: 0.6 }, encoding: { x, y: { ...y, field: "low" }, y2: { field: "high" }, color } },
    {
      mark: { type: "point", filled: true, opacity: 1, strokeWidth: 2, cursor: "pointer" },
      encoding: {
        x, y, shape, color: { condition: { test: "datum.isBaseline", value: ink }, ...color },
        size: { condition: { test: "datum.chosen", value: 160 }, value: 70 },
        fillOpacity: { condition: { test: "datum.correct && !datum.isUndecided", value: 1 }, value: 0 },
        stroke: { condition: [{ test: "!datum.correct", value: bad }, { test: "datum.isUndecided", value: quiet }] },
        tooltip: [
          { field: "kernel" }, { field: "status" }, { field: "ratio", title: "speed-up", format: ".3f" },
          { field: "low", format: ".3f" }, { field: "high", format: ".3f" }, { field: "error", format: ".2e" }, { field: "of_tolerance", title: "error / tolerance", format: ".3~g" }, { field: "p50", title: "ms", format: ".4~g" }, { field: "reason" },
        ],
      },
    },
    { transform: [{ filter: "isValid(datum.label)" }], mark: { type: "text", ...BESIDE_DOT, dy: { expr: `datum.ratio < 1 && datum.ratio > ${1 - (speeds[1] - speeds[0]) / 10} ? 14 : -7` }, fontSize: 11, limit: 150, cursor: "pointer" }, encoding: { x, y, text: { field: "label" }, color: { condition: [{ test: "!datum.correct", value: bad }, { test: "datum.isUndecided", value: quiet }], value: ink } } },
  ];
  if (data.budget) {
    const rule = { type: "rule", strokeWidth: 2, color: colours().bad };
    layers.push({ data: { values: [{ x: data.budget.limit, text: `budget ${data.budget.text}` }] }, layer: [
      { mark: rule, encoding: { x: edge("x") } },
      { mark: { type: "text", align: "right", dx: -4, baseline: "top", color: colours().bad }, encoding: { x: edge("x"), y: { value: 0 }, text: { field: "text" } } },
    ] });
  }
  return { title: { text: name, color: kind === state.kind ? colours().text : colours().quiet }, height: 220, data: { values }, layer: layers, description: `Speed-up against error, ${title}` };
}

// The chosen kernel on every recorded call of the chosen model and phase.
function layerCells() {
  const { model, phase } = data.groups[state.kind];
  const cells = rowsWhere((at) => column("call.model")[at] === model && column("call.phase")[at] === phase && column("call.module")[at] && column("name")[at] === state.kernel).map((at) => {
    const [of, error, noise, verdict] = ["of", "error", "noise", "speedup.verdict"].map((path) => column(path)[at]);
    return {
      at, kernel: state.kernel, kind: column("group")[at], layer: column("call.module")[at], step: column("call.step")[at], index: column("call.call_index")[at],
      status: column("status")[at], of, error, units: ofTolerance(at),
      errorDiffers: !isCorrect(at) || (of === "output" && error > 2 * (noise ?? 0)),
      ratio: isCorrect(at) ? column("speedup.ratio")[at] : null, low: column("speedup.low")[at], high: column("speedup.high")[at], speedDiffers: ["fast", "slow"].includes(verdict),
    };
  });
  const places = new Map();
  cells.sort((one, other) => one.step - other.step || one.index - other.index);
  for (const cell of cells) {
    cell.order = (places.get(cell.layer) ?? 0) + 1;
    places.set(cell.layer, cell.order);
  }
  return cells;
}

// Module paths without the parts that all of them begin or end with.
function betweenCommon(paths) {
  const parts = paths.map((path) => path.split("."));
  const common = (part) => parts.length > 1 && parts.every((each) => each.length > 1 && part(each) === part(parts[0]));
  let last;
  while (common((each) => each[0])) for (const each of parts) last = each.shift();
  if (last && parts.some((each) => /^\d+$/.test(each[0]))) for (const each of parts) each.unshift(last); // a number alone says little
  while (common((each) => each.at(-1))) for (const each of parts) each.pop();
  return parts.map((each) => each.join("."));
}

// Vertical axis with a line for each layer, in the given order, by short names.
function layerAxis(values, layers) {
  const [shorter, most] = [betweenCommon(layers), narrow() ? 20 : 28];
  for (const value of values) value.shortLayer = shorter[layers.indexOf(value.layer)];
  return { field: "shortLayer", type: "nominal", sort: shorter, title: null, axis: { labelLimit: narrow() ? 150 : 200, labelFontSize: 11, labelExpr: `length(datum.value) > ${most} ? '…' + slice(datum.value, ${1 - most}) : datum.value` } };
}

// Text that is legible on a cell of any colour.
function outlined(encoding) {
  const { page, text } = colours();
  return [{ color: page, stroke: page, strokeWidth: 2.5, strokeJoin: "round" }, { color: text }].map((mark) => ({ mark: { type: "text", fontSize: 10, ...mark }, encoding }));
}

const heat = () => ({ name: DARK.matches ? "plasma" : "yelloworangered", extent: DARK.matches ? [0.2, 1] : [0.1, 0.85] });

// One line of cells for each layer, a cell for each recorded step, grey where nothing is certain.
function strip(values, field, differs, title, without, scale, tooltip) {
  if (!values.length) return null;
  const layers = [...new Set(values.map((cell) => cell.layer))].sort(natural);
  const longest = Math.max(...values.map((cell) => cell.order));
  const position = { x: { field: "order", type: "ordinal", title: "recorded steps, in order", axis: { labels: false, ticks: false } }, y: layerAxis(values, layers) };
  const some = values.some((cell) => cell[differs]);
  const layer = [{
    mark: { type: "rect", invalid: null, stroke: colours().page, strokeWidth: 2, cursor: "pointer" },
    encoding: { ...position, tooltip,
      color: some ? { condition: [{ test: `!datum.${differs}`, value: colours().grey }, { test: `!isValid(datum.${field})`, value: colours().text }], field, type: "quantitative", scale, legend: { title: null, format: ".2~f", gradientLength: 140, orient: "top" } } : { value: colours().grey } },
  }];
  if (longest <= (narrow() ? 8 : 16)) layer.push(...outlined({ ...position, text: { field: "step" } }));
  return { title: { text: title, subtitle: some ? "" : without }, height: 24 * layers.length, data: { values }, layer, description: title };
}

function layerError() {
  const cells = layerCells().filter((cell) => cell.units !== null || cell.status === "inaccurate"); // NaN and infinity have no figure
  const most = Math.max(...cells.map((cell) => cell.units ?? 0), 1.01);
  return strip(cells, "units", "errorDiffers", "Error, in units of its tolerance", "no error exceeds twice the noise floor", { type: "log", scheme: DARK.matches ? "plasma" : "yelloworangered", domain: [0.01, most], clamp: true },
    [{ field: "layer" }, { field: "step" }, { field: "status" }, { field: "of" }, { field: "error", format: ".2e" }, { field: "units", title: "× tolerance", format: ".3~g" }]);
}

function layerSpeed() {
  const cells = layerCells().filter((cell) => cell.ratio !== null);
  const most = Math.max(...cells.filter((cell) => cell.speedDiffers).map((cell) => Math.max(cell.ratio, 1 / cell.ratio)), 1.05);
  return strip(cells, "ratio", "speedDiffers", "Speed-up over the baseline", "no call differs beyond its interval", { type: "log", range: [colours().bad, colours().grey, colours().good], domain: [1 / most, 1, most], interpolate: "rgb" },
    [{ field: "layer" }, { field: "step" }, { field: "ratio", title: "speed-up", format: ".3f" }, { field: "low", format: ".3f" }, { field: "high", format: ".3f" }]);
}

function times() {
  const timed = pooledOf(state.kind).filter((each) => each.p50 !== null).sort((one, other) => one.p50 - other.p50);
  const values = timed.slice(0, MOST_TIMES).map((each) => ({ ...each, kind: state.kind, name: (each.correct ? each.outcome === "inconclusive" ? "? " : "" : "✗ ") + each.kernel, chosen: each.kernel === state.kernel }));
  if (!values.length) return null;
  const title = values.length < timed.length ? { title: `The fastest ${values.length} of ${timed.length} kernels` } : {};
  const y = { field: "name", type: "nominal", sort: { field: "p50", op: "min" }, title: null, axis: { labelLimit: narrow() ? 130 : 260, labelExpr: "(test(/^[✗?] /, datum.value) ? slice(datum.value, 0, 2) : '') + replace(datum.value, /^.*[/ ]/, '')" } };
  const most = (narrow() ? 1.3 : 1.15) * Math.max(...values.map((each) => each.p90 ?? each.p50));
  const x = { type: "quantitative", scale: { domain: [0, most], nice: false }, title: "ms", axis: { tickCount: narrow() ? 4 : 6 } };
  const { color } = byClass(values);
  if (color.legend) color.legend = { symbolStrokeWidth: 0 };
  return {
    ...title, height: 24 * values.length, data: { values }, description: `Time of each kernel, ${data.groups[state.kind].title}`,
    layer: [
      { mark: { type: "bar", height: 12, strokeWidth: 1.5, cursor: "pointer" }, encoding: { y, x: { ...x, field: "p50" }, color,
        fillOpacity: { condition: [{ test: "!datum.correct", value: 0 }, { test: "datum.chosen", value: 1 }], value: 0.55 },
        stroke: { condition: { test: "!datum.correct", value: colours().bad }, value: null },
        tooltip: [{ field: "kernel" }, { field: "status" }, { field: "p10", title: "p10 ms", format: ".4~g" }, { field: "p50", title: "median ms", format: ".4~g" }, { field: "p90", title: "p90 ms", format: ".4~g" }] } },
      { mark: { type: "rule", color: colours().text }, encoding: { y, x: { ...x, field: "p10" }, x2: { field: "p90" } } },
      { mark: { type: "text", align: "left", dx: 6, fontSize: 11 }, encoding: { y, x: { ...x, field: "p90" }, text: { field: "p50", format: ".4~g" }, color: { value: colours().quiet } } },
    ],
  };
}

function shapes() {
  if (data.groups.length < 2) return null;
  const ratios = data.pooled.filter((each) => each.correct && each.ratio !== null);
  const best = data.groups.map((_, at) => ratios.filter((each) => each.group === at && each.outcome !== "inconclusive").sort((one, other) => other.ratio - one.ratio)[0]);
  const names = [...new Set([state.kernel, ...best.filter(Boolean).map((each) => each.kernel)])].slice(0, MOST_LINES);
  const values = ratios.filter((each) => names.includes(each.kernel)).map((each) => ({ ...each, title: data.groups[each.group].short }));
  if (values.every((each) => each.outcome === "baseline")) return null;
  const y = { field: "title", type: "nominal", sort: data.groups.map((group) => group.short), title: null, axis: { labelLimit: 340, labelFontSize: 11 } };
  const color = { field: "kernel", type: "nominal", sort: names, scale: { range: colours().series }, title: "kernel", legend: { columns: narrow() ? 1 : 3 } };
  if (narrow()) y.axis = { ...y.axis, labelLimit: 130 };
  return {
    title: "Speed-up by shape", height: 14 * names.length * new Set(values.map((each) => each.title)).size, data: { values }, description: "Speed-up by shape",
    layer: [
      { data: { values: [{ x: 1 }] }, mark: { type: "rule", strokeDash: [4, 4], color: colours().quiet }, encoding: { x: { field: "x", type: "quantitative" } } },
      { mark: { type: "rule" }, transform: [{ filter: "isValid(datum.low)" }], encoding: { y, yOffset: { field: "kernel", sort: names }, x: { field: "low", type: "quantitative" }, x2: { field: "high" }, color } },
      { mark: { type: "point", filled: true, size: 60, opacity: 1, strokeWidth: 2 }, encoding: { fillOpacity: { condition: { test: "datum.outcome == 'inconclusive'", value: 0 }, value: 1 }, stroke: { ...color, legend: null }, y, yOffset: { field: "kernel", sort: names }, x: { field: "ratio", type: "quantitative", scale: { zero: false, padding: 10 }, title: "speed-up (×)", axis: { tickCount: 6 } }, color,
        tooltip: [{ field: "kernel" }, { field: "title", title: "calls" }, { field: "ratio", title: "speed-up", format: ".3f" }, { field: "p50", title: "ms", format: ".4~g" }] } },
    ],
  };
}

// Median of each correct kernel in each kind of call, of all models.
function roofline() {
  const places = new Map();
  for (const at of rowsWhere((row) => isCorrect(row) && column("tflops")[row] && column("flop_per_byte")[row])) {
    const key = `${column("name")[at]} ${column("group")[at]}`;
    places.set(key, [...(places.get(key) ?? []), at]);
  }
  if (!places.size) return null;
  const values = [...places.values()].map((rows) => {
    const at = rows.sort((one, other) => column("tflops")[one] - column("tflops")[other])[Math.floor(rows.length / 2)];
    const kind = column("group")[at];
    return { kernel: column("name")[at], kind, title: data.groups[kind].title, class: column("accuracy_class")[at], intensity: column("flop_per_byte")[at], tflops: column("tflops")[at],
      gb: column("gb_per_s")[at], share: column("roof_share")[at], chosen: column("name")[at] === state.kernel, isBaseline: column("name")[at] === data.groups[kind].baseline, dtype: column("call.dtype")[at],
      peak: column("roof.tflops")[at], bandwidth: column("roof.gb_per_s")[at], busy: column("roof.interrupted")[at] };
  }).sort((one, other) => other.chosen - one.chosen || other.tflops - one.tflops);
  const intensities = values.map((each) => each.intensity);
  const [from, to] = [Math.min(...intensities) / 4, Math.max(...intensities) * 4];
  const roofs = [...new Map(values.filter((each) => each.peak).sort((one, other) => other.busy - one.busy).map((each) => [each.dtype, each])).values()];
  $("roof-note").hidden = !roofs.length;
  const roof = roofs.flatMap(({ dtype, peak, bandwidth }) => {
    const ridge = (peak / bandwidth) * 1e3;
    return [from, ...(ridge > from && ridge < to ? [ridge] : []), to].map((intensity) => ({ dtype, intensity, tflops: Math.min(peak, (bandwidth * intensity) / 1e3) }));
  });
  const shown = [...values, ...roof].map((each) => each.tflops);
  const heights = [Math.min(...shown) / 2, Math.max(...shown) * 2];
  const width = narrow() ? 0.5 : 0.16;
  labelled(values, (each) => Math.log(each.intensity), (each) => Math.log(each.tflops), { width, from: Math.log(from), wide: Math.log(to / from), high: Math.log(heights[1] / heights[0]), right: 1 - width });
  const plain = (all) => ({ ...logAxis(all), format: "~g" });
  const x = { field: "intensity", type: "quantitative", scale: { type: "log", nice: false, domain: [from, to] }, title: "FLOP per byte", axis: plain([from, to]) };
  const y = { field: "tflops", type: "quantitative", scale: { type: "log", nice: false, domain: heights }, title: "TFLOPS", axis: plain(heights) };
  const layers = [
    { data: { values: roof }, mark: { type: "line", color: colours().quiet, strokeWidth: 2 }, encoding: { x, y, detail: { field: "dtype" } } },
    { data: { values: roofs.map((each) => ({ intensity: to, tflops: Math.min(each.peak, (each.bandwidth * to) / 1e3), text: `${each.dtype}: ${short(each.peak)} TFLOPS, ${short(each.bandwidth)} GB/s${each.busy ? " or more (busy machine)" : ""}` })) }, mark: { type: "text", align: "right", dy: -9, color: colours().quiet }, encoding: { x, y, text: { field: "text" } } },
    { mark: { type: "point", filled: true, cursor: "pointer" }, encoding: { x, y, ...byClass(values), size: { condition: { test: "datum.chosen", value: 120 }, value: 55 }, opacity: { condition: { test: "datum.chosen", value: 1 }, value: 0.6 },
      tooltip: [{ field: "kernel" }, { field: "title", title: "calls" }, { field: "tflops", title: "TFLOPS", format: ".4~g" }, { field: "gb", title: "GB/s", format: ".4~g" }, { field: "share", title: "share of the roof", format: ".0%" }] } },
    { transform: [{ filter: "isValid(datum.label)" }], mark: { type: "text", ...BESIDE_DOT, fontSize: 11, limit: 150 }, encoding: { x, y, text: { field: "label" }, color: { value: colours().text } } },
  ];
  return { height: 340, data: { values }, layer: layers, description: "Throughput against arithmetic intensity, all kinds of call" };
}

// Rows with a wrong output or gradient, the worst first; NaN and infinity have no figure.
function wrongRows() {
  const badness = (at) => ofTolerance(at) ?? Infinity;
  return rowsWhere((at) => column("status")[at] === "inaccurate" && data.fields[at]).sort((one, other) => (badness(one) < badness(other)) - (badness(one) > badness(other)));
}

function where(at) {
  const field = data.fields[at];
  const { decade, least, first, nan } = data.levels;
  const [of, positions] = [column("of")[at], column("positions")[at]];
  const axis = ["grad_key", "grad_value"].includes(of) ? "key" : "query";
  const edge = (range, count) => Math.round((range * positions) / count);
  const values = field.flatMap((cells, head) => [...cells].map((cell, range) => ({
    head, from: edge(range, cells.length), to: edge(range + 1, cells.length), error: cell === nan ? null : least * 10 ** ((cell.charCodeAt(0) - first.charCodeAt(0)) / decade),
  })));
  const worst = Math.max(...values.map((each) => each.error ?? least));
  // An output with NaN has no ratio of its own; its finite errors have the tolerance of exact kernels.
  const tolerance = data.metric === "relative_l1" && column("accuracy_class")[at] === "exact" ? data.groups[column("group")[at]].tolerance : null;
  const ratio = ofTolerance(at) ?? (tolerance && worst / tolerance); // without it, errors have no unit
  const title = ratio === null ? "relative L1" : "× tolerance";
  for (const each of values) each.units = each.error === null ? null : ratio === null ? each.error : (each.error / worst) * ratio;
  // The scale spans the wrong places; a factor of 4 at least, so that noise does not look large.
  const [tolerated, most] = ratio === null ? [least, Math.max(worst, 2 * least)] : [1, Math.max(ratio, 2)];
  const smallest = Math.min(...values.map((each) => each.units).filter((units) => units > tolerated));
  const domain = [Math.max(tolerated, Math.min(smallest, most / 4)), most];
  return {
    height: Math.max(7, Math.min(22, 400 / field.length)) * field.length, title: `${column("name")[at]} · ${column("place")[at]}${of === "output" ? "" : ` · ${of}`}`, data: { values }, description: "Error of each head over its places, in units of the tolerance",
    mark: { type: "rect", invalid: null },
    encoding: {
      x: { field: "from", type: "quantitative", title: axis, scale: { domain: [0, positions], nice: false }, axis: { format: ",d", tickMinStep: 1, tickCount: narrow() ? 4 : 10, grid: false } }, x2: { field: "to" }, y: { field: "head", type: "ordinal", title: "head", axis: { labelOverlap: true } },
      color: { condition: [{ test: "!isValid(datum.units)", value: colours().text }, ...(ratio === null ? [] : [{ test: "datum.units <= 1", value: colours().grey }])], field: "units", type: "quantitative", scale: { type: "log", scheme: heat(), domain }, legend: { title, values: [domain[0], Math.sqrt(domain[0] * domain[1]), domain[1]], format: ratio === null ? ".1e" : ",.3~r", gradientLength: 160 } },
      tooltip: [{ field: "head" }, { field: "from", title: `first ${axis}` }, { field: "to", title: "to, exclusive" }, { field: "error", title: "relative L1", format: ".2e" }, { field: "units", title, format: ".3~g" }],
    },
  };
}
