// How it works: a trace, step by step and on its clock.

const STAGES = ["text so far", "draft tree", "mask", "noise and picks", "walk", "what is kept"];

/** What is shown: tokens of both texts in `fast` and `plain`; `playing`: the frame that is asked for.
 * @type {{trace: any, pass: number, stage: number, time: number, playing: number, last: number, fast: any[], plain: any[]}} */
const explain = { trace: null, pass: 0, stage: 0, time: 0, playing: 0, last: 0, fast: [], plain: [] };

/** @param {any} header */
function traceLabel(header) {
  const group = header.group ? `, ${header.group}` : "";
  return `${header.drafter}, ${header.nodes} nodes, T=${header.temperature}${group}, ${header.dtype}`;
}

/** Every emitted token with where it came from and when, of the chosen trace. */
function timeline() {
  const { header, passes, plain } = explain.trace;
  let clock = header.seconds_prefill;
  explain.fast = [];
  passes.forEach((/** @type {any} */ line, /** @type {number} */ number) => {
    clock += line.seconds.draft + line.seconds.target + line.seconds.other;
    line.emitted.forEach((/** @type {number} */ _, /** @type {number} */ i) => {
      const node = line.path[i + 1];
      explain.fast.push({
        text: line.pieces[i],
        pass: number,
        clock,
        depth: node === undefined ? 0 : i + 1,
        score: node === undefined || !line.scores ? null : line.scores[node],
        sources: node === undefined ? [] : line.sources[node],
        probability: line.choices[i][0][1],
        choices: line.choices[i],
      });
    });
  });
  explain.plain = [];
  if (plain) {
    let own = plain.seconds_prefill;
    plain.pieces.forEach((/** @type {string} */ text, /** @type {number} */ i) => {
      own += plain.seconds[i];
      explain.plain.push({ text, clock: own, sources: [], depth: 0, plain: true });
    });
  }
}

/** @param {any} token */
function tokenTold(token) {
  const names = token.sources.map((/** @type {number} */ s) => explain.trace.header.sources[s]);
  if (token.plain) return `${visible(token.text)}: written by plain decoding, one pass for each token`;
  const whose = names.length ? `drafted by ${names.join(" and ")} at depth ${token.depth}` : "bonus token, picked by the model behind the last kept node";
  const score = token.score === null || token.score === undefined ? "" : `, path probability ${percent(token.score)}`;
  return `${visible(token.text)}: ${whose}${score}; the model gave it ${percent(token.probability)}; pass ${token.pass + 1}`;
}

/** @param {any} token */
const kind = (token) => (token.sources.length ? `s${token.sources[0] % 4}` : token.plain ? "plain" : "bonus");

/** @param {any} place @param {any[]} tokens @param {number} now @param {number} newest */
function writeText(place, tokens, now, newest) {
  const spans = tokens.filter((token) => token.clock <= now + 1e-9).map((token) => {
    const span = make("span", { class: `piece ${kind(token)}${token.pass === newest ? " new" : ""}`, title: tokenTold(token) }, running(token.text));
    span.addEventListener("pointerenter", () => { at("token").textContent = tokenTold(token); });
    return span;
  });
  place.replaceChildren(make("span", { class: "prompt" }, running(explain.trace.header.prompt_texts[0])), ...spans);
  place.scrollTop = place.scrollHeight;
  return spans.length;
}

function endOfRace() {
  const last = (/** @type {any[]} */ tokens) => (tokens.length ? tokens[tokens.length - 1].clock : 0);
  return Math.max(last(explain.fast), last(explain.plain));
}

function showRace() {
  const now = explain.time;
  const newest = explain.fast.filter((token) => token.clock <= now + 1e-9).reduce((most, token) => Math.max(most, token.pass), -1);
  const fast = writeText(at("fast"), explain.fast, now, newest);
  at("fast-count").textContent = `${fast} of ${explain.fast.length} tokens`;
  if (explain.trace.plain) {
    const plain = writeText(at("plain"), explain.plain, now, -1);
    at("plain-count").textContent = `${plain} of ${explain.plain.length} tokens`;
  } else {
    at("plain").textContent = "This trace has no plain decoding beside it. selfspec decode with decode.traces records both.";
    at("plain-count").textContent = "";
  }
  at("time").max = String(endOfRace());
  at("time").value = String(now);
  at("clock").textContent = `${(1000 * now).toFixed(0)} of ${(1000 * endOfRace()).toFixed(0)} ms`;
}

