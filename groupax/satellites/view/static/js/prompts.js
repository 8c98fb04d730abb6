// A prompt over all steps that sampled it.

import { ask } from "./api.js";
import { Chart } from "./charts.js";
import { Comparison } from "./compare.js";
import { debounced, drawn, el, empty, failure, fill, plural, select, shown, stacked, visible } from "./dom.js";
import { RunChoice } from "./runs.js";
import { address, app, colour, go, oneRun, shortName } from "./state.js";

const ORDERS = { frequent: "most frequent", unsolved: "lowest best reward", gained: "largest gain", lost: "largest loss" };

export class Prompts {
  constructor(root) {
    this.root = root;
    this.search = el("input", { type: "search", name: "search", placeholder: "Find a prompt  ( / )", "aria-label": "Find a prompt", on: { input: debounced(() => this.read(), 200) } });
    this.runChoice = new RunChoice("prompts");
    this.order = "frequent";
    this.orders = select("Order", Object.entries(ORDERS), this.order, (order) => {
      this.order = order;
      this.read();
    }, "order");
    this.which = "all";
    this.shows = select("Show", [["all", "all"], ["unsolved", "never solved"]], this.which, (which) => {
      this.which = which;
      this.read();
    }, "show");
    this.progress = el("p", { class: "summary", role: "status" });
    this.body = el("div");
    fill(root, el("h1", { class: "sr" }, "Prompts"), el("div", { class: "toolbar" }, this.runChoice.element, this.shows, this.orders, this.search), this.progress, this.body);
  }

  async moved(parameters) {
    this.parameters = parameters;
    this.run = oneRun(parameters);
    if (this.run === null) return;
    this.runChoice.show(this.run);
    await this.read();
  }

  update(names) {
    this.runChoice.show(this.run);
    return [this.run, this.parameters.with].some((name) => names.includes(name)) && this.read();
  }

  async read() {
    clearTimeout(this.timer);
    const { parameters } = this;
    this.shows.hidden = this.orders.hidden = this.search.hidden = Boolean(parameters.key);
    try {
      const { key } = parameters;
      const asked = (run) => ask(key ? "prompt" : "prompts", { run, ...(key ? { key } : { q: this.search.value.trim(), order: this.order, show: this.which }) });
      const [found, other] = await Promise.all([asked(this.run), key && this.others().includes(parameters.with) ? asked(parameters.with) : null]);
      if (this.closed || this.parameters !== parameters) return;
      this.tell(found);
      if (key) this.showPrompt(found, other);
      else this.showPrompts(found.prompts);
      drawn();
      if ([found, other].some((each) => each && this.isReading(each.progress))) this.timer = setTimeout(() => this.read(), 100);
    } catch (error) {
      if (!this.closed && this.parameters === parameters) fill(this.body, failure(error, () => this.read()));
    }
  }

  /** The runs that the shown one can be compared with. */
  others() {
    return Object.keys(app.runs).filter((name) => name !== this.run);
  }

  isReading(progress) {
    return progress.num_done < progress.num_steps && !progress.is_full;
  }

  tell({ progress, num_prompts: all, num_unsolved: unsolved }) {
    const unreadable = progress.num_unreadable ? `; ${plural(progress.num_unreadable, "file")} could not be read` : "";
    const full = progress.is_full ? "; the index is full" : "";
    const never = typeof unsolved === "number" ? `${unsolved.toLocaleString("en")} of ${plural(all, "prompt")} never solved; ` : "";
    if (all !== undefined) this.shows.hidden = never === "";
    this.progress.textContent = `${never}${progress.num_done.toLocaleString("en")} of ${plural(progress.num_steps, "step")} read${unreadable}${full}`;
  }

