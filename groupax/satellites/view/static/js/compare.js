// Completions of one prompt at several steps of one run or of two, side by side, with the words that changed.

import { ask } from "./api.js";
import { diffText } from "./diff.js";
import { el, fill, plural, select, shown, visible } from "./dom.js";
import { endBadge } from "./episode.js";
import { folding } from "./folding.js";
import { address, shortName, store, stored } from "./state.js";

const NUM_COLUMNS = 3;
const MAX_COLUMNS = 6;
const MAX_KEPT = 60; // groups that stay in memory
const CHOICES = {
  best: ["best", (rows) => rows[0]],
  median: ["median", (rows) => rows[Math.floor((rows.length - 1) / 2)]],
  worst: ["worst", (rows) => rows[rows.length - 1]],
};

export class Comparison {
  constructor() {
    this.root = el("section", { class: "comparison", "aria-label": "Completions across steps" });
    this.which = stored("compared", "best");
    this.marks = stored("marks-changes", true);
    this.groups = new Map();
  }

  /** @param {{key: string, run: string[], step: number[], prompt_index: number[]}} history of the prompt, one run after the other */
  async show(history) {
    const runs = [...new Set(history.run)];
    const isNew = history.key !== this.history?.key || runs.join("\n") !== this.runs.join("\n");
    const was = this.history;
    Object.assign(this, { history, runs });
    if (!isNew) this.places = this.places.map((place) => history.step.findIndex((step, index) => step === was.step[place] && history.run[index] === was.run[place])).filter((place) => place >= 0);
    else this.places = runs.length > 1 ? runs.map((run) => history.run.lastIndexOf(run)) : spread(history.step.length, NUM_COLUMNS);
    await this.draw();
  }

  async draw() {
    const asked = {};
    this.asked = asked;
    try {
      const groups = await Promise.all(this.places.map((place) => this.group(place)));
      if (this.asked !== asked) return;
      const rows = groups.map((group) => chosen(group, this.which));
      fill(this.root,
        el("div", { class: "toolbar slim" }, el("h2", {}, "Completions across steps"),
          select("Completion", Object.entries(CHOICES).map(([key, [text]]) => [key, text]), this.which, (which) => this.change({ which }, "compared", which), "compared"),
          el("label", { class: "field" }, el("input", { type: "checkbox", name: "marks-changes", checked: this.marks, on: { change: (event) => this.change({ marks: event.target.checked }, "marks-changes", event.target.checked) } }), el("span", {}, "Mark the words that changed")),
          el("button", { type: "button", disabled: this.places.length >= Math.min(MAX_COLUMNS, this.history.step.length), on: { click: () => this.setNumber(this.places.length + 1) } }, "More columns"),
          el("button", { type: "button", disabled: this.places.length <= 1, on: { click: () => this.setNumber(this.places.length - 1) } }, "Fewer")),
        el("div", { class: "columns-of-steps" }, rows.map((row, index) => this.column(index, row, rows[index - 1]))));
    } catch (error) {
      if (this.asked === asked) fill(this.root, el("p", { class: "hint", role: "alert" }, error.message));
    }
  }

  change(values, name, value) {
    Object.assign(this, values);
    store(name, value);
    this.draw();
  }

  setNumber(number) {
    this.places = spread(this.history.step.length, number);
    this.draw();
  }

  async group(place) {
    const where = { run: this.history.run[place], step: this.history.step[place], prompt: this.history.prompt_index[place] };
    const key = JSON.stringify(where);
    if (!this.groups.has(key)) {
      if (this.groups.size >= MAX_KEPT) this.groups.delete(this.groups.keys().next().value);
      this.groups.set(key, await ask("group", where));
    }
    return this.groups.get(key);
  }

  column(index, row, before) {
    const place = this.places[index];
    const { run, step, prompt_index: prompts } = this.history;
    const title = (each) => `step ${shown(step[each])}${this.runs.length > 1 ? ` of ${visible(shortName(run[each]))}` : ""}`;
    const steps = offered(step.length, place).map((each) => [String(each), title(each)]);
    const field = el("select", { name: `column-${index}`, "aria-label": `Step of column ${index + 1}`, on: { change: (event) => {
      this.places[index] = Number(event.target.value);
      this.draw();
    } } }, steps.map(([value, text]) => el("option", { value }, text)));
    field.value = String(place);
    const text = before && this.marks ? diffText(before.text, row.text) : folding(row.text);
    return el("article", { class: "card", "aria-label": title(place) },
      el("header", {}, field, el("span", { class: "total" }, shown(row.total)), el("span", { class: "facts" }, plural(row.num_tokens, "token")), endBadge(row.finish_reason, row.episode !== null),
        el("a", { href: address("rollouts", { run: run[place], step: step[place], prompt: prompts[place] }), class: "facts" }, "group")),
      el("div", { class: "completion" }, text));
  }
}

/** Returns the completion of a group to show: rows without a reward come last. */
function chosen(group, which) {
  const rows = [...group.rows].sort((a, b) => (b.total ?? -Infinity) - (a.total ?? -Infinity));
  return CHOICES[which][1](rows);
}

/** Returns `number` indices below `size`, evenly spread, with the first and the last one. */
function spread(size, number) {
  if (size <= number) return [...Array(size).keys()];
  return [...Array(number).keys()].map((index) => (number === 1 ? size - 1 : Math.round((index * (size - 1)) / (number - 1))));
}

/** Returns the indices that a select box offers: of a long history a part, evenly spread. */
function offered(size, place) {
  return [...new Set([...spread(size, 300), place])].sort((a, b) => a - b);
}