/** A node's token and where it is drawn. @param {any} line */
function treeLayout(line) {
  /** @type {number[][]} */
  const below = line.tokens.map(() => []);
  line.parents.forEach((/** @type {number} */ parent, /** @type {number} */ node) => { if (parent >= 0) below[parent].push(node); });
  /** @type {Record<number, {x: number, y: number}>} */
  const places = {};
  let leaves = 0;
  const visit = (/** @type {number} */ node, /** @type {number} */ depth) => {
    if (!below[node].length) places[node] = { x: depth, y: leaves++ };
    else {
      below[node].forEach((child) => visit(child, depth + 1));
      const ys = below[node].map((child) => places[child].y);
      places[node] = { x: depth, y: (ys[0] + ys[ys.length - 1]) / 2 };
    }
  };
  visit(0, 0);
  return { places, leaves };
}

/** @param {any} line @param {boolean} walked */
function drawTree(line, walked) {
  const { places, leaves } = treeLayout(line);
  const texts = line.tokens.map((/** @type {number} */ id) => visible(explain.trace.texts[id] ?? String(id)).slice(0, 14));
  const wide = Math.max(...texts.map((/** @type {string} */ text) => text.length)) * 7.6 + 18;
  const [step, row] = [wide + 46, 36];
  const deepest = Math.max(...Object.values(places).map((p) => p.x));
  const kept = new Set(walked ? line.path : []);
  const place = (/** @type {number} */ n) => ({ x: places[n].x * step + 4, y: places[n].y * row + 20 });
  const drawn = Object.keys(places).map(Number);
  const told = walked
    ? `Draft tree; kept: ${line.path.slice(1).map((/** @type {number} */ n) => texts[n]).join(", ") || "nothing"}`
    : `Draft tree with ${drawn.length} nodes: ${drawn.filter((n) => n).map((n) => `${texts[n]} below ${texts[line.parents[n]]}`).join(", ")}`;
  const svg = make("svg", { width: (deepest + 1) * step + 10, height: leaves * row + 20, role: "img", "aria-label": told });
  for (const n of drawn.filter((node) => node)) {
    const [a, b] = [place(line.parents[n]), place(n)];
    const d = `M${a.x + wide},${a.y} C${a.x + wide + 22},${a.y} ${b.x - 22},${b.y} ${b.x},${b.y}`;
    svg.append(make("path", { class: `edge${kept.has(n) ? " kept" : ""}`, d }));
  }
  for (const n of drawn) {
    const { x, y } = place(n);
    const names = line.sources[n].map((/** @type {number} */ s) => explain.trace.header.sources[s]).join(" and ");
    const score = line.scores && n ? `, path probability ${percent(line.scores[n])}` : "";
    const state = kept.has(n) ? " kept" : walked ? " wrong" : "";
    const color = line.sources[n].length ? `stroke: ${COLORS[line.sources[n][0] % 4]}` : "";
    svg.append(
      make("g", {},
        make("title", {}, `${texts[n]}${n ? `: depth ${places[n].x}, proposed by ${names}${score}` : ": the root, the last token of the text"}`),
        make("rect", { class: `box${state}`, x, y: y - 12, width: wide, height: 24, rx: 5, style: kept.has(n) ? "" : color }),
        make("text", { x: x + 8, y: y + 4 }, texts[n]),
        line.scores && n ? make("text", { class: "small", x: x + wide + 3, y: y + 15 }, percent(line.scores[n])) : ""),
    );
  }
  return svg;
}

/** @param {any} line */
function drawMask(line) {
  const count = line.tokens.length;
  const texts = line.tokens.map((/** @type {number} */ id) => visible(explain.trace.texts[id] ?? String(id)).slice(0, 10));
  const side = 20;
  const [left, top] = [96, 90];
  const svg = make("svg", { width: left + side * count + 60, height: top + side * count + 10, role: "img", "aria-label": `Mask: each of ${count} nodes sees the text, itself and its ancestors` });
  for (let i = 0; i < count; i++) {
    if (i && line.parents[i] < 0) continue; // a spare node
    const seen = new Set();
    for (let n = i; n >= 0; n = line.parents[n]) seen.add(n);
    svg.append(
      make("text", { x: left - 8, y: top + side * i + 15, "text-anchor": "end" }, texts[i]),
      make("text", { transform: `translate(${left + side * i + 14},${top - 6}) rotate(-60)` }, texts[i]),
    );
    for (let j = 0; j < count; j++) {
      const cell = make("rect", { class: `cell${seen.has(j) ? " on" : ""}`, x: left + side * j + 1, y: top + side * i + 1, width: side - 2, height: side - 2 });
      cell.append(make("title", {}, `${texts[i]} ${seen.has(j) ? "sees" : "does not see"} ${texts[j]}`));
      svg.append(cell);
    }
  }
  return svg;
}

