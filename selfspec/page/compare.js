// What was measured: charts with intervals, a table, and its CSV.

/** @type {Record<string, {label: string, unit: string, of: (row: any) => any}>} */
const MEASURES = {
  speedup: { label: "speedup over plain decoding", unit: "x", of: (row) => row.part.speedup && { value: row.part.speedup.ratio, low: row.part.speedup.low, high: row.part.speedup.high } },
  tau: { label: "τ, tokens a pass", unit: "", of: (row) => ({ value: row.part.tau, low: row.part.tau_interval?.[0], high: row.part.tau_interval?.[1] }) },
  limit: { label: "speedup, measured and from its costs", unit: "x", of: (row) => row.part.speedup && { value: row.part.speedup.ratio, low: row.part.speedup.low, high: row.part.speedup.high, limit: row.whole ? row.limit : null } },
  time: { label: "where the time of a pass goes", unit: " ms", of: (row) => row.whole && row.milliseconds_per_pass && { value: Object.values(row.milliseconds_per_pass).reduce((a, b) => a + b, 0), parts: row.milliseconds_per_pass } },
};
const ALL = "all texts";
const DRIFT = 0.05; // how far the ratio of two runs of plain decoding may lie from 1
const PARTS = { draft: "draft", target: "model", other: "rest" };

/** @type {{shown: any[], hidden: Set<string>, column: string, down: boolean}} */
const compared = { shown: [], hidden: new Set(), column: "value", down: true };

/** @returns {any} */
const comparison = () => DATA.comparisons[Number(at("run").value)];

/** The rows that the controls leave, sorted. */
function rowsShown() {
  const [T, group, size, sort] = [Number(at("temperature").value), at("group").value, at("size").value, at("sort").value];
  const measure = MEASURES[at("measure").value];
  const rows = comparison().rows
    .filter((/** @type {any} */ row) => row.T === T && !compared.hidden.has(row.arm) && (size === "every size" || row.nodes === size || !/^(\d+|auto)$/.test(row.nodes)))
    .map((/** @type {any} */ row) => ({ ...row, whole: group === ALL, part: group === ALL ? row : row.groups[group] ?? {}, name: /^(\d+|auto)$/.test(row.nodes) ? `${row.arm} ${row.nodes}` : row.arm }))
    .map((/** @type {any} */ row) => ({ ...row, found: row.part && measure.of(row) }))
    .map((/** @type {any} */ row) => (row.found && row.part.prompts === 1 ? { ...row, found: { ...row.found, low: null, high: null } } : row))
    .filter((/** @type {any} */ row) => row.found && Number.isFinite(row.found.value));
  const order = sort === "name" ? (/** @type {any} */ a, /** @type {any} */ b) => a.name.localeCompare(b.name) : (/** @type {any} */ a, /** @type {any} */ b) => b.found.value - a.found.value;
  return sort === "as measured" ? rows : rows.sort(order);
}

