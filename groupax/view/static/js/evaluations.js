// Items of evaluations.

import { ask } from "./api.js";
import { debounced, el, empty, failure, fill, plural, select, shown, visible } from "./dom.js";
import { Chat, endBadge } from "./episode.js";
import { RunChoice } from "./runs.js";
import { go, oneRun } from "./state.js";

export class Evaluations {
  constructor(root) {
    this.root = root;
    this.first = 0;
    this.names = [];
    this.which = "all";
    this.search = el("input", { type: "search", name: "search", placeholder: "Search items  ( / )", "aria-label": "Search items", on: { input: debounced(() => this.again(), 250) } });
    this.runChoice = new RunChoice("evaluations");
    this.fields = el("span", { class: "fields" });
    this.body = el("div");
    fill(root, el("h1", { class: "sr" }, "Evaluations"), el("div", { class: "toolbar" }, this.runChoice.element, this.fields,
      select("Show", [["all", "all items"], ["solved", "solved"], ["unsolved", "not solved"]], this.which, (value) => { this.which = value; this.again(); }, "which"), this.search), this.body);
  }

  async start(parameters) {
    await this.moved(parameters);
  }

  async moved(parameters) {
    const run = oneRun(parameters);
    if (run === null) return;
    const asked = {};
    Object.assign(this, { asked, parameters, run, first: 0 });
    this.runChoice.show(run);
    try {
      const names = await ask("evaluations", { run });
      if (this.asked !== asked) return;
      this.name = names.includes(parameters.name) ? parameters.name : names[names.length - 1];
      this.layOutFields(names);
      if (names.length) await this.read();
      else fill(this.body, empty("No evaluations", `${run} has not been evaluated. Set eval_steps and an eval_dataset to evaluate during training.`));
    } catch (error) {
      if (this.asked === asked) fill(this.body, failure(error, () => this.moved(parameters)));
    }
  }

  layOutFields(names) {
    this.names = names;
    fill(this.fields,
      names.length > 0 && select("Evaluation", names.map((name) => [name, name]), this.name, (name) => go("evaluations", { run: this.run, name }), "evaluation"));
  }

  again() {
    this.first = 0;
    if (this.name) this.read();
  }

  async read() {
    const asked = {};
    this.asked = asked; // responses to earlier requests are dropped
    try {
      const found = await ask("items", { run: this.run, name: this.name, first: this.first, show: this.which, q: this.search.value.trim() });
      if (this.asked === asked) this.layOut(found);
    } catch (error) {
      if (this.asked === asked) fill(this.body, failure(error, () => this.read()));
    }
  }

  layOut(found) {
    const last = Math.min(this.first + found.page, found.num_shown);
    const turn = (first) => () => { this.first = first; this.read(); scrollTo(0, 0); };
    fill(this.body,
      el("p", { class: "summary", role: "status" }, found.num_shown ? `${this.first + 1} to ${last} of ${plural(found.num_shown, "item")}` : `none of ${plural(found.num_items, "item")}`,
        found.num_bad > 0 && `; ${plural(found.num_bad, "line")} could not be read`),
      found.items.map((item) => this.item(item)),
      el("div", { class: "toolbar slim" },
        this.first > 0 && el("button", { type: "button", on: { click: turn(this.first - found.page) } }, "‹ Before"),
        last < found.num_shown && el("button", { type: "button", on: { click: turn(this.first + found.page) } }, "Next ›")));
  }

  item(item) {
    const judged = item.completions.filter((each) => each.solved !== null).length;
    const right = item.completions.filter((each) => each.solved).length;
    const verdict = judged ? `${right} of ${judged} right` : "not judged";
    return el("details", { class: "item" },
      el("summary", {}, el("span", { class: `badge ${!judged ? "" : right === judged ? "good" : right ? "note" : "warn"}` }, verdict), el("span", { class: "preview" }, visible(item.prompt.slice(0, 300)))),
      el("pre", { class: "text" }, visible(item.prompt)),
      el("dl", { class: "columns" }, Object.entries(item.columns).map(([name, value]) => [el("dt", {}, visible(name)), el("dd", {}, visible(value.slice(0, 2000)))])),
      item.completions.map((each) => el("article", { class: "card" },
        el("header", {}, el("span", { class: "total" }, each.solved === null ? "" : each.solved ? "right" : "wrong"), el("span", { class: "facts" }, [...Object.entries(each.rewards).map(([name, value]) => `${visible(name)} ${shown(value)}`), `${shown(each.num_tokens)} tokens`].join(" · ")),
          endBadge(each.finish_reason, each.episode !== null)),
        each.episode ? new Chat(each.episode).root : el("pre", { class: "text" }, visible(each.text)))));
  }

  key(event) {
    if (event.key !== "/") return false;
    this.search.focus();
    return true;
  }

  /** Offers new evaluations; the open one stays open. */
  async update(changed) {
    const { parameters, run } = this;
    this.runChoice.show(run);
    if (!changed.includes(run)) return;
    const names = await ask("evaluations", { run });
    if (this.parameters !== parameters || names.join("\n") === this.names.join("\n")) return;
    if (names.includes(this.name)) this.layOutFields(names);
    else await this.moved(parameters);
  }

  close() {}
}
