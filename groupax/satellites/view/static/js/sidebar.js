// The list of runs beside the views: which of them are shown.

import { colourRuns } from "./coloring.js";
import { debounced, el, fill, plural, shortPaths, shown, visible } from "./dom.js";
import { app, chooseRuns, mentions, runColour, shortName, shownRuns, stored, toggleRun } from "./state.js";

const NUM_FILTERED = 6; // runs from which on there is a filter
const MAX_ENDING = 120; // characters of why a run has ended
const NUM_COMPACT = 10; // runs from which on a card has only the name

export class Sidebar {
  /** @param {HTMLElement} root @param {(names: string[]) => void} changed is called after the selection has changed */
  constructor(root, changed) {
    this.changed = changed;
    this.cards = new Map(); // by run name
    this.query = "";
    this.search = el("input", { type: "search", name: "runs-filter", placeholder: "Filter runs", "aria-label": "Filter runs", on: {
      input: debounced(() => { this.query = this.search.value.trim().toLowerCase(); this.draw(); }, 80),
    } });
    const choice = (text, title, names) => el("button", { type: "button", class: "quiet", title, on: { click: () => this.choose(names()) } }, text);
    this.choices = el("div", { class: "choices", role: "group", "aria-label": "Show runs" },
      choice("All", "Show all runs of the list", () => this.listed()),
      choice("None", "Show no run", () => []),
      choice("Invert", "Show the hidden runs of the list", () => this.listed().filter((name) => app.hidden.has(name))));
    this.count = el("span", { class: "count-of-runs" });
    this.list = el("ul", { class: "runs" });
    this.drawer = el("details", { class: "drawer" }, el("summary", {}, el("h2", {}, "Runs"), this.count), this.search, this.choices, this.list);
    const isWide = matchMedia("(min-width: 901px)");
    const folded = () => { this.drawer.open = isWide.matches; };
    isWide.addEventListener("change", folded);
    folded();
    fill(root, this.drawer);
  }

  listed() {
    return Object.keys(app.runs).filter((name) => mentions(name, this.query));
  }

  choose(names) {
    chooseRuns(names);
    this.draw();
    this.changed(Object.keys(app.runs));
  }

  card(name) {
    const box = el("input", { type: "checkbox", name: `run-${name}`, on: { change: () => {
      toggleRun(name);
      this.draw();
      this.changed([name]);
    } } });
    const [status, facts, fault, bad] = [el("span"), el("div", { class: "facts" }), el("p", { class: "fault" }), el("p", { class: "fault" })];
    const title = el("span", { class: "name" });
    const label = el("label", { title: `${visible(name)}\n${app.runs[name].path}` }, box, title);
    const only = el("button", { type: "button", class: "only quiet", title: "Show this run only", "aria-label": `Show ${visible(name)} only`, on: { click: () => this.choose([name]) } }, "only");
    return { item: el("li", {}, el("div", { class: "run-line" }, label, only, status), facts, fault, bad), title, box, status, facts, fault, bad };
  }

  /** Cards are made once and then changed in place: a click may be under way. */
  draw() {
    const chosen = new Set(shownRuns());
    const names = Object.keys(app.runs);
    if (names.join("\n") !== [...this.cards.keys()].join("\n")) {
      this.cards = new Map(names.map((name) => [name, this.cards.get(name) ?? this.card(name)]));
      fill(this.list, [...this.cards.values()].map((card) => card.item));
      if (stored("colour-by", "")) this.colour();
    }
    this.search.hidden = names.length < NUM_FILTERED;
    this.choices.hidden = names.length < 2;
    this.list.classList.toggle("compact", names.length > NUM_COMPACT);
    this.count.textContent = names.length > 1 ? `${chosen.size} of ${plural(names.length, "run")}` : "";
    const listed = new Set(this.listed());
    for (const [name, { title }] of this.cards) {
      const short = visible(shortName(name));
      if (title.textContent !== short) title.textContent = short;
    }
    for (const [name, run] of Object.entries(app.runs)) this.drawCard(name, run, chosen.has(name), listed.has(name));
  }

  /** New runs get the colour of their setting. */
  async colour() {
    try {
      await colourRuns();
    } catch {
      return; // without an answer they keep their own colours; the page tells that the server is gone
    }
    this.draw();
    this.changed(Object.keys(app.runs));
  }

  drawCard(name, run, isChosen, isListed) {
    const { item, box, status, facts, fault, bad } = this.cards.get(name);
    box.checked = isChosen;
    item.hidden = !isListed;
    item.className = isChosen ? "" : "off";
    item.style.setProperty("--key", runColour(name));
    status.className = `status ${run.status}`;
    status.textContent = run.status;
    status.title = visible(run.ending);
    const about = ["reward", "loss"].find((each) => each in run.latest);
    const latest = about ? ` · ${about} ${shown(run.latest[about], 3)}` : "";
    facts.textContent = run.last_step === null ? "no step yet" : `step ${shown(run.last_step)}${latest}`;
    const ending = run.status === "done" ? "" : shortPaths(run.ending.split("\n", 1)[0]); // without its traceback
    fault.textContent = visible(run.fault || (ending.length > MAX_ENDING ? `${ending.slice(0, MAX_ENDING)}…` : ending));
    bad.textContent = run.num_bad_lines > 0 ? `${run.num_bad_lines} lines could not be read` : "";
  }
}