function compareChart() {
  const rows = compared.shown;
  const measure = MEASURES[at("measure").value];
  const place = at("compare-chart");
  const names = rows.map((row) => row.name);
  const width = widthOf(place);
  const left = Math.min(0.45 * width, 12 + 7.2 * Math.max(6, ...names.map((name) => name.length)));
  const split = rows.some((row) => row.found.parts);
  const low = (/** @type {any} */ d) => d.found.low ?? d.found.value;
  const high = (/** @type {any} */ d) => d.found.high ?? d.found.value;
  const told = (/** @type {any} */ d) => `${d.name}: ${cellOf(d)}`;
  const parts = rows.flatMap((row) => (row.found.parts ? Object.entries(PARTS).map(([key, part]) => ({ name: row.name, part, ms: row.found.parts[key] })) : []));
  const dots = [
    Plot.ruleX(measure.unit === "x" ? [1] : [], { stroke: "currentColor", strokeDasharray: "5 4" }),
    Plot.link(rows, { y1: "name", y2: "name", x1: low, x2: high, stroke: COLORS[0], strokeWidth: 2.5 }),
    Plot.dot(rows, { y: "name", x: (/** @type {any} */ d) => d.found.value, fill: COLORS[0], r: 5, ariaLabel: told }),
    Plot.tickX(rows.filter((row) => row.found.limit), { y: "name", x: (/** @type {any} */ d) => d.found.limit, stroke: COLORS[1], strokeWidth: 3, ariaLabel: (/** @type {any} */ d) => `${d.name}: from its costs ${fixed(d.found.limit)}x` }),
    Plot.tip(rows, Plot.pointerY({ y: "name", x: (/** @type {any} */ d) => d.found.value, fill: "var(--panel)", title: told })),
  ];
  const bars = [Plot.barX(parts, { y: "name", x: "ms", fill: "part", order: Object.values(PARTS), ariaLabel: (/** @type {any} */ d) => `${d.name}: ${d.part} ${fixed(d.ms)} ms` })];
  place.replaceChildren(rows.length ? Plot.plot({
    width, height: 64 + 22 * rows.length, marginLeft: left, marginBottom: 52, marginRight: 26, insetLeft: 8, insetRight: 8,
    style: { background: "transparent", color: "currentColor", fontSize: "12px" },
    ariaLabel: measure.label, ariaDescription: rows.map(told).join("; "),
    x: { label: `${measure.label}${measure.unit.trim() === "ms" ? ", ms" : ""}`, grid: true, zero: split },
    y: { label: null, domain: names, tickFormat: (/** @type {string} */ name) => {
      const room = Math.floor((left - 12) / 7.2);
      return name.length > room ? `${name.slice(0, room - 8)}…${name.slice(-7)}` : name; // the end tells the size
    } },
    color: split ? { legend: true, domain: Object.values(PARTS), range: COLORS.slice(0, 3) } : {},
    marks: split ? bars : dots,
  }) : make("p", {}, ["time", "limit"].includes(at("measure").value) && at("group").value !== ALL ? "Nothing was measured for this choice: costs are of all texts together." : "Nothing was measured for this choice."));
}

/** @param {any} row */
function cellOf(row) {
  const unit = MEASURES[at("measure").value].unit;
  const interval = row.found.low === undefined || row.found.low === null ? "" : ` [${fixed(row.found.low)}, ${fixed(row.found.high)}]`;
  const limit = row.found.limit ? `, from its costs ${fixed(row.found.limit)}x` : "";
  return `${fixed(row.found.value)}${unit}${interval}${limit}`;
}

/** @type {[string, string, (row: any) => any][]} name, key, value */
const COLUMNS = [
  ["drafter", "name", (row) => row.arm],
  ["nodes", "nodes", (row) => row.nodes],
  ["T", "T", (row) => row.T],
  ["value", "value", (row) => row.found.value],
  ["low", "low", (row) => row.found.low],
  ["high", "high", (row) => row.found.high],
  ["from its costs", "limit", (row) => (row.whole ? row.limit : null)],
  ["τ", "tau", (row) => row.part.tau],
  ["texts", "texts", (row) => row.part.prompts],
  ["same text", "same", (row) => (row.whole && row.same !== undefined ? `${row.same} of ${row.prompts}` : null)],
];

function compareTable() {
  const sorted = [...compared.shown];
  const column = COLUMNS.find(([, key]) => key === compared.column);
  if (column && at("sort").value === "the table's column") {
    const of = column[2];
    sorted.sort((a, b) => {
      const [x, y] = [of(a), of(b)];
      const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), undefined, { numeric: true });
      return compared.down ? -order : order;
    });
  }
  const head = COLUMNS.map(([name, key]) => {
    const own = compared.column === key && at("sort").value === "the table's column";
    const mark = own ? (compared.down ? " ▼" : " ▲") : "";
    const sort = make("button", { type: "button", onclick: () => {
      compared.down = !(own && compared.down);
      compared.column = key;
      at("sort").value = "the table's column";
      showCompare();
      at("rows-table").querySelector(`[data-key="${key}"]`).focus();
    }, "data-key": key }, name + mark);
    return make("th", { scope: "col", "aria-sort": own ? (compared.down ? "descending" : "ascending") : "none" }, sort);
  });
  const rows = sorted.map((row) => make("tr", {}, COLUMNS.map(([, , of], i) => {
    const value = of(row);
    return make("td", { class: i > 1 ? "number" : "" }, typeof value === "number" && !["T", "texts"].includes(COLUMNS[i][1]) ? fixed(value) : value ?? "–");
  })));
  const label = `${MEASURES[at("measure").value].label}, ${at("group").value}, T=${at("temperature").value}`;
  at("rows-table").replaceChildren(make("caption", {}, label), make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows));
  return sorted;
}

