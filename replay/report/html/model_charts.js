// The machine during the measurement, and the whole model.

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
  await section("machine-section", Object.fromEntries(READINGS.map(([id, path, title]) => [id, reading(path, title)])));
}

async function drawModels() {
  const names = Object.keys(data.models);
  $("models").hidden = !names.length;
  $("checks").replaceChildren();
  for (const [index, name] of names.entries()) {
    const { spans, kernels, losses, foretold } = data.models[name];
    const block = $("checks");
    block.append(element("h3", name));
    for (const [place, span] of [...new Set(spans.map((each) => each.span))].entries()) {
      const id = `span-${index}-${place}`;
      block.append(element("div", undefined, { class: "chart", id }));
      await draw($(id), modelChart(span, spans.filter((each) => each.span === span)));
    }
    if (losses.length) {
      const id = `losses-${index}`;
      block.append(element("div", undefined, { class: "chart", id }));
      await draw($(id), lossChart(losses));
    }
    if (foretold.length) {
      block.append(element("p", "Foretold error of the output by layer and step, in percent of its square.", { class: "quiet" }));
      const maps = element("div", undefined, { class: "multiples", id: `foretold-${index}` });
      block.append(maps);
      const places = foretold.map(() => element("div", undefined, { class: "chart" }));
      maps.append(...places);
      for (const [at, found] of foretold.entries()) await draw(places[at], foretoldMap(found));
    }
    block.append(table(`Results of each kernel in ${name}`, Object.keys(kernels[0]), kernels));
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
  const y = { field: "kernel", type: "nominal", sort: { field: "measured", op: "max", order: "descending" }, title: null, axis: { labelLimit: narrow() ? 130 : 260, labelExpr: "replace(datum.value, /^.*[/ ]/, '')" } };
  const x = { type: "quantitative", scale: { zero: false, nice: false, padding: 10 }, title: "model's speed-up (×)", axis: { tickCount: 6 } };
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

// Loss curves; equal ones are one line.
function lossChart(values) {
  const names = [...new Set(values.map((each) => each.kernel))];
  const x = { field: "step", type: "quantitative", title: "training step", scale: { nice: false, padding: 8 }, axis: { tickMinStep: 1 } };
  const y = { field: "loss", type: "quantitative", title: "loss", scale: { zero: false } };
  const color = { field: "kernel", type: "nominal", scale: { domain: names, range: colours().series }, legend: { title: null, orient: "bottom", columns: 2, symbolOpacity: 1 } };
  return {
    title: "Loss of each training step", height: 220, data: { values }, description: "Loss curves of the kernels",
    layer: [
      { mark: "line", encoding: { x, y, color } },
      { mark: { type: "point", filled: true, size: 60, opacity: 0 }, encoding: { x, y, tooltip: [{ field: "kernel" }, { field: "step" }, { field: "loss", format: ".6~g" }] } },
    ],
  };
}

// Share of each layer and step in a foretold error, grey without error.
function foretoldMap({ name, error, columns, axis, shares }) {
  const layers = Object.keys(shares);
  const values = layers.flatMap((layer) => columns.map((column, at) => ({ layer, column, share: shares[layer][at] })))
    .filter((each) => each.share !== null).map((each) => ({ ...each, percent: 100 * each.share, text: `${short(100 * each.share)} %` }));
  const most = Math.max(...values.map((each) => each.percent));
  const position = { x: { field: "column", type: "nominal", sort: columns, title: axis, axis: { labelAngle: 0, labelOverlap: true } }, y: layerAxis(values, layers) };
  const layer = [{
    mark: { type: "rect", stroke: colours().page, strokeWidth: columns.length > 16 ? 0.5 : 2 },
    encoding: { ...position, tooltip: [{ field: "layer" }, { field: "column", title: axis }, { field: "text", title: "share" }],
      color: { condition: { test: "datum.share == 0", value: colours().grey }, field: "percent", type: "quantitative", scale: { scheme: heat(), domain: [0, most], clamp: true }, legend: { title: null, format: ".2~f", gradientLength: 140 } } },
  }];
  if (columns.length <= 8) layer.push(...outlined({ ...position, text: { field: "percent", format: ".0f" } }).map((each) => ({ ...each, transform: [{ filter: "abs(datum.percent) >= 0.5" }] })));
  return { title: { text: name, subtitle: [`foretold: ${error}`, ...(values.some((each) => each.share === 0) ? ["grey: the model's own attention, or no error"] : [])] }, height: Math.max(12, Math.min(24, 600 / layers.length)) * layers.length, data: { values }, layer, description: `Foretold error by layer and step, ${name}` };
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
