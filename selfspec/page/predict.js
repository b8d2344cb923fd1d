// Will it pay: acceptance and costs in, speedup out.

const TYPED = "typed";
const FIRST = [0.7, 0.6, 0.5, 0.45, 0.4, 0.35];
const KNOTS = [2, 4, 8, 16, 32, 64];

const wish = { first: [...FIRST], costs: [1.05, 1.1, 1.2, 1.4, 1.9, 3.1], masks: 0 };

/** The measured acceptance that is chosen, or none. */
const measuredTable = () => (at("table").value === TYPED ? null : DATA.acceptance[Number(at("table").value)]);

/** Typing in begins with what was measured of the drafter that was chosen before. @param {any} table */
function typeIn(table) {
  wish.first = table.table.slice(0, 8).map((/** @type {number[]} */ level) => level[0] ?? 0);
  while (wish.first.length < FIRST.length) wish.first.push(0);
  wish.masks = table.masks ?? 0;
  const [first, second] = table.table[0];
  const rest = (second ?? 0) / (first * (1 - first));
  if (Number.isFinite(rest)) at("rest").value = String(Math.min(1, rest));
}

/** The table of acceptance that is chosen. */
function acceptance() {
  const chosen = at("table").value;
  return chosen === TYPED ? assumed(wish.first, Number(at("rest").value)) : DATA.acceptance[Number(chosen)].table;
}

/** @returns {Curve} */
function curve() {
  const chosen = at("curve").value;
  if (chosen !== TYPED) return DATA.curves[Number(chosen)];
  // What is typed in has no machine.
  return { sizes: [1, ...KNOTS], seconds: [1, ...wish.costs], size: 0, products: 0, bandwidth: 1, peak: 1 };
}

function showDepths() {
  const typed = at("table").value === TYPED;
  const first = typed ? wish.first : acceptance().slice(0, 8).map((/** @type {number[]} */ level) => level[0] ?? 0);
  at("depths").replaceChildren(...first.map((/** @type {number} */ p, /** @type {number} */ i) => {
    const out = make("output", {}, percent(p));
    const slider = make("input", { type: "range", min: 0, max: 1, step: 0.01, value: p, disabled: typed ? null : "", "aria-label": `First choice right at depth ${i + 1}` });
    slider.addEventListener("input", () => { wish.first[i] = Number(slider.value); out.textContent = percent(wish.first[i]); showPrediction(); });
    return make("label", { class: "block" }, `Depth ${i + 1} `, slider, " ", out);
  }));
  at("rest-label").hidden = !typed;
  const table = measuredTable();
  const count = table ? table.masks ?? 0 : wish.masks;
  const masks = count ? ` ${fixed(count, 1)} mask rows ride along with each node and are priced as nodes.` : "";
  at("table-note").textContent = table
    ? `${table.target}: from ${table.passes} recorded passes, wherever a guess was made (trees of at most ${table.nodes} nodes, ${fixed(table.tau)} tokens kept per pass).${masks} Choose "typed in" to move the sliders from here.`
    : `How often the first guess at each depth is right, if all above it were.${masks}`;
  if (DATA.missing.traces) at("table-note").append(" Measured acceptance: ", make("code", {}, DATA.missing.traces));
}

function showCosts() {
  const typed = at("curve").value === TYPED;
  at("costs").replaceChildren(...(typed ? KNOTS : []).map((n, i) => {
    const input = make("input", { type: "number", min: 0.01, step: "any", value: wish.costs[i], "aria-label": `c(${n}), in plain steps` });
    input.addEventListener("input", () => { if (input.valueAsNumber > 0) { wish.costs[i] = input.valueAsNumber; showPrediction(); } });
    return make("label", {}, `c(${n}) `, input);
  }));
  const found = typed ? null : DATA.curves[Number(at("curve").value)];
  const largest = found ? found.sizes[found.sizes.length - 1] : 64;
  at("curve-note").textContent = found
    ? `${found.machine || "a machine that was not named"}. A plain step takes ${(1000 * found.seconds[0]).toFixed(2)} ms. Measured up to ${largest} nodes; beyond, the last slope goes on. Of a batch it is assumed, not measured, that 16 texts with 8 nodes each cost as much as one pass over 128 nodes.`
    : "Costs in plain steps; linear in between.";
  if (DATA.missing.curves) at("curve-note").append(" Costs of a machine: ", make("code", {}, DATA.missing.curves));
}

