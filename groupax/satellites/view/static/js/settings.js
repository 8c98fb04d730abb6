// The settings of the runs with their machines and versions, and their differences.

import { ask } from "./api.js";
import { debounced, drawn, el, empty, failure, fill, plural, select, visible } from "./dom.js";
import { shortName, shownRuns } from "./state.js";

const SHOWN = { differing: "what differs between runs", changed: "what differs from the defaults", all: "all settings" };
const MAX_CHARACTERS = 2000; // of a value

export class Settings {
  constructor(root) {
    this.root = root;
    this.search = el("input", { type: "search", name: "search", placeholder: "Find a setting  ( / )", "aria-label": "Find a setting", on: { input: debounced(() => this.draw(), 100) } });
    this.show = "differing";
    this.body = el("div");
    fill(root, el("h1", { class: "sr" }, "Settings"),
      el("div", { class: "toolbar" }, select("Show", Object.entries(SHOWN), this.show, (value) => { this.show = value; this.draw(); }, "show"), this.search), this.body);
  }

  async start() {
    try {
      const found = await ask("config");
      const summary = JSON.stringify([found, shownRuns()]);
      if (summary === this.summary) return;
      this.summary = summary;
      this.found = found;
      this.draw();
      drawn();
    } catch (error) {
      fill(this.body, failure(error, () => this.start()));
    }
  }

  draw() {
    if (!this.found) return;
    const runs = shownRuns().filter((run) => run in this.found);
    const settings = runs.map((run) => ({ ...prefixed(this.found[run].command), ...this.found[run].config, ...ofMachine(this.found[run].machine) }));
    const names = [...new Set(settings.flatMap((each) => Object.keys(each)))];
    const texts = new Map(names.map((name) => [name, settings.map((each) => (name in each ? JSON.stringify(each[name]) : null))]));
    const differs = (name) => new Set(texts.get(name)).size > 1;
    const isChanged = (run, name) => name in this.found[run].defaults;
    const query = this.search.value.trim().toLowerCase();
    const numDiffering = names.filter(differs).length;
    const isAsked = {
      differing: (name) => query || runs.length < 2 || differs(name),
      changed: (name) => runs.some((run) => isChanged(run, name)),
      all: () => true,
    }[this.show];
    const shown = names.filter((name) => isAsked(name) && name.toLowerCase().includes(query));
    const faults = runs.filter((run) => this.found[run].fault).map((run) => el("p", { class: "summary failed" }, visible(this.found[run].fault)));
    if (!names.length) {
      fill(this.body, faults, empty("No settings", "No selected run has a config.json yet."));
      return;
    }
    const summary = runs.length < 2 ? `${plural(names.length, "setting")} of ${runs[0]}; choose two runs to compare` : `${plural(numDiffering, "setting")} of ${names.length} ${numDiffering === 1 ? "differs" : "differ"} between ${plural(runs.length, "run")}`;
    fill(this.body, faults, el("p", { class: "summary", role: "status" }, summary),
      shown.length
        ? el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of settings" }, el("table", { class: "data settings" },
          el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Setting"), runs.map((run) => el("th", { scope: "col", title: visible(run) }, visible(shortName(run)))))),
          el("tbody", {}, shown.map((name) => el("tr", { class: runs.length > 1 && differs(name) ? "differs" : "" }, el("th", { scope: "row" }, visible(name)),
            texts.get(name).map((text, index) => el("td", { data: { run: runs[index] } }, text === null ? el("i", {}, "not set") : this.value(runs[index], name, text))))))))
        : empty("No differences", query ? `No setting has “${query}” in its name.` : this.show === "changed" ? "These runs have the defaults." : "These runs have the same settings."));
  }

  /** A value, bold where the default is another one, which the list of such settings shows too. */
  value(run, name, text) {
    const { defaults } = this.found[run];
    const value = visible(text.slice(0, MAX_CHARACTERS));
    if (!(name in defaults)) return value;
    const other = `default ${visible((JSON.stringify(defaults[name]) ?? "none").slice(0, MAX_CHARACTERS))}`;
    return [el("b", { title: other }, value), this.show === "changed" && el("small", {}, ` ${other}`)];
  }

  update() {
    return this.start();
  }
}

function ofMachine(machine) {
  return Object.fromEntries(Object.entries(machine).map(([name, value]) => [`machine: ${name}`, value]));
}

function prefixed(command) {
  return Object.fromEntries(Object.entries(command).map(([name, value]) => [`--${name}`, value]));
}
