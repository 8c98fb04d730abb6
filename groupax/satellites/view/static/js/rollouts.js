// The rollouts of a step: a list of groups, one of which is open.

import { ask } from "./api.js";
import { debounced, drawn, el, empty, failure, fill, plural, select, shown, visible } from "./dom.js";
import { Group } from "./group.js";
import { RunChoice } from "./runs.js";
import { SearchAll } from "./search_all.js";
import { go, oneRun } from "./state.js";
import { Strip } from "./strip.js";

const FILTERS = {
  all: ["all groups", () => true],
  zero: ["no variance", (group) => group.zero_variance],
  varied: ["with variance", (group) => !group.zero_variance],
  truncated: ["with truncated completions", (group) => group.num_truncated > 0],
  disagree: ["rewards disagree", (group) => group.disagree],
};
const ORDERS = {
  order: ["in order", () => 0],
  highest: ["highest reward", (a, b) => (b.highest ?? -Infinity) - (a.highest ?? -Infinity)],
  best: ["highest mean reward", (a, b) => (b.mean ?? -Infinity) - (a.mean ?? -Infinity)],
  lowest: ["lowest mean reward", (a, b) => (a.mean ?? Infinity) - (b.mean ?? Infinity)],
  spread: ["largest spread", (a, b) => (b.std ?? -1) - (a.std ?? -1)],
  longest: ["longest", (a, b) => b.mean_tokens - a.mean_tokens],
};

const NUM_LISTED = 200; // groups that are added to the list at a time

export class Rollouts {
  constructor(root) {
    this.root = root;
    this.filter = "all";
    this.sort = "spread";
    this.query = "";
    this.showsHits = false; // whether hits of a search in all steps replace the group
    this.steps = [];
    this.list = el("ol", { class: "groups", role: "listbox", "aria-label": "Groups of this step", tabindex: "0", on: {
      scroll: () => { if (this.list.scrollTop + this.list.clientHeight > this.list.scrollHeight - 400) this.addItems(); },
    } });
    this.detail = el("div", { class: "detail" });
    this.group = new Group(this.detail);
    this.searchAll = new SearchAll((link) => this.follow(link));
    this.summary = el("p", { class: "summary", role: "status" });
    this.tools = el("div", { class: "toolbar" });
    this.strips = [["Reward", (group) => group.totals], ["Tokens", (group) => group.lengths]].map(([label, valuesOf]) => new Strip(label, valuesOf, () => this.setList({})));
    this.body = el("div", { class: "browser" },
      el("div", { class: "list" }, el("div", { class: "strips" }, this.strips.map((strip) => strip.root)), this.summary, this.list), this.detail);
    this.nothing = el("div"); // replaces the body
    fill(root, el("h1", { class: "sr" }, "Rollouts"), this.tools, this.body, this.nothing);
    this.layOutTools();
    this.goSoon = debounced((step) => this.goTo({ step, prompt: null }), 120);
  }

  layOutTools() {
    this.runChoice = new RunChoice("rollouts");
    this.number = el("input", { type: "number", name: "step", min: "0", "aria-label": "Step", on: { change: () => this.goTo({ step: this.nearest(Number(this.number.value)), prompt: null }) } });
    this.slider = el("input", { type: "range", min: "0", name: "step-slider", "aria-label": "Step", on: {
      input: () => {
        this.number.value = String(this.steps[Number(this.slider.value)]);
        this.goSoon(this.steps[Number(this.slider.value)]);
      },
    } });
    this.count = el("span", { class: "hint" });
    this.search = el("input", { type: "search", name: "search", placeholder: "Search texts  ( / )", "aria-label": "Search prompts and completions", on: {
      input: debounced(() => this.searched(), 200),
      keydown: (event) => event.key === "Enter" && event.shiftKey && this.everywhere(),
    } });
    this.all = el("button", { type: "button", title: "Search the rollouts of all steps (Shift+Enter)", on: { click: () => this.everywhere() } }, "In all steps");
    fill(
      this.tools,
      this.runChoice.element,
      el("div", { class: "stepper", role: "group", "aria-label": "Step" },
        el("button", { type: "button", "aria-label": "Previous step", title: "←", on: { click: () => this.move(-1) } }, "‹"),
        this.number,
        el("button", { type: "button", "aria-label": "Next step", title: "→", on: { click: () => this.move(1) } }, "›"),
        el("button", { type: "button", title: "Newest step (End)", on: { click: () => this.move(Infinity) } }, "Newest"),
        this.slider, this.count),
      select("Show", Object.entries(FILTERS).map(([key, [text]]) => [key, text]), this.filter, (value) => this.setList({ filter: value }), "filter"),
      select("Order", Object.entries(ORDERS).map(([key, [text]]) => [key, text]), this.sort, (value) => this.setList({ sort: value }), "sort"),
      el("div", { class: "joined needs-server" }, this.search, this.all),
    );
  }