/** What a draft of the chosen drafter cost in a comparison, at about the chosen size, where there is one. */
function measuredDraft() {
  const [table, at_curve] = [at("table").value, at("curve").value];
  if (table === TYPED || at_curve === TYPED) return null;
  const own = DATA.acceptance[Number(table)];
  const on = DATA.curves[Number(at_curve)];
  const nodes = Number(at("nodes").value);
  const near = DATA.comparisons
    .filter((/** @type {any} */ c) => c.target === on.target && c.engine === on.engine && c.machine === on.machine)
    .flatMap((/** @type {any} */ c) => c.rows)
    .filter((/** @type {any} */ row) => row.arm === own.drafter && row.T === own.T && row.draft_steps !== undefined && row.nodes !== "auto")
    .map((/** @type {any} */ row) => ({ nodes: Number(row.nodes), steps: row.draft_steps }));
  return near.sort((/** @type {any} */ a, /** @type {any} */ b) => Math.abs(a.nodes - nodes) - Math.abs(b.nodes - nodes))[0] ?? null;
}

function takeDraft() {
  const found = measuredDraft();
  if (found) setDraft(found.steps);
  const chosen = at("table").value !== TYPED && at("curve").value !== TYPED;
  at("draft-note").textContent = found
    ? `Measured for this drafter on this machine, with ${found.nodes} nodes.`
    : chosen ? "Not measured for this drafter on this machine: set it yourself." : "";
}

/** @param {number} value */
function setDraft(value) {
  at("draft").value = String(value);
  at("draft-number").value = String(Number(value.toFixed(4)));
}