/** What is shown, as CSV. */
function csvOf() {
  const quoted = (/** @type {any} */ value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  };
  const head = ["comparison", "text", "measure", ...COLUMNS.map(([name]) => name)];
  const lines = compareTable().map((row) => [comparison().name, at("group").value, at("measure").value, ...COLUMNS.map(([, , of]) => of(row))]);
  return `${[head, ...lines].map((line) => line.map(quoted).join(",")).join("\r\n")}\r\n`;
}

function downloadCsv() {
  const url = URL.createObjectURL(new Blob([csvOf()], { type: "text/csv" }));
  make("a", { href: url, download: `${comparison().name}.csv` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** A warning where two runs of plain decoding took different times. */
function stalled() {
  const [T, group] = [Number(at("temperature").value), at("group").value];
  const plain = comparison().rows.find((/** @type {any} */ row) => row.T === T && row.arm === "plain");
  const found = plain && (group === ALL ? plain : plain.groups[group])?.speedup;
  if (!found || at("measure").value === "tau" || (found.low - DRIFT <= 1 && found.high + DRIFT >= 1)) return null;
  return `Doubtful: two runs of plain decoding of the same texts differ by a factor of ${fixed(found.ratio)}, so the machine was busy with something else. Measure this again.`;
}

function showCompare() {
  compared.shown = rowsShown();
  compareChart();
  compareTable();
  const nothing = !compared.shown.length;
  at("csv").disabled = nothing;
  at("rows-table").hidden = nothing;
  const warning = stalled();
  at("compare-told").classList.toggle("doubtful", warning !== null);
  const best = [...compared.shown].sort((a, b) => b.found.value - a.found.value)[0];
  at("compare-told").textContent = warning ?? (best ? `${compared.shown.length} rows; the largest value: ${best.name}, ${cellOf(best)}` : compared.hidden.size ? "Nothing is left: tick a drafter." : "");
}

function showRun() {
  const found = comparison();
  const rows = found.rows;
  choose(at("temperature"), unique(rows.map((/** @type {any} */ row) => row.T)).map((T) => [String(T), String(T)]));
  choose(at("group"), [ALL, ...unique(rows.flatMap((/** @type {any} */ row) => Object.keys(row.groups)))].map((g) => [g, g]));
  const sizes = unique(rows.map((/** @type {any} */ row) => row.nodes)).filter((n) => /^(\d+|auto)$/.test(/** @type {string} */ (n)));
  choose(at("size"), ["every size", ...sizes].map((n) => [n, n]));
  if (!sizes.includes(at("size").value) && sizes.length > 1) at("size").value = sizes[0];
  const arms = /** @type {string[]} */ (unique(rows.map((/** @type {any} */ row) => row.arm)));
  compared.hidden = new Set();
  at("arms").replaceChildren(...arms.map((arm) => {
    const box = make("input", { type: "checkbox", checked: "" });
    box.addEventListener("change", () => {
      if (box.checked) compared.hidden.delete(arm);
      else compared.hidden.add(arm);
      showCompare();
    });
    return make("label", {}, box, ` ${arm}`);
  }));
  at("command").textContent = found.command || "a command that was not recorded";
  at("machine").textContent = found.machine ? `on ${found.machine}` : "";
  showCompare();
}

function startCompare() {
  if (!DATA.comparisons.length) return missing("compare", "There is no comparison here.", DATA.missing.comparisons);
  choose(at("run"), DATA.comparisons.map((/** @type {any} */ c, /** @type {number} */ i) => [String(i), `${c.name}: ${c.target}, ${c.engine}`]));
  choose(at("measure"), Object.entries(MEASURES).map(([key, measure]) => [key, measure.label]));
  choose(at("sort"), ["value", "name", "as measured", "the table's column"].map((s) => [s, s]));
  at("run").addEventListener("change", showRun);
  for (const id of ["temperature", "group", "size", "measure", "sort"]) at(id).addEventListener("change", showCompare);
  at("csv").addEventListener("click", downloadCsv);
  showRun();
}
