// Charts of sweeps: speed-up against length, with the crossovers.

// The sweeps to show, among them that of the chosen kind of call.
function sweepsShown() {
  const has = (sweep) => sweep.kinds.includes(state.kind);
  return [...data.sweeps.filter(has), ...data.sweeps.filter((sweep) => !has(sweep))].slice(0, MOST_KINDS)
    .sort((one, other) => data.sweeps.indexOf(one) - data.sweeps.indexOf(other));
}

// Speed-ups of the kernels that are correct at all lengths, without the baseline. A length without
// a speed-up ends a stretch, so that no line crosses it.
function sweepValues({ kinds, lengths }) {
  const all = kinds.flatMap((kind, at) => pooledOf(kind).map((each) => ({ ...each, kind, at, length: lengths[at], chosen: each.kernel === state.kernel })));
  const wrong = new Set(all.filter((each) => each.status === "inaccurate").map((each) => each.kernel));
  const shown = all.filter((each) => each.correct && each.ratio !== null && !wrong.has(each.kernel) && each.kernel !== data.groups[each.kind].baseline);
  const last = new Map();
  for (const each of shown) {
    const before = last.get(each.kernel);
    each.stretch = before === undefined ? 0 : before.stretch + (each.at - before.at > 1 ? 1 : 0);
    last.set(each.kernel, each);
  }
  return shown;
}

function speedTicks([least, most]) {
  const steps = most / least < 8 ? [1, 1.5, 2, 3, 5, 7] : most / least < 1000 ? [1, 2, 5] : [1];
  return [-3, -2, -1, 0, 1, 2].flatMap((power) => steps.map((step) => Number(`${step}e${power}`))).filter((tick) => tick >= least && tick <= most);
}

function sweepChart(sweep, domain) {
  const all = sweepValues(sweep);
  const crossing = sweep.crossovers.map((each) => each.kernel);
  const fastest = [...new Set([...all].sort((one, other) => other.ratio - one.ratio).map((each) => each.kernel))];
  const names = [...new Set([state.kernel, ...crossing, ...fastest])].filter((name) => fastest.includes(name)).slice(0, MOST_LINES);
  const values = all.filter((each) => names.includes(each.kernel));
  if (!values.length) return null;
  const color = { field: "kernel", type: "nominal", scale: { domain: names, range: colours().series }, legend: { title: null, orient: "bottom", columns: 2, symbolOpacity: 1, labelLimit: 150 } };
  const x = { field: "length", type: "quantitative", scale: { type: "log", nice: false, padding: 12 }, title: sweep.unit, axis: { values: sweep.lengths, format: ",", grid: false, labelOverlap: true } };
  const y = { field: "ratio", type: "quantitative", scale: { type: "log", domain, nice: false }, title: "speed-up (×)", axis: { values: speedTicks(domain), format: "~g" } };
  const marks = sweep.crossovers.filter((each) => names.includes(each.kernel)).map(({ kernel, ends: [from, to], isGain, place }, at) => ({
    kernel, from, to, place, ratio: 1, text: place && `about ${Number(place.toPrecision(2)).toLocaleString("en")}`, height: (isGain ? 1 : -1) * (13 + 13 * at), // beside the line
  }));
  const found = { transform: [{ filter: "isValid(datum.place)" }], data: { values: marks } };
  return {
    title: sweep.title, height: 220, data: { values }, description: `Speed-up against length ${sweep.title}`,
    layer: [
      { data: { values: [{ ratio: 1 }] }, mark: { type: "rule", strokeDash: [4, 4], color: colours().quiet }, encoding: { y } },
      { data: { values: marks }, mark: { type: "rule", strokeWidth: 7, opacity: 0.3 }, encoding: { x: { ...x, field: "from" }, x2: { field: "to" }, y, color } },
      { transform: [{ filter: "isValid(datum.low)" }], mark: { type: "rule", opacity: 0.6 }, encoding: { x, y: { ...y, field: "low" }, y2: { field: "high" }, color } },
      { mark: { type: "line" }, encoding: { x, y, color, detail: { field: "stretch" } } },
      { mark: { type: "point", filled: true, opacity: 1, strokeWidth: 2, cursor: "pointer" }, encoding: { x, y, color, fillOpacity: { condition: { test: "isValid(datum.low) && (datum.low > 1 || datum.high < 1)", value: 1 }, value: 0 }, stroke: color, size: { condition: { test: "datum.chosen", value: 110 }, value: 50 },
        tooltip: [{ field: "kernel" }, { field: "length", title: sweep.unit, format: "," }, { field: "ratio", title: "speed-up", format: ".3f" }, { field: "low", format: ".3f" }, { field: "high", format: ".3f" }, { field: "p50", title: "ms", format: ".4~g" }] } },
      { ...found, mark: { type: "point", shape: "diamond", filled: true, size: 150, opacity: 1, stroke: colours().page, strokeWidth: 1.5 }, encoding: { x: { ...x, field: "place" }, y, color } },
      { ...found, mark: { type: "text", align: "left", dx: 7, dy: { expr: "datum.height" }, fontSize: 11, fontWeight: 600 }, encoding: { x: { ...x, field: "place" }, y, text: { field: "text" }, color } },
    ],
  };
}

async function drawSweeps() {
  const sweeps = sweepsShown();
  const ratios = sweeps.flatMap(sweepValues).flatMap((each) => [each.ratio, each.low, each.high]).filter((ratio) => ratio > 0);
  const domain = [Math.min(...ratios, 0.9) / 1.1, Math.max(...ratios, 1.1) * 1.1];
  await multiples("sweeps", sweeps.map((sweep) => sweepChart(sweep, domain)));
}