  /** The address has changed. */
  async moved(parameters) {
    this.leaveSearch();
    if (parameters.sort in ORDERS && parameters.sort !== this.sort) {
      this.tools.querySelector('[name="sort"]').value = parameters.sort;
      this.setList({ sort: parameters.sort });
    }
    this.parameters = parameters;
    this.run = oneRun(parameters);
    if (this.run === null) return;
    this.runChoice.show(this.run);
    try {
      if (!(await this.readSteps()) || !this.steps.length) return;
      const step = this.nearest("step" in parameters ? Number(parameters.step) : Infinity);
      const isNew = this.run !== this.shownRun || step !== this.step;
      this.step = step;
      this.shownRun = this.run;
      this.number.value = String(step);
      this.slider.value = String(this.steps.indexOf(step));
      if (isNew) await this.readStep();
      else this.open();
    } catch (error) {
      if (this.parameters === parameters) this.fail(error);
    }
  }

  /** Whether the answer is still of use: the address may have changed meanwhile. */
  async readSteps() {
    const { parameters } = this;
    const steps = await ask("steps", { run: this.run });
    if (this.parameters !== parameters) return false;
    this.steps = steps;
    this.body.hidden = !steps.length;
    this.nothing.replaceChildren();
    if (!steps.length) {
      fill(this.nothing, empty("No rollouts yet", `${this.run} has logged no rollouts. Set log_completions to log them every log_completions_steps steps.`));
      return true;
    }
    this.slider.max = String(this.steps.length - 1);
    this.count.textContent = `${plural(this.steps.length, "step")} logged, ${this.steps[0]} to ${this.steps[this.steps.length - 1]}`;
    return true;
  }

  async readStep() {
    const { run, step, query } = this;
    const found = await ask("step", { run, step, q: query });
    if (this.run !== run || this.step !== step || this.query !== query) return;
    this.found = found;
    this.nothing.replaceChildren();
    this.body.hidden = false;
    for (const strip of this.strips) strip.show(found.groups);
    this.layOutList();
    document.documentElement.dataset.step = String(step);
    drawn();
  }

  setList(change) {
    Object.assign(this, change);
    if (this.found) this.layOutList(true);
  }

  searched() {
    const query = this.search.value.trim();
    if (query === this.query) return;
    this.query = query;
    this.leaveSearch();
    if (this.steps.length) this.readStep().catch((error) => this.fail(error));
  }

  /** Lists the groups; with `keeps` the open one stays as it is, if it is still listed. */
  layOutList(keeps = false) {
    const { groups, matching } = this.found;
    const hits = matching && new Set(matching);
    const totals = groups.flatMap((group) => group.totals).filter((total) => total !== null);
    const low = totals.reduce((least, total) => Math.min(least, total), Infinity);
    const high = totals.reduce((most, total) => Math.max(most, total), -Infinity);
    this.shown = groups
      .filter((group) => FILTERS[this.filter][1](group) && this.fitsRanges(group) && (!hits || hits.has(group.prompt_index)))
      .sort(ORDERS[this.sort][1]);
    const of = this.shown.length === groups.length ? plural(groups.length, "group") : `${this.shown.length} of ${plural(groups.length, "group")}`;
    fill(this.summary, `${of}, ${plural(this.found.num_rows, "completion")} `, totals.length > 0 && legend(low, high));
    this.range = [low, high];
    this.list.replaceChildren();
    this.addItems();
    if (this.showsHits) return;
    if (this.shown.length) this.open(keeps);
    else {
      this.group.leave();
      fill(this.detail, empty("No matching group", "No group of this step matches the filters and the search.", el("button", { type: "button", on: { click: () => this.clear() } }, "Show all groups")));
    }
  }

  /** Whether a completion of a group is in the ranges of all strips. */
  fitsRanges(group) {
    const columns = this.strips.map((strip) => strip.valuesOf(group));
    return group.totals.some((total, index) => this.strips.every((strip, number) => strip.holds(columns[number][index])));
  }

  /** Adds the next groups to the list: those of a large step come as the list is scrolled. */
  addItems(number = NUM_LISTED) {
    const first = this.list.children.length;
    this.list.append(...this.shown.slice(first, first + number).map((group) => this.item(group, ...this.range)));
  }

  item(group, low, high) {
    const squares = group.totals.slice(0, 64).map((total) => {
      const square = el("i", { class: `square ${total === null ? "none" : high > low ? "" : "same"}` });
      if (high > low && total !== null) square.style.setProperty("--part", String((total - low) / (high - low)));
      return square;
    });
    return el("li", { role: "option", id: `group-${group.prompt_index}`, data: { prompt: String(group.prompt_index) }, "aria-selected": "false", on: { click: () => this.goTo({ prompt: group.prompt_index }) } },
      el("div", { class: "line" }, el("b", {}, `${group.prompt_index}`), el("span", { class: "mean" }, shown(group.mean, 3)),
        group.zero_variance && el("span", { class: "badge" }, "no variance"),
        group.num_truncated > 0 && el("span", { class: "badge warn" }, `${group.num_truncated} truncated`),
        group.disagree && el("span", { class: "badge note" }, "disagree")),
      el("div", { class: "preview" }, visible(group.preview)),
      el("div", { class: "squares", "aria-hidden": "true" }, squares));
  }

