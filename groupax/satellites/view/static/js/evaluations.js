// Evaluations: estimates of all of them, the items of one, and the items in which two differ.

import { ask } from "./api.js";
import { diffText } from "./diff.js";
import { debounced, drawn, el, empty, failure, fill, plural, select, shown, stacked, visible } from "./dom.js";
import { Chat, endBadge } from "./episode.js";
import { directionOf } from "./overview.js";
import { RunChoice } from "./runs.js";
import { go, oneRun } from "./state.js";

const SHOWN = { all: "all items", solved: "solved", unsolved: "not solved" };
const SHOWN_OF_TWO = { all: "all items, worse ones first", lost: "became worse", gained: "became better", same: "unchanged" };
const KINDS = { lost: ["worse", "bad"], gained: ["better", "good"], same: ["unchanged", ""] };
const MAX_COLUMNS = 10; // evaluations of a set in the table
const MAX_OTHERS = 200; // evaluations of other runs to compare with

export class Evaluations {
  constructor(root) {
    this.root = root;
    this.first = 0;
    this.names = [];
    this.all = {}; // names of the evaluations of all runs
    this.which = "all";
    this.search = el("input", { type: "search", name: "search", placeholder: "Search items  ( / )", "aria-label": "Search items", on: { input: debounced(() => this.again(), 250) } });
    this.runChoice = new RunChoice("evaluations");
    this.fields = el("span", { class: "fields" });
    this.table = el("div");
    this.body = el("div");
    fill(root, el("h1", { class: "sr" }, "Evaluations"), el("div", { class: "toolbar" }, this.runChoice.element), this.table, el("div", { class: "toolbar" }, this.fields, el("span", { class: "fields needs-server" }, this.search)), this.body);
  }

  async moved(parameters) {
    const run = oneRun(parameters);
    if (run === null) return;
    const asked = {};
    Object.assign(this, { asked, parameters, run, first: 0 });
    this.runChoice.show(run);
    try {
      const [rows, all] = await Promise.all([ask("estimates", { run }), ask("evaluations")]);
      if (this.asked !== asked) return;
      const names = rows.map((row) => row.name);
      this.all = all;
      this.name = names.includes(parameters.name) ? parameters.name : names[names.length - 1];
      this.beforeRun = this.others().some((each) => each.run === parameters.before_run && each.name === parameters.before) ? parameters.before_run : null;
      this.before = this.beforeRun === null ? this.earlier(rows, parameters.before) : parameters.before;
      this.which = "all";
      this.layOutFields(rows);
      this.search.hidden = !rows.length;
      if (rows.length) await this.read();
      else fill(this.body, empty("No evaluations", `${run} has not been evaluated. Set eval_steps and an eval_dataset to evaluate during training.`));
      drawn();
    } catch (error) {
      if (this.asked === asked) fill(this.body, failure(error, () => this.moved(parameters)));
    }
  }

  /** The evaluation to compare with: the named one, else the first of the same set, none of "". */
  earlier(rows, named) {
    const own = rows.find((row) => row.name === this.name);
    const others = rows.filter((row) => row.set === own?.set && row.name !== this.name);
    if (named === "none") return "";
    if (others.some((row) => row.name === named)) return named;
    return others.length && rows.indexOf(others[0]) < rows.indexOf(own) ? others[0].name : "";
  }

  /** The evaluations of other runs of the same set, which need not have the same steps. */
  others() {
    const setOf = (name) => name.slice(name.indexOf(".") + 1);
    return Object.entries(this.all).filter(([run]) => run !== this.run).flatMap(([run, names]) =>
      names.filter((name) => this.name && setOf(name) === setOf(this.name)).map((name) => ({ run, name }))).slice(0, MAX_OTHERS);
  }

  /** The evaluations that the open one can be compared with, those of other runs in groups by run. */
  comparisons(others) {
    const far = this.others();
    const values = [{}, ...others.map(({ name }) => ({ before: name })), ...far.map((each) => ({ before: each.name, before_run: each.run }))];
    const option = (value, text) => el("option", { value: String(values.indexOf(value)) }, text);
    const own = values.filter((value) => !value.before_run);
    const field = el("select", { name: "before", on: { change: () => this.open(field.value === "0" ? { before: "none" } : values[Number(field.value)]) } },
      own.map((value) => option(value, value.before ? visible(value.before) : "none")),
      [...new Set(far.map(({ run }) => run))].map((run) => el("optgroup", { label: visible(run) },
        values.filter((value) => value.before_run === run).map((value) => option(value, `${visible(value.before)} of ${visible(run)}`)))));
    const chosen = values.findIndex((value) => (value.before ?? "") === this.before && (value.before_run ?? null) === this.beforeRun);
    field.value = String(Math.max(chosen, 0));
    return el("label", { class: "field" }, el("span", {}, "Compare with"), field);
  }