/** What the model picked among at every node of the walk. @param {any} line */
function choicesTable(line) {
  const sampled = line.choices.some((/** @type {any} */ choices) => choices[0][2] !== null);
  const head = ["at node", "candidate", "probability", ...(sampled ? ["log-probability", "+ noise", "= sum"] : []), "in the tree", ""];
  const rows = line.choices.flatMap((/** @type {any[]} */ choices, /** @type {number} */ i) => {
    const node = line.path[i];
    const children = line.parents.flatMap((/** @type {number} */ p, /** @type {number} */ n) => (p === node && n ? [line.tokens[n]] : []));
    return choices.map(([id, probability, noise], j) => {
      const log = Math.log(probability);
      const more = sampled ? [fixed(log), fixed(noise), fixed(log + noise)] : [];
      const cells = [j ? "" : visible(explain.trace.texts[line.tokens[node]] ?? ""), visible(explain.trace.texts[id] ?? String(id)), percent(probability), ...more, children.includes(id) ? "drafted" : "no", j ? "" : "pick"];
      return make("tr", { class: j ? "" : "pick" }, cells.map((cell, k) => make("td", { class: k > 1 && k < 3 + more.length ? "number" : "" }, cell)));
    });
  });
  return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Candidates at every node of the walk" },
    make("table", {}, make("thead", {}, make("tr", {}, head.map((h) => make("th", { scope: "col" }, h)))), make("tbody", {}, rows)));
}

/** @param {any} line */
function keptTable(line) {
  const own = explain.fast.filter((token) => token.pass === explain.pass);
  const rows = own.map((token) => make("tr", {}, [
    make("td", {}, make("span", { class: `mark ${kind(token)}` }, visible(token.text))),
    make("td", {}, token.sources.length ? token.sources.map((/** @type {number} */ s) => explain.trace.header.sources[s]).join(" and ") : "bonus token"),
    make("td", { class: "number" }, token.depth || "–"),
    make("td", { class: "number" }, percent(token.probability)),
  ]));
  const ms = (/** @type {number} */ s) => `${(1000 * s).toFixed(1)} ms`;
  return make("div", {},
    make("table", {}, make("thead", {}, make("tr", {}, ["token", "proposed by", "depth", "the model's probability"].map((h) => make("th", { scope: "col" }, h)))), make("tbody", {}, rows)),
    make("p", { class: "note" }, `This pass took ${ms(line.seconds.draft)} for the draft, ${ms(line.seconds.target)} for the model, ${ms(line.seconds.other)} for the rest.${explain.pass ? "" : ` Before it, the prompt was read in ${ms(explain.trace.header.seconds_prefill)}.`}`));
}