  /** Show the group that the address names, or the first of the list; with `keeps` the one that is open, if it is listed. */
  open(keeps = false) {
    const named = "prompt" in this.parameters ? Number(this.parameters.prompt) : null;
    const wanted = keeps && this.shown.some((group) => this.group.shows(group.prompt_index)) ? this.prompt : named;
    const chosen = this.shown.find((group) => group.prompt_index === wanted) ?? this.shown[0];
    if (!chosen) return;
    const place = this.shown.indexOf(chosen);
    if (place >= this.list.children.length) this.addItems(place + NUM_LISTED - this.list.children.length);
    for (const item of this.list.children) item.setAttribute("aria-selected", String(item.dataset.prompt === String(chosen.prompt_index)));
    this.list.setAttribute("aria-activedescendant", `group-${chosen.prompt_index}`);
    this.list.querySelector('[aria-selected="true"]')?.scrollIntoView({ block: "nearest" });
    this.prompt = chosen.prompt_index;
    if (keeps && this.group.shows(chosen.prompt_index)) return;
    this.group.show({ run: this.run, step: this.step, prompt: chosen.prompt_index }, this.parameters.sample);
  }

  goTo(change) {
    go("rollouts", { run: this.run, step: this.step, prompt: this.prompt, ...change }, true);
  }

  move(by) {
    if (!this.steps.length) return;
    const index = Math.min(Math.max(this.steps.indexOf(this.step) + by, 0), this.steps.length - 1);
    this.goTo({ step: this.steps[index] });
  }

  movePrompt(by) {
    const index = this.shown?.findIndex((group) => group.prompt_index === this.prompt) ?? -1;
    const next = this.shown?.[Math.min(Math.max(index + by, 0), this.shown.length - 1)];
    if (next) this.goTo({ prompt: next.prompt_index });
  }

  nearest(step) {
    return this.steps.reduce((best, each) => (Math.abs(each - step) < Math.abs(best - step) ? each : best), this.steps[this.steps.length - 1]);
  }

  clear() {
    this.search.value = "";
    this.query = "";
    this.filter = "all";
    this.tools.querySelector('[name="filter"]').value = "all";
    for (const strip of this.strips) strip.clear();
    this.leaveSearch();
    this.readStep().catch((error) => this.fail(error));
  }

  /** Searches all steps, by the text of the search field and further conditions. */
  async everywhere() {
    const query = this.search.value.trim();
    this.stopSearch();
    this.showsHits = true;
    this.group.leave();
    if (query !== this.query) {
      this.query = query;
      this.readStep().catch((error) => this.fail(error));
    }
    fill(this.detail, this.searchAll.root);
    this.searchAll.start(this.run, query, this.steps.length);
  }

  /** The search ends with the hit that is opened; one whose group was open before changes no address. */
  follow(link) {
    this.search.value = "";
    this.query = "";
    this.step = null;
    if (link.hash === location.hash) this.moved(this.parameters);
  }

  /** A group takes the place of a search's hits again. */
  leaveSearch() {
    this.stopSearch();
    this.showsHits = false;
  }

  stopSearch() {
    this.searchAll.stop();
  }

  async update(changed) {
    this.runChoice.show(this.run);
    if (!changed.includes(this.run)) return;
    const { parameters } = this;
    const first = !this.steps.length;
    try {
      if (!(await this.readSteps())) return;
      if (first && this.steps.length) await this.moved(parameters);
      else if (this.steps.length) this.slider.value = String(this.steps.indexOf(this.step));
    } catch (error) {
      if (this.parameters === parameters) this.fail(error);
    }
  }

  fail(error) {
    this.body.hidden = true;
    fill(this.nothing, failure(error, () => {
      this.step = null;
      this.moved(this.parameters);
    }));
  }

  key(event) {
    const actions = {
      ArrowLeft: () => this.move(-1), ArrowRight: () => this.move(1), Home: () => this.move(-Infinity), End: () => this.move(Infinity),
      ArrowUp: () => this.movePrompt(-1), ArrowDown: () => this.movePrompt(1), Escape: () => this.clear(),
    };
    if (!(event.key in actions)) return this.group.key(event);
    actions[event.key]();
    return true;
  }

  close() {
    this.stopSearch();
  }
}

/** What the squares of the completions mean. */
function legend(low, high) {
  const square = (part) => {
    const each = el("i", { class: `square ${part === null ? "same" : ""}` });
    if (part !== null) each.style.setProperty("--part", String(part));
    return each;
  };
  const shades = high > low ? [`reward ${shown(low, 3)} `, [0, 0.25, 0.5, 0.75, 1].map(square), ` ${shown(high, 3)}`] : [square(null), ` every reward is ${shown(low, 3)}`];
  return el("span", { class: "squares-legend" }, shades);
}
