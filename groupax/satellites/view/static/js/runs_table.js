// All runs as a table that can be sorted and filtered, with the settings in which they differ.

import { ask } from "./api.js";
import { colourRuns, plain, settingsOf } from "./coloring.js";
import { debounced, drawn, el, empty, failure, fill, plural, select, shown, visible } from "./dom.js";
import { compact, directionOf, duration, tagsOf } from "./overview.js";
import { address, app, chooseRuns, mentions, runColour, shortName, shownRuns, store, stored, toggleRun, unread } from "./state.js";

const MAX_SETTINGS = 12; // columns of settings
const SEVERITIES = ["error", "warning", "note"];
const NOT_COMPARED = new Set(["output_dir", "run_name"]);

// Columns: title, the value to sort by, and what is shown.
const COLUMNS = [
  ["Run", ({ name }) => name, null],
  ["Status", ({ state }) => state.status, ({ state }) => el("span", { class: `status ${state.status}`, title: visible(state.ending) }, state.status)],
  ["Diagnostics", ({ name }) => severity(name), ({ name }) => diagnosticsCell(name)],
  ["Step", ({ row, state }) => row.step ?? state.last_step, ({ row, state }) => stepCell(row, state)],
  ["Last", ({ row }) => row.last, ({ row }) => shown(row.last, 3), "The last logged reward, or loss"],
  ["Best", ({ row }) => row.best, ({ row }) => shown(row.best, 3), "The best logged reward, or loss"],
  ["Held out", ({ row }) => row.held_out?.after.value ?? null, ({ row }) => heldOut(row.held_out), "Before and after training, or the first and the last evaluation"],
  ["Change", ({ row }) => row.held_out?.difference.value ?? null, ({ row }) => changeCell(row.held_out)],
  ["Time", ({ row }) => row.elapsed_s, ({ row }) => (row.elapsed_s === null ? "–" : duration(row.elapsed_s)), "Time spent in steps"],
  ["Tokens", ({ row }) => row.tokens, ({ row }) => (row.tokens === null ? "–" : compact(row.tokens))],
];

export class RunsTable {
  constructor(root) {
    this.root = root;
    this.sort = stored("sort-runs", { title: "Run", isDown: false });
    this.search = el("input", { type: "search", name: "search", placeholder: "Filter: name, tag or setting=value  ( / )", "aria-label": "Filter runs", class: "wide-search", on: { input: debounced(() => this.draw(), 80) } });
    this.count = el("span", { class: "hint", role: "status" });
    this.show = el("button", { type: "button", title: "Show the runs of this table in all views, and no others", on: { click: () => this.choose(this.listed.map(({ name }) => name)) } }, "Show these");
    this.colours = el("span");
    this.body = el("div");
    fill(root, el("h1", { class: "sr" }, "Runs"), el("div", { class: "toolbar" }, this.search, this.show, this.colours, this.count), this.body);
  }

  async start() {
    try {
      const [rows, settings] = await Promise.all([ask("table"), ask("config")]);
      if (this.closed) return;
      const signature = JSON.stringify([rows, settings, app.runs]);
      if (signature === this.signature) return;
      Object.assign(this, { rows, settings, signature });
      this.offerColours();
      this.draw();
      drawn();
    } catch (error) {
      if (!this.closed) fill(this.body, failure(error, () => this.start()));
    }
  }

  /** Offers the settings in which runs differ as what their colours stand for; rebuilt only if these change, as it may be open. */
  offerColours() {
    const chosen = stored("colour-by", "");
    const names = [...new Set([...differing(Object.values(this.settings).map((each) => ({ config: settingsOf(each) }))), ...(chosen ? [chosen] : [])])];
    if (names.join("\n") === this.offered) return;
    this.offered = names.join("\n");
    const options = [["", "run"], ...names.map((name) => [name, visible(name)])];
    fill(this.colours, names.length > 0 && select("Color by", options, chosen, async (name) => {
      store("colour-by", name);
      await colourRuns();
      this.changed();
    }, "colour-by"));
  }

  /** Rows of the runs that match the filter: every word must be in a name, a tag or a note, or be a setting and a value. */
  entries() {
    const words = this.search.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    return Object.keys(app.runs).filter((name) => name in this.rows).map((name) => {
      return { name, row: this.rows[name], state: app.runs[name], config: settingsOf(this.settings[name]) };
    }).filter(({ name, config }) => words.every((word) => mentions(name, word)
      || (word.includes("=") && Object.entries(config).some(([key, value]) => `${key}=${plain(value)}`.toLowerCase() === word))));
  }