function showStep() {
  const { passes, header } = explain.trace;
  const line = passes[explain.pass];
  const count = line.parents.filter((/** @type {number} */ parent) => parent >= 0).length + 1;
  const before = explain.fast.filter((token) => token.pass < explain.pass).length;
  const kept = line.emitted.length;
  const drafted = Math.min(line.path.length - 1, kept);
  const masks = line.masks ? ` ${line.masks} mask rows ride along and write the next draft.` : "";
  const alone = header.sources.map((/** @type {string} */ name, /** @type {number} */ i) => `${line.sources.filter((/** @type {number[]} */ s) => s.length === 1 && s[0] === i).length} by ${name}`);
  const shared = line.sources.filter((/** @type {number[]} */ s) => s.length > 1).length;
  const whose = `${count - 1} guesses: ${alone.join(", ")}${shared ? `, ${shared} by more than one` : ""}`;
  const told = [
    `Pass ${explain.pass + 1}. ${before || "No"} ${before === 1 ? "token is" : "tokens are"} written so far. The last token of ${before ? "the text" : "the prompt"} is the root of the tree.`,
    count > 1 ? `${whose}. The number at a node is the drafter's own estimate that the text goes there.` : "Nothing was drafted in this pass.",
    `One pass over ${count} nodes. A filled cell: the node of this row sees the node of this column. Siblings do not see each other.${masks}`,
    `The model picks a token at each node of the walk${header.temperature > 0 ? ": the largest log-probability plus noise" : ": the most likely one, since T=0"}.`,
    drafted ? `The walk goes down as long as a child holds the pick: ${drafted} of ${count - 1} guesses are right.` : "No child of the root holds the pick: the walk ends at once.",
    `${kept} ${kept === 1 ? "token" : "tokens"} from one pass: ${drafted} drafted${kept > drafted ? ", and the bonus token" : ""}. Plain decoding needs ${kept === 1 ? "one pass for it" : `${kept} passes for them`}.`,
  ];
  at("told").textContent = told[explain.stage];
  const context = () => {
    const place = make("div", { class: "text", tabindex: 0, role: "region", "aria-label": "Text so far" });
    writeText(place, explain.fast.filter((token) => token.pass < explain.pass), Infinity, explain.pass - 1);
    return place;
  };
  const draw = [context, () => drawTree(line, false), () => drawMask(line), () => choicesTable(line), () => drawTree(line, true), () => keptTable(line)];
  const stage = at("stage");
  stage.replaceChildren(draw[explain.stage]());
  const text = stage.querySelector(".text");
  if (text) text.scrollTop = text.scrollHeight;
  at("pass").value = String(explain.pass + 1);
  at("pass").max = String(passes.length);
  at("pass-of").textContent = `of ${passes.length}`;
  [...at("stages").querySelectorAll("button")].forEach((button, i) => {
    if (i === explain.stage) button.setAttribute("aria-current", "step");
    else button.removeAttribute("aria-current");
  });
}

/** @param {number} pass @param {number} stage */
function goTo(pass, stage) {
  const most = explain.trace.passes.length - 1;
  if (!Number.isFinite(pass)) return;
  explain.pass = Math.max(0, Math.min(most, Math.trunc(pass)));
  explain.stage = pass < 0 ? 0 : pass > most ? STAGES.length - 1 : stage;
  const done = explain.stage === STAGES.length - 1 ? explain.pass : explain.pass - 1;
  const clocks = explain.fast.filter((token) => token.pass <= done).map((token) => token.clock);
  explain.time = clocks.length ? Math.max(...clocks) : 0;
  showStep();
  showRace();
}

/** @param {number} by */
function stepBy(by) {
  const place = explain.pass * STAGES.length + explain.stage + by;
  goTo(Math.floor(place / STAGES.length), ((place % STAGES.length) + STAGES.length) % STAGES.length);
}

/** @param {number} now */
function setTime(now) {
  explain.time = now;
  const done = explain.fast.filter((token) => token.clock <= now + 1e-9);
  explain.pass = done.length ? done[done.length - 1].pass : 0;
  explain.stage = done.length ? STAGES.length - 1 : 0;
  showStep();
  showRace();
}

function stop() {
  cancelAnimationFrame(explain.playing);
  explain.playing = 0;
  at("play").textContent = "▶ play";
  at("play").setAttribute("aria-pressed", "false");
}

/** @param {number} stamp */
function tick(stamp) {
  const passed = (stamp - explain.last) / 1000;
  explain.last = stamp;
  const end = endOfRace();
  setTime(Math.min(end, explain.time + passed * Number(at("speed").value)));
  if (explain.time >= end) stop();
  else explain.playing = requestAnimationFrame(tick);
}

function play() {
  if (explain.playing) return stop();
  if (explain.time >= endOfRace()) explain.time = 0;
  at("play").textContent = "❚❚ pause";
  at("play").setAttribute("aria-pressed", "true");
  at("told").setAttribute("aria-live", "off"); // a screen reader would never end
  explain.last = performance.now();
  explain.playing = requestAnimationFrame(tick);
}

/** Where the two texts part, and how near the two tokens were there.
 * @param {number} index */
