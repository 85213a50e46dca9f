// What is chosen: a kernel, a kind of call and a row, which all charts share and the address keeps.

const state = { kernel: "", kind: 0, row: null, sort: "", descending: false, filter: "" };

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const kernels = new Set(data.rows.name);
  const number = (name, count) => (/^\d+$/.test(given.get(name) ?? "") && Number(given.get(name)) < count ? Number(given.get(name)) : null);
  const first = mostInteresting();
  state.kind = number("kind", data.groups.length) ?? first.group;
  state.kernel = kernels.has(given.get("kernel")) ? given.get("kernel") : first.group === state.kind ? first.kernel : ranked(state.kind)[0] ?? "";
  state.row = number("row", data.rows.name.length);
  state.sort = given.get("sort") ?? "";
  state.descending = given.has("descending");
  state.filter = given.get("filter") ?? "";
  return given.get("at");
}

// The worst wrong kernel, or else the fastest kernel of the first kind of call that decided any.
function mostInteresting() {
  const [wrong] = wrongRows();
  if (wrong !== undefined) return { kernel: column("name")[wrong], group: column("group")[wrong] };
  const decided = data.pooled.filter((each) => ["faster", "same", "slower"].includes(each.outcome));
  return decided.sort((one, other) => one.group - other.group || other.ratio - one.ratio)[0] ?? { kernel: ranked(0)[0] ?? "", group: 0 };
}

function keepAddress(at = new URLSearchParams(location.hash.slice(1)).get("at")) {
  const kept = new URLSearchParams({ kind: state.kind, kernel: state.kernel });
  if (state.row !== null) kept.set("row", state.row);
  if (state.sort) kept.set("sort", state.sort);
  if (state.sort && state.descending) kept.set("descending", "");
  if (state.filter) kept.set("filter", state.filter);
  if (at) kept.set("at", at);
  try { history.replaceState(null, "", `#${kept}`); } catch { /* a page in a frame may not */ }
}

function goTo(section) {
  $(section)?.closest("section").scrollIntoView();
}

// Kernels of a kind: correct and fast ones first, the baseline and wrong ones last.
function ranked(kind) {
  const { baseline } = data.groups[kind];
  const order = (each) => (each.kernel === baseline ? 1 : each.correct ? 0 : 2);
  return pooledOf(kind).sort((one, other) => order(one) - order(other) || (other.ratio ?? 0) - (one.ratio ?? 0)).map((each) => each.kernel);
}

function fillSelect(select, options, chosen) {
  select.replaceChildren(...options.map(([value, text]) => element("option", text, { value })));
  select.value = chosen;
}

// Selects what a mark, a cell or a row stands for.
async function select({ kernel = state.kernel, kind = state.kind, at = null }) {
  const ran = ranked(Number(kind));
  state.kind = Number(kind);
  state.kernel = ran.includes(kernel) ? kernel : ran[0] ?? "";
  state.row = at;
  await drawChosen();
  keepAddress();
}

function marked() {
  for (const cell of document.querySelectorAll("#matrix button")) {
    cell.setAttribute("aria-pressed", String(cell.dataset.kernel === state.kernel && Number(cell.dataset.kind) === state.kind));
  }
  for (const line of $("rows").tBodies[0].rows) {
    const at = Number(line.dataset.at);
    const chosen = state.row === null ? column("name")[at] === state.kernel && column("group")[at] === state.kind : at === state.row;
    line.toggleAttribute("aria-selected", chosen);
  }
}

// Draws the charts of a section in their places; a section with nothing to show is absent.
async function section(id, specs) {
  $(id).hidden = !Object.values(specs).some(Boolean);
  for (const [place, spec] of Object.entries(specs)) $(place).hidden = !spec; // widths depend on it
  for (const [place, spec] of Object.entries(specs)) await draw($(place), spec);
}

// Draws small charts beside each other; their section is absent if there is none.
async function multiples(id, specs) {
  const shown = specs.filter(Boolean);
  $(`${id}-section`).hidden = !shown.length;
  const places = shown.map(() => element("div", undefined, { class: "chart" }));
  $(id).replaceChildren(...places);
  for (const [at, spec] of shown.entries()) await draw(places[at], spec);
}

async function drawTradeoffs() {
  const kinds = kindsShown();
  const [errors, speeds] = [errorDomain(kinds), speedDomain(kinds)];
  await multiples("tradeoff", kinds.map((kind) => tradeoff(kind, errors, speeds)));
}

async function drawWhere() {
  const wrong = wrongRows();
  $("where-section").hidden = !wrong.length;
  if (!wrong.length) return;
  const own = wrong.filter((at) => column("name")[at] === state.kernel && column("group")[at] === state.kind);
  const at = wrong.includes(state.row) ? state.row : own[0] ?? wrong[0];
  fillSelect($("call"), wrong.map((row) => [String(row), `${column("name")[row]} · ${column("place")[row]}${ofTolerance(row) === null ? "" : ` (${short(ofTolerance(row))}× its tolerance)`}`]), String(at));
  await draw($("where"), where(at));
}

async function drawChosen() {
  fillSelect($("kernel"), ranked(state.kind).map((name) => [name, name]), state.kernel);
  $("kind").value = String(state.kind);
  marked();
  await drawSweeps();
  await drawTradeoffs();
  await section("layers-section", { "layer-error": layerError(), "layer-speed": layerSpeed() });
  const byShape = shapes();
  $("shapes-note").hidden = !byShape;
  await section("times-section", { times: times(), shapes: byShape });
  await section("roofline-section", { roofline: roofline() });
  await drawWhere();
}

async function begin() {
  data = JSON.parse(await unpacked("data"));
  await loadCharts();
  const at = readAddress();
  fillSelect($("kind"), data.groups.map((group, kind) => [String(kind), group.title]), String(state.kind));
  for (const part of document.querySelectorAll(".scripted")) part.hidden = false;
  document.querySelector("main > .choices").hidden = data.groups.length < 2 && ranked(0).length < 2;
  $("filter").value = state.filter;
  prepareTable();
  fillTable();
  $("filter").addEventListener("input", () => { state.filter = $("filter").value; tableState.shown = PAGE; fillTable(); keepAddress(); });
  $("more").addEventListener("click", () => { tableState.shown += PAGE; fillTable(); });
  $("kind").addEventListener("change", () => select({ kind: $("kind").value }));
  $("kernel").addEventListener("change", () => select({ kernel: $("kernel").value }));
  $("call").addEventListener("change", () => { const row = Number($("call").value); select({ kernel: column("name")[row], kind: column("group")[row], at: row }); });
  for (const button of document.querySelectorAll("#matrix button")) button.addEventListener("click", () => select(button.dataset));
  for (const link of document.querySelectorAll("a.section")) {
    link.addEventListener("click", (event) => { event.preventDefault(); keepAddress(link.hash.slice(1)); goTo(link.hash.slice(1)); });
  }
  const everything = async () => { document.body.dataset.scheme = DARK.matches ? "dark" : "light"; await drawModels(); await drawChosen(); await drawMachine(); };
  DARK.addEventListener("change", everything);
  window.addEventListener("hashchange", async () => { const place = readAddress(); await drawChosen(); if (place) goTo(place); });
  await everything();
  if (at) goTo(at);
  document.body.dataset.ready = "yes";
}

begin().catch((error) => {
  $("failure").textContent = `The charts cannot be drawn in this browser (${error.message}). The answers above are complete; a newer browser also draws the charts.`;
  $("failure").hidden = false;
});