  showPrompts(prompts) {
    this.chart?.close();
    this.chart = null;
    if (!prompts.length) {
      fill(this.body, empty("No prompts", this.search.value ? "No prompt read so far contains this text." : this.which === "unsolved" ? "Every prompt read so far was solved at least once." : "There are no rollouts yet."));
      return;
    }
    fill(this.body, stacked(el("table", { class: "data" },
      el("thead", {}, el("tr", {}, ["Prompt", "Times seen", "First mean reward", "Last mean reward", "Change", "Best reward"].map((text) => el("th", { scope: "col" }, text)))),
      el("tbody", {}, prompts.map((prompt) => {
        const change = prompt.count < 2 || prompt.first === null || prompt.last === null ? null : prompt.last - prompt.first;
        return el("tr", {},
          el("td", {}, el("a", { href: address("prompts", { run: this.run, key: prompt.key }) }, visible(prompt.text) || "(empty)")),
          el("td", { class: "number" }, shown(prompt.count)), el("td", { class: "number" }, shown(prompt.first, 3)), el("td", { class: "number" }, shown(prompt.last, 3)),
          el("td", { class: `number ${change > 0 ? "up" : change < 0 ? "down" : ""}` }, change === null ? "–" : `${change > 0 ? "+" : ""}${shown(change, 3)}`),
          el("td", { class: "number" }, shown(prompt.best, 3)));
      })))));
  }

  showPrompt(found, other) {
    if (!found.step.length) {
      const text = this.isReading(found.progress) ? "Searching the steps …" : "No step with logged rollouts has this prompt.";
      fill(this.body, empty("Not seen yet", text));
      return;
    }
    const lines = [["best", "high", 2], ["mean", "mean", 0], ["worst", "low", 3]].map(([label, field, index]) => ({ label, colour: colour(index), x: found.step, y: found[field] }));
    if (!this.chart || !this.body.contains(this.chart.card)) {
      this.chart?.close();
      this.chart = new Chart("Reward of this prompt", { wide: true, height: 150 });
      this.table = el("details", { class: "more" });
      this.head = el("div");
      this.headOf = null;
      this.missing = el("p", { class: "hint", role: "status" });
      this.comparison = new Comparison();
      fill(this.body, el("p", {}, el("a", { href: address("prompts", { run: this.run }) }, "‹ All prompts")), this.head, this.missing, this.comparison.root, this.chart.card, this.table);
    }
    const { key, with: name } = this.parameters;
    if (this.headOf !== this.parameters) { // a select box may be open
      this.headOf = this.parameters;
      fill(this.head, el("pre", { class: "text prompt-text" }, visible(found.text)),
        this.others().length > 0 && select("Compare with", [["", "no other run"], ...this.others().map((each) => [each, visible(shortName(each))])], other ? name : "", (chosen) => go("prompts", { run: this.run, key, with: chosen }), "with"));
    }
    this.chart.show(lines);
    fill(this.missing, other && !other.step.length && `No logged step of ${visible(shortName(name))} has this prompt.`);
    const both = [[this.run, found], [name, other]].filter(([, each]) => each?.step.length);
    const joined = (values) => both.flatMap(([run, each]) => values(each, run));
    this.comparison.show({ key, run: joined(({ step }, run) => step.map(() => run)), step: joined(({ step }) => step), prompt_index: joined((each) => each.prompt_index) });
    const isOpen = this.table.open;
    const rows = found.step.map((step, index) => ({ step, index })).slice(-200).reverse();
    fill(this.table, el("summary", {}, "Rewards at every step"), el("table", { class: "data" },
      el("thead", {}, el("tr", {}, ["Step", "Completions", "Worst", "Mean", "Best", "Truncated"].map((text) => el("th", { scope: "col" }, text)))),
      el("tbody", {}, rows.map(({ step, index }) => el("tr", {},
        el("td", {}, el("a", { href: address("rollouts", { run: this.run, step, prompt: found.prompt_index[index] }) }, `step ${step}`)),
        [found.size, found.low, found.mean, found.high, found.truncated].map((column) => el("td", { class: "number" }, shown(column[index], 3))))))));
    this.table.open = isOpen;
  }

  themed() {
    if (this.chart) this.chart.lines = [];
    this.read();
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
    this.chart?.close();
  }
}