function partingOf(index) {
  const [fast, plain] = [explain.fast[index], explain.plain[index]];
  const total = (/** @type {any} */ choice) => Math.log(choice[1]) + (choice[2] ?? 0);
  const [own, other] = [fast?.text, plain?.text].map((text) => (fast?.choices ?? []).find((/** @type {any} */ choice) => explain.trace.texts[choice[0]] === text));
  const where = `The texts part at token ${index + 1}`;
  if (!own || !other) return `${where}; the margin is not in the trace. `;
  const margin = Math.abs(total(own) - total(other));
  const noise = { bfloat16: 0.25, float16: 0.03 }[/** @type {string} */ (explain.trace.header.dtype)] ?? 1e-3;
  return margin <= noise
    ? `${where}: the two tokens were ${fixed(margin)} apart in log-probability, within the rounding of ${explain.trace.header.dtype}. `
    : `${where} with a margin of ${fixed(margin)} in log-probability, more than ${explain.trace.header.dtype} rounds: run selfspec audit. `;
}

/** @param {number} index */
function chooseTrace(index) {
  stop();
  explain.trace = DATA.traces[index];
  timeline();
  const names = explain.trace.header.sources.map((/** @type {string} */ name, /** @type {number} */ i) => make("li", {}, make("span", { class: `mark s${i % 4}` }, name)));
  at("legend").replaceChildren(...names, make("li", {}, make("span", { class: "mark bonus" }, "bonus token")), make("li", {}, "no mark: plain decoding"));
  const telling = explain.trace.passes.findIndex((/** @type {any} */ line) => line.emitted.length > 2);
  const [fast, beside] = [explain.fast, explain.plain].map((tokens) => (tokens.length ? tokens[tokens.length - 1].clock : 0));
  const count = explain.trace.passes.length;
  const parted = explain.fast.findIndex((token, i) => token.text !== explain.plain[i]?.text);
  const same = parted < 0 ? "The same text. " : partingOf(parted);
  at("result").textContent = explain.trace.plain
    ? `${same}Measured: speculative decoding was done after ${(1000 * fast).toFixed(0)} ms and ${count} passes, plain decoding after ${(1000 * beside).toFixed(0)} ms and ${explain.plain.length} passes: ${fixed(beside / fast)}x, the prompt included.`
    : "";
  goTo(Math.max(0, telling), telling < 0 ? 0 : 1);
}

function startExplain() {
  if (!DATA.traces.length) return missing("explain", "There is no trace of a run here.", DATA.missing.traces);
  choose(at("trace"), DATA.traces.map((/** @type {any} */ trace, /** @type {number} */ i) => [String(i), traceLabel(trace.header)]));
  at("stages").replaceChildren(...STAGES.map((name, i) => make("li", {}, make("button", { type: "button", onclick: () => { stop(); goTo(explain.pass, i); } }, `${i + 1} ${name}`))));
  at("trace").addEventListener("change", () => chooseTrace(Number(at("trace").value)));
  at("first").addEventListener("click", () => { stop(); goTo(0, 0); });
  at("last").addEventListener("click", () => { stop(); goTo(explain.trace.passes.length - 1, STAGES.length - 1); });
  const step = (/** @type {number} */ by) => { stop(); at("told").setAttribute("aria-live", "polite"); stepBy(by); };
  at("back").addEventListener("click", () => step(-1));
  at("forward").addEventListener("click", () => step(1));
  at("pass").addEventListener("change", () => { stop(); goTo(Math.max(0, at("pass").valueAsNumber - 1), explain.stage); });
  at("play").addEventListener("click", play);
  at("time").addEventListener("input", () => { stop(); setTime(Number(at("time").value)); });
  document.addEventListener("keydown", (event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    const elsewhere = target !== document.body && !at("explain").contains(target);
    if (elsewhere || ["INPUT", "SELECT"].includes(target.tagName) || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
      event.preventDefault();
      step(event.key === "ArrowRight" ? 1 : -1);
    }
  });
  // First what shows most: the first run's target, several drafters in one tree, T=0, fast, and beside plain decoding.
  const pace = (/** @type {any} */ trace) => trace.passes.reduce((/** @type {number} */ n, /** @type {any} */ line) => n + line.emitted.length, 0) / trace.passes.length;
  const worth = (/** @type {any} */ trace) =>
    400 * Number(trace.header.target === DATA.traces[0].header.target) + 200 * Number(trace.plain !== null) + 100 * Number(trace.header.sources.length > 1) + 50 * Number(trace.header.temperature === 0) + Math.min(49, pace(trace));
  const most = Math.max(...DATA.traces.map(worth));
  at("trace").value = String(DATA.traces.findIndex((/** @type {any} */ trace) => worth(trace) === most));
  chooseTrace(Number(at("trace").value));
}