  open(change) {
    go("evaluations", { run: this.run, name: this.name, ...change });
  }

  layOutFields(rows) {
    const names = rows.map((row) => row.name);
    this.names = names;
    this.rows = rows;
    const own = rows.find((row) => row.name === this.name);
    const others = rows.filter((row) => row.set === own?.set && row.name !== this.name);
    fill(this.fields,
      names.length > 0 && select("Evaluation", names.map((name) => [name, name]), this.name, (name) => this.open({ name, before: this.parameters.before, before_run: this.parameters.before_run }), "evaluation"),
      (others.length > 0 || this.others().length > 0) && this.comparisons(others),
      names.length > 0 && select("Show", Object.entries(this.before ? SHOWN_OF_TWO : SHOWN), this.which, (value) => { this.which = value; this.again(); }, "which"));
    fill(this.table, [...new Set(rows.map((row) => row.set))].map((set) => estimatesTable(rows.filter((row) => row.set === set), set)));
  }

  again() {
    this.first = 0;
    if (this.name) this.read();
  }

  async read() {
    const asked = {};
    this.asked = asked; // responses to earlier requests are dropped
    const { run, name, before, first, which } = this;
    try {
      const question = { run, name, first, show: which, q: this.search.value.trim() };
      const found = before ? await ask("differences", { ...question, before, before_run: this.beforeRun }) : await ask("items", question);
      if (this.asked !== asked) return;
      if (before) this.layOutPairs(found);
      else this.layOut(found);
    } catch (error) {
      if (this.asked === asked) fill(this.body, failure(error, () => this.read()));
    }
  }

  layOut(found) {
    fill(this.body,
      el("p", { class: "summary", role: "status" }, found.num_shown ? `${this.range(found)} of ${plural(found.num_shown, "item")}` : `none of ${plural(found.num_items, "item")}`),
      found.items.map((item) => this.item(item)),
      this.pages(found));
  }

  layOutPairs(found) {
    const { lost, gained, same } = found.counts;
    fill(this.body,
      differencesTable(found.differences, this.beforeRun === null ? ["Before", "After"] : this.titles()),
      el("p", { class: "summary", role: "status" }, this.beforeRun === null
        ? `${plural(gained, "item")} became better, ${lost} worse, ${same} did not change. `
        : `${plural(gained, "item")} better than in ${visible(this.beforeRun)}, ${lost} worse, ${same} the same. `,
        found.num_shown ? `${this.range(found)} of ${plural(found.num_shown, "item")}` : "No item matches."),
      found.items.map((pair) => this.pair(pair)),
      this.pages(found));
  }

  /** The names of the two evaluations that are compared, with their runs if these differ. */
  titles() {
    return this.beforeRun === null ? [this.before, this.name] : [`${visible(this.beforeRun)}, ${visible(this.before)}`, `${visible(this.run)}, ${visible(this.name)}`];
  }

  range(found) {
    return `${this.first + 1} to ${Math.min(this.first + found.page, found.num_shown)}`;
  }

  pages(found) {
    const last = Math.min(this.first + found.page, found.num_shown);
    const turn = (first) => () => { this.first = first; this.read(); this.body.scrollIntoView(); };
    return el("div", { class: "toolbar slim" },
      this.first > 0 && el("button", { type: "button", on: { click: turn(this.first - found.page) } }, "‹ Before"),
      last < found.num_shown && el("button", { type: "button", on: { click: turn(this.first + found.page) } }, "Next ›"));
  }

  item(item) {
    const judged = item.completions.filter((each) => each.solved !== null).length;
    const right = item.completions.filter((each) => each.solved).length;
    const verdict = judged ? `${right} of ${judged} right` : solvedOf(item);
    return el("details", { class: "item" },
      el("summary", {}, el("span", { class: `badge ${!judged ? "" : right === judged ? "good" : right ? "note" : "warn"}` }, verdict), el("span", { class: "preview" }, visible(item.prompt.slice(0, 300)))),
      el("pre", { class: "text" }, visible(item.prompt)),
      columns(item),
      item.completions.map((each) => completion(each)));
  }

  /** One item before and after; the words that changed are marked where each has one completion. */
  pair({ kind, before, after }) {
    const [word, look] = KINDS[kind];
    const contents = () => {
      const isSingle = before.completions.length === 1 && after.completions.length === 1 && !after.completions[0].episode;
      return [
        el("pre", { class: "text" }, visible(after.prompt)), columns(after),
        el("div", { class: "columns-of-steps" },
          el("div", {}, el("h3", {}, this.titles()[0]), before.completions.map((each) => completion(each))),
          el("div", {}, el("h3", {}, this.titles()[1]), isSingle ? completion(after.completions[0], before.completions[0].text) : after.completions.map((each) => completion(each)))),
      ];
    };
    const root = el("details", { class: "item", on: { toggle: () => root.open && root.children.length === 1 && root.append(...contents()) } },
      el("summary", {}, el("span", { class: `badge ${look}` }, word), el("span", { class: "facts" }, `${solvedOf(before)} → ${solvedOf(after)}`), el("span", { class: "preview" }, visible(after.prompt.slice(0, 300)))));
    return root;
  }