function showPrediction() {
  const [nodes, rows] = [Number(at("nodes").value), Number(at("rows").value)];
  const draft = at("draft-number").valueAsNumber;
  document.querySelectorAll('output[for="nodes"]').forEach((out) => { out.textContent = String(nodes); });
  document.querySelectorAll('output[for="rows"]').forEach((out) => { out.textContent = String(rows); });
  document.querySelectorAll('output[for="rest"]').forEach((out) => { out.textContent = percent(Number(at("rest").value)); });
  if (!(draft >= 0)) {
    at("answer").textContent = "A draft costs 0 plain steps or more; type a number.";
    at("figures").replaceChildren();
    at("predict-chart").replaceChildren();
    return;
  }
  const table = measuredTable();
  const masks = table ? table.masks ?? 0 : wish.masks;
  const found = predict(acceptance(), curve(), draft, nodes, rows, masks);
  const [width, sizes] = [Math.round(rows * nodes * (1 + masks)), curve().sizes];
  const beyond = width > sizes[sizes.length - 1] ? ` A pass of ${width} rows is wider than any that was measured (${sizes[sizes.length - 1]}): its cost is extrapolated.` : "";
  const size = `${nodes} ${nodes === 1 ? "node" : "nodes"}`;
  const worth = found.speedup > 1.005 ? `${size}: it pays, ${fixed(found.speedup)}x as fast as plain decoding` : found.speedup < 0.995 ? `${size}: it does not pay, ${fixed(found.speedup)}x` : `${size}: no change, 1.00x`;
  const best = found.best > 1 ? `The best size is ${found.best} nodes, ${fixed(found.most)}x.` : "No size pays; plain decoding is best.";
  at("answer").textContent = `${worth}, with ${fixed(found.tau)} tokens a pass. ${best}${beyond}`;
  const entries = [
    ["τ, tokens a pass", fixed(found.tau)],
    ["speedup", `${fixed(found.speedup)}x`],
    ["best size", found.best > 1 ? `${found.best} nodes` : "none"],
    ["pays up to", found.pays === MOST ? `${MOST}+ nodes` : found.pays > 1 ? `${found.pays} nodes` : "never"],
    ["a draft must cost less than", found.affordable > 0 ? `${fixed(found.affordable)} steps` : "nothing"],
    ["if drafting were free", `${fixed(found.free)}x`],
    at("curve").value === TYPED ? ["limit, if a pass costs one step", `${fixed(found.tau)}x`] : ["limit: drafts for nothing, passes that only read weights or multiply", `${fixed(found.limit)}x`],
  ];
  at("figures").replaceChildren(...entries.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  const points = found.ratios.map((ratio, i) => ({ nodes: i + 1, speedup: ratio, tau: found.taus[i] }));
  const chosen = [{ nodes, speedup: found.speedup }];
  const place = at("predict-chart");
  place.replaceChildren(Plot.plot({
    width: widthOf(place), height: 300, marginLeft: 48, marginTop: 44, marginRight: 30, marginBottom: 44, style: { background: "transparent", color: "currentColor", fontSize: "12px" },
    ariaLabel: "Speedup by nodes",
    ariaDescription: `Speedup over plain decoding for trees of 1 to 64 nodes; ${fixed(found.speedup)} at ${nodes}, at most ${fixed(found.most)} at ${found.best}`,
    x: { label: "nodes of the tree", domain: [1, 64] },
    y: { label: "speedup over plain decoding", grid: true, zero: true },
    marks: [
      Plot.ruleY([1], { stroke: "currentColor", strokeDasharray: "5 4" }),
      Plot.line(points, { x: "nodes", y: "speedup", stroke: COLORS[0], strokeWidth: 2.5 }),
      Plot.dot(chosen, { x: "nodes", y: "speedup", r: 7, fill: COLORS[1], stroke: "var(--ground)" }),
      Plot.text(chosen, { x: "nodes", y: "speedup", text: (/** @type {any} */ d) => `${fixed(d.speedup)}x at ${d.nodes}`, dy: -15, fill: "currentColor", stroke: "var(--ground)", strokeWidth: 4 }),
      Plot.tip(points, Plot.pointerX({ x: "nodes", y: "speedup", fill: "var(--panel)", title: (/** @type {any} */ d) => `${d.nodes} nodes: ${fixed(d.speedup)}x, τ ${fixed(d.tau)}` })),
    ],
  }));
}

function showKnown() {
  const [tau, draft, cost] = ["know-tau", "know-draft", "know-cost"].map((id) => at(id).valueAsNumber);
  if (!(tau >= 1 && draft >= 0 && cost > 0)) {
    at("know").textContent = "τ is at least 1, a draft costs 0 or more, a pass more than 0.";
    return;
  }
  const found = speedup(tau, 1, cost, draft);
  const below = (/** @type {number} */ steps) => (steps > 0 ? `below ${fixed(steps)}` : "never");
  at("know").textContent = `${fixed(found)}x: ${found > 1 ? "it pays" : "it does not pay"}. It pays while a pass costs ${below(tau - draft)} steps, or with this pass, while a draft costs ${below(tau - cost)}.`;
}

function startPredict() {
  const tables = DATA.acceptance.map((/** @type {any} */ t, /** @type {number} */ i) => [String(i), `${t.drafter}, T=${t.T}, ${t.group === "all" ? "all texts" : t.group}`]);
  choose(at("table"), [[TYPED, "typed in"], ...tables]);
  const curves = DATA.curves.map((/** @type {any} */ c, /** @type {number} */ i) => [String(i), `${c.target}, ${c.engine}`]);
  choose(at("curve"), [[TYPED, "typed in"], ...curves]);
  if (curves.length) at("curve").value = "0";
  if (tables.length) at("table").value = "0";
  const measured = tables.find((/** @type {[string, string]} */ [value]) => { at("table").value = value; return measuredDraft(); });
  if (tables.length) at("table").value = measured ? measured[0] : "0";
  const redraw = () => { showDepths(); showCosts(); takeDraft(); showPrediction(); };
  let before = measuredTable();
  at("table").addEventListener("change", () => {
    if (at("table").value === TYPED && before) typeIn(before);
    before = measuredTable();
    redraw();
  });
  at("curve").addEventListener("change", redraw);
  at("draft").addEventListener("input", () => { setDraft(Number(at("draft").value)); showPrediction(); });
  at("draft-number").addEventListener("input", () => { at("draft").value = at("draft-number").value; showPrediction(); });
  for (const id of ["nodes", "rows", "rest"]) at(id).addEventListener("input", showPrediction);
  for (const id of ["know-tau", "know-draft", "know-cost"]) at(id).addEventListener("input", showKnown);
  setDraft(0.3);
  redraw();
  showKnown();
}
