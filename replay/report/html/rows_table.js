// The table of all rows.

const PAGE = 200; // rows at a time
const FIRST = ["name", "status", "speedup.ratio", "time_ms.p50"];
const THEN = ["call.model", "call.phase", "place", "shape", "call.dtype", "accuracy_class"];
const AFTER = ["flags", "reason"];
const HEADINGS = { name: "kernel", place: "call", shape: "shape", status: "verdict", "call.model": "model", "call.phase": "phase", "call.dtype": "dtype", accuracy_class: "class", flags: "noticed", reason: "reason" };
const tableState = { paths: [], shown: PAGE, texts: [] };

function prepareTable() {
  const first = [...FIRST, `accuracy.reference.${data.metric}`, "accuracy.tolerance_ratio"];
  const figures = Object.keys(data.columns).filter((path) => data.columns[path].heading && ![...first, ...THEN].includes(path) && isFigure(path));
  tableState.paths = [...first, ...THEN, ...figures, ...AFTER].filter((path) => column(path)?.some((value) => value !== null && value !== ""));
  tableState.texts = data.rows.name.map((_, at) => tableState.paths.map((path) => column(path)[at] ?? "").join(" ").toLowerCase());
  const line = element("tr");
  for (const path of tableState.paths) {
    const { heading, meaning } = data.columns[path] ?? {};
    const cell = element("th", undefined, { scope: "col", "data-path": path });
    if (isFigure(path)) cell.classList.add("number");
    const sort = element("button", HEADINGS[path] ?? heading, { type: "button", title: meaning ?? "" });
    sort.addEventListener("click", () => {
      state.descending = state.sort === path ? !state.descending : false;
      state.sort = path;
      fillTable();
      keepAddress();
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
  const { paths, shown, texts } = tableState;
  const { descending } = state;
  const sort = paths.includes(state.sort) ? state.sort : "";
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
    const line = element("tr", undefined, { "data-at": at, ...(isCorrect(at) ? {} : { class: "wrong" }) });
    line.addEventListener("click", () => getSelection().isCollapsed && select({ kernel: column("name")[at], kind: column("group")[at], at }));
    for (const path of paths) {
      const text = formatted(path, column(path)[at]);
      line.append(element("td", text, isFigure(path) ? { class: "number" } : { class: "text", title: text }));
    }
    return line;
  }));
  $("count").textContent = `${order.length} of ${texts.length} rows`;
  marked();
  $("more").hidden = order.length <= shown;
}
