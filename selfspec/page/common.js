// What all sections use: elements, text that shows what it holds, the page's data.

const DATA = JSON.parse(/** @type {HTMLElement} */ (document.getElementById("data")).textContent || "{}");
const SVG = "http://www.w3.org/2000/svg";

/** @param {string} id @returns {any} */
const at = (id) => document.getElementById(id);

/** An element; children that are no nodes become text, never markup.
 * @param {string} tag @param {Record<string, any>} attributes @param {...any} children @returns {any} */
function make(tag, attributes = {}, ...children) {
  const drawn = ["svg", "g", "rect", "path", "text", "title", "line"].includes(tag);
  const found = drawn ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) found.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) found.setAttribute(name, String(value));
  }
  found.append(...children.flat().map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return found;
}

/** A token in one line: white space, control characters and marks of direction become visible. @param {string} text */
function visible(text) {
  const shown = text.replace(
    /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\uffff]/g,
    (c) => (c === "\n" ? "↵" : c === "\t" ? "→" : c === "\r" ? "␍" : `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`),
  );
  return shown.replace(/ /g, "·") || "∅";
}

/** The same for running text, where line breaks and spaces stay. @param {string} text */
function running(text) {
  return text.replace(
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\uffff]/g,
    (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}

/** @param {number} value @param {number} digits */
const fixed = (value, digits = 2) => (Number.isFinite(value) ? value.toFixed(digits) : "–");

/** @param {number} p */
const percent = (p) => (p >= 0.1 ? `${(100 * p).toFixed(0)}%` : p >= 0.001 ? `${(100 * p).toFixed(1)}%` : "<0.1%");

/** @param {HTMLSelectElement} select @param {[string, string][]} choices value and label; what was chosen stays, if it can */
function choose(select, choices) {
  const before = select.value;
  select.replaceChildren(...choices.map(([value, label]) => make("option", { value }, label)));
  if (choices.some(([value]) => value === before)) select.value = before;
}

/** @template T @param {T[]} values @returns {T[]} */
const unique = (values) => [...new Set(values)];

/** Show a section's missing part and the command that makes it. @param {string} id @param {string} what @param {string} why */
function missing(id, what, why) {
  const section = at(id);
  const note = section.querySelector(".missing");
  note.hidden = false;
  note.replaceChildren(make("p", {}, what), make("p", {}, "This makes it: ", make("code", {}, why)));
  section.querySelector(".body").hidden = true;
}

/** The width that a chart has. @param {HTMLElement} place */
const widthOf = (place) => Math.max(300, Math.min(1700, place.clientWidth || 600));

const COLORS = ["var(--s0)", "var(--s1)", "var(--s2)", "var(--s3)"];