  draw() {
    if (!this.rows) return;
    const entries = this.entries();
    const settings = differing(entries);
    const columns = [...COLUMNS, ...settings.map((name) => [name, ({ config }) => config[name] ?? null, ({ config }) => (config[name] !== undefined && config[name] !== null ? visible(plain(config[name]).slice(0, 80)) : "–"), `Setting ${name}`, true])];
    const by = columns.find(([title]) => title === this.sort.title) ?? columns[0];
    this.listed = sorted(entries, by[1], this.sort.isDown);
    this.count.textContent = entries.length === Object.keys(app.runs).length ? plural(entries.length, "run") : `${entries.length} of ${plural(Object.keys(app.runs).length, "run")}`;
    if (!entries.length) {
      fill(this.body, empty("No matching run", "No run matches the filter."));
      return;
    }
    const chosen = new Set(shownRuns());
    fill(this.body, el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of runs" }, el("table", { class: "data runs-table" },
      el("thead", {}, el("tr", {}, columns.map((column) => this.heading(column, by)))),
      el("tbody", {}, this.listed.map((entry) => el("tr", { class: chosen.has(entry.name) ? "" : "off" }, columns.map((column) => this.cell(column, entry, chosen))))))));
  }

  heading([title, , , note, isSetting], by) {
    const isSorted = by[0] === title;
    const arrow = isSorted ? (this.sort.isDown ? " ↓" : " ↑") : "";
    return el("th", { scope: "col", "aria-sort": isSorted ? (this.sort.isDown ? "descending" : "ascending") : "none", class: isSetting ? "setting" : "" },
      el("button", { type: "button", class: "sort", title: note, on: { click: () => this.sortBy(title) } }, `${visible(title)}${arrow}`));
  }

  cell([title, value, contents, , isSetting], entry, chosen) {
    if (title === "Run") return el("th", { scope: "row" }, this.name(entry, chosen));
    const isNumber = typeof value(entry) === "number" && !["Diagnostics", "Held out"].includes(title);
    return el("td", { class: `${isNumber ? "number" : ""} ${isSetting ? "setting" : ""}`, data: { label: visible(title) } }, contents(entry));
  }

  name({ name }, chosen) {
    const dot = el("i", { class: "dot" });
    dot.style.setProperty("--key", runColour(name));
    const box = el("input", { type: "checkbox", checked: chosen.has(name), "aria-label": `Show ${visible(name)}`, name: `table-${name}`, on: { change: () => {
      toggleRun(name);
      this.changed();
    } } });
    return el("div", { class: "run-name" }, box, dot, el("a", { href: address("overview", { run: name }), title: name }, visible(shortName(name))), tagsOf(name));
  }

  sortBy(title) {
    const isSame = this.sort.title === title;
    this.sort = { title, isDown: isSame ? !this.sort.isDown : !["Run", "Status"].includes(title) };
    store("sort-runs", this.sort);
    this.draw();
  }

  choose(names) {
    chooseRuns(names);
    this.changed();
  }

  changed() {
    dispatchEvent(new CustomEvent("groupax-runs"));
    this.draw();
  }

  themed() {
    this.draw();
  }

  async update() {
    this.signature = null;
    await this.start();
  }

  close() {
    this.closed = true;
  }
}

/** Returns the names of the settings in which runs differ, those that are no longer than a cell. */
function differing(entries) {
  const names = new Set(entries.flatMap(({ config }) => Object.keys(config)));
  return [...names].filter((name) => {
    if (NOT_COMPARED.has(name)) return false;
    return new Set(entries.map(({ config }) => plain(config[name]))).size > 1;
  }).slice(0, MAX_SETTINGS);
}

/** Sorts by a value; runs without one come last in either direction. */
function sorted(entries, value, isDown) {
  const compared = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : plain(a).localeCompare(plain(b), "en", { numeric: true }));
  return [...entries].sort((first, second) => {
    const [a, b] = [value(first), value(second)];
    if (a === null || a === undefined || b === null || b === undefined) return Number(a === null || a === undefined) - Number(b === null || b === undefined);
    return isDown ? compared(b, a) : compared(a, b);
  });
}

function severity(name) {
  const found = unread(name).map(([, each]) => SEVERITIES.indexOf(each));
  return found.length ? 10 * (3 - Math.min(...found)) + found.length : 0;
}

function diagnosticsCell(name) {
  const found = unread(name).map(([, each]) => each);
  const parts = SEVERITIES.map((each) => [each, found.filter((other) => other === each).length]).filter(([, number]) => number);
  return parts.length ? el("a", { href: address("overview", { run: name }), class: "plain" }, parts.map(([each, number]) => el("span", { class: `severity ${each}` }, plural(number, each)))) : "–";
}

function stepCell(row, state) {
  const step = row.step ?? state.last_step;
  return step === null ? "–" : row.num_steps ? `${shown(step)} / ${shown(row.num_steps)}` : shown(step);
}

function heldOut(change) {
  return change ? el("span", { title: `${change.set} ${change.name}` }, `${shown(change.before.value, 3)} → ${shown(change.after.value, 3)} `, el("small", {}, change.name)) : "–";
}

function changeCell(change) {
  const value = change?.difference.value;
  if (value === null || value === undefined) return "–";
  const isEstimated = change.difference.low !== null;
  const direction = isEstimated ? directionOf(change.difference, change.p_value) : value > 0 ? "up" : value < 0 ? "down" : "";
  return el("span", { class: direction }, `${value > 0 ? "+" : ""}${shown(value, 3)}`);
}
