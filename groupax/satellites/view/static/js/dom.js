// Elements and text nodes. Neither this nor any other module turns a string into markup.

/** Creates an element with properties (`class`, `on` for listeners, `data`, else attributes) and children. */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;

/** Returns a text with control characters and direction marks made visible. */
export function visible(text) {
  return text.replace(CONTROL, (character) => {
    const code = character.charCodeAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    if (code === 0x7f) return "\u2421";
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** Returns a table whose rows become blocks on a phone, with the title of its column above each cell. */
export function stacked(table) {
  const titles = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  for (const row of table.tBodies[0].rows) [...row.cells].forEach((cell, index) => { cell.dataset.label = titles[index]; });
  table.classList.add("stacked");
  return table;
}

const PATH = /(\/[^\s/:]+)(?:\/[^\s/:]+){2,}((?:\/[^\s/:]+){2})/g;

/** Cuts the middle out of long paths. */
export function shortPaths(text) {
  return text.replace(PATH, "$1/…$2");
}

/** Formats a number for readers. */
export function shown(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 6 });
}

export function plural(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}

/** A placeholder that says what is missing, and why or what to do. */
export function empty(title, text, ...more) {
  return el("div", { class: "empty" }, el("h2", {}, title), el("p", {}, text), ...more);
}

export function failure(error, retry) {
  return el(
    "div",
    { class: "empty failed", role: "alert" },
    el("h2", {}, "Something went wrong"),
    el("p", {}, visible(error.message)),
    retry && el("button", { type: "button", on: { click: retry } }, "Try again"),
  );
}

/** Notes that a view shows its data, with the milliseconds since the page was opened, for those who measure it. */
export function drawn() {
  document.documentElement.dataset.drawn = String(Math.round(performance.now()));
}

export function debounced(call, milliseconds) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...values), milliseconds);
  };
}

export function select(label, options, value, change, name) {
  const field = el(
    "select",
    { on: { change: (event) => change(event.target.value) }, name },
    options.map(([key, text]) => el("option", { value: key }, text)),
  );
  field.value = value;
  return el("label", { class: "field" }, el("span", {}, label), field);
}