  /** Offers new evaluations; the open one stays open. */
  async update(changed) {
    const { parameters, run } = this;
    this.runChoice.show(run);
    if (!changed.includes(run)) return;
    const [rows, all] = await Promise.all([ask("estimates", { run }), ask("evaluations")]);
    const names = rows.map((row) => row.name);
    this.all = all;
    if (this.parameters !== parameters || names.join("\n") === this.names.join("\n")) return;
    if (names.includes(this.name)) this.layOutFields(rows);
    else await this.moved(parameters);
  }
}

/** The estimates of a set, an evaluation per column. */
function estimatesTable(all, set) {
  const rows = all.length > MAX_COLUMNS ? [...all.slice(0, 1), ...all.slice(1 - MAX_COLUMNS)] : all;
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.estimates)))];
  return el("section", {},
    el("h2", {}, visible(set || "evaluation"), " ", el("small", {}, plural(rows[rows.length - 1].num_items, "item"), rows.length < all.length && `; the first and the last ${rows.length - 1} of ${all.length} evaluations`)),
    rows.filter((row) => row.fault).map((row) => el("p", { class: "summary failed" }, visible(row.fault))),
    names.length > 0 && el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Estimates of ${set}` }, stacked(el("table", { class: "data estimates" },
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "mean, 95 % interval"), rows.map((row) => el("th", { scope: "col" }, when(row.when))))),
      el("tbody", {}, names.map((name) => el("tr", {}, el("th", { scope: "row", title: name }, visible(name.replace(/^rewards\/(.+)\/mean$/, "$1"))),
        rows.map(({ estimates }) => el("td", { class: "number" }, name in estimates ? [el("b", {}, fixed(estimates[name].value)), el("small", {}, ` ${interval(estimates[name])}`)] : "–")))))))));
}

/** @param {string[]} titles of the two evaluations */
function differencesTable(differences, titles) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Differences" }, stacked(el("table", { class: "data estimates" },
    el("thead", {}, el("tr", {}, ["Common items", ...titles, "Difference, 95 % interval", "p"].map((text) => el("th", { scope: "col" }, text)))),
    el("tbody", {}, Object.entries(differences).map(([name, { before, after, difference, p_value: p }]) => {
      return el("tr", {}, el("th", { scope: "row", title: name }, visible(name.replace(/^rewards\/(.+)\/mean$/, "$1"))), el("td", { class: "number" }, fixed(before)), el("td", { class: "number" }, fixed(after)),
        el("td", { class: "number" }, el("b", { class: directionOf(difference, p) }, `${difference.value > 0 ? "+" : ""}${fixed(difference.value)}`), el("small", {}, ` ${interval(difference)}`)),
        el("td", { class: "number" }, p === null ? "–" : p < 1e-4 ? "< 0.0001" : p.toFixed(4)));
    })))));
}

function columns(item) {
  return el("dl", { class: "columns" }, Object.entries(item.columns).map(([name, value]) => [el("dt", {}, visible(name)), el("dd", {}, visible(value.slice(0, 2000)))]));
}

function completion(each, earlier = null) {
  const facts = [...Object.entries(each.rewards).map(([name, value]) => `${visible(name)} ${shown(value)}`), `${shown(each.num_tokens)} tokens`].join(" · ");
  const text = each.episode ? new Chat(each.episode).root : earlier === null ? el("pre", { class: "text" }, visible(each.text)) : diffText(earlier, each.text);
  return el("article", { class: "card" },
    el("header", {}, el("span", { class: "total" }, each.solved === null ? "" : each.solved ? "right" : "wrong"), el("span", { class: "facts" }, facts), endBadge(each.finish_reason, each.episode !== null)),
    text);
}

/** Returns how many of the completions are right, or their mean reward if nothing says what is right. */
function solvedOf({ completions }) {
  const judged = completions.filter((each) => each.solved !== null);
  if (judged.length) return `${judged.filter((each) => each.solved).length}/${judged.length}`;
  const rewards = completions.map((each) => each.reward).filter((reward) => reward !== null);
  return rewards.length ? `reward ${shown(rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length, 3)}` : "no reward";
}

function when(name) {
  return /^step_\d+$/.test(name) ? `step ${shown(Number(name.slice(5)))}` : visible(name);
}

function fixed(value) {
  return value === null ? "–" : value.toFixed(3);
}

function interval({ low, high }) {
  return low === null || high === null ? "" : `[${fixed(low)}, ${fixed(high)}]`;
}
