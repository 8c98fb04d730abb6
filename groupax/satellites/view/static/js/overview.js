// One run at a glance: what it is, how far it is, what has changed, and what is wrong.

import { ask } from "./api.js";
import { Chart } from "./charts.js";
import { diagnosticList, explained, noneFound } from "./diagnostics.js";
import { drawn, el, empty, failure, fill, shown, visible } from "./dom.js";
import { marksOf } from "./marks.js";
import { RunChoice } from "./runs.js";
import { address, app, go, oneRun, runColour, shortName } from "./state.js";

// Of each row the first metrics that the run has.
const CURVES = [
  ["Reward", ["reward"], ["loss"]],
  ["pass@1", ["pass@1"], ["grad_norm"]],
  ["Entropy", ["entropy"], ["learning_rate"]],
  ["Completion length", ["completions/mean_length"], ["step_time"]],
];
const POINTS = 400;

export class Overview {
  constructor(root) {
    this.root = root;
    this.runChoice = new RunChoice("overview");
    this.body = el("div", { class: "overview" });
    this.charts = new Map();
    fill(root, el("h1", { class: "sr" }, "Overview"), el("div", { class: "toolbar choice-of-run" }, this.runChoice.element), this.body);
  }

  async moved(parameters) {
    const run = oneRun(parameters);
    if (run === null) return;
    if (run !== this.run) {
      this.closeCharts();
      this.parts = null;
    }
    Object.assign(this, { parameters, run });
    this.runChoice.element.parentElement.hidden = Object.keys(app.runs).length < 2;
    this.runChoice.show(run);
    await this.read();
  }

  async read() {
    const { run } = this;
    try {
      const [found, diagnostics, names] = await Promise.all([ask("overview", { run }), ask("diagnostics", { run }), ask("names", { run })]);
      if (this.run !== run || this.closed) return;
      this.draw(found, diagnostics[run] ?? []);
      await this.drawCurves(names);
      drawn();
      await this.drawSamples();
    } catch (error) {
      if (this.run === run && !this.closed) fill(this.body, failure(error, () => this.read()));
    }
  }

  /** Parts are made once; while the run goes on only what they contain changes. */
  draw({ facts, progress, outcome, changes }, diagnostics) {
    if (!this.parts) {
      this.parts = Object.fromEntries(["head", "changes", "findings", "curves", "samples", "facts"].map((name) => [name, el("section", { class: `overview-${name}` })]));
      const { head, changes: changed, findings, curves, samples, facts: about } = this.parts;
      curves.classList.add("grid");
      fill(this.body, head, changed, findings, curves, samples, about);
      this.drawn = {};
    }
    this.fillPart("head", [progress, outcome, app.runs[this.run].status, app.runs[this.run].ending, app.runs[this.run].note, facts.model, facts.recipe], () => head(this.run, facts, progress, outcome));
    this.fillPart("changes", [changes], () => changes.length > 0 && [el("h2", {}, "Before and after"), el("ul", { class: "changes" }, changes.map(change))]);
    this.fillPart("findings", [diagnostics, diagnostics.length || noneFound(progress.step), [...app.read]], () => [
      el("h2", {}, "Diagnostics"),
      diagnostics.length ? diagnosticList(this.run, diagnostics, () => this.read()) : el("p", { class: "all-well" }, noneFound(progress.step)),
    ]);
    this.fillPart("facts", [facts], () => [el("h2", {}, "This run"), factList(facts)]);
  }

  /** Draws a part again only if what it shows has changed: someone may be selecting its text. */
  fillPart(name, values, contents) {
    const signature = JSON.stringify(values);
    if (this.drawn[name] === signature) return;
    this.drawn[name] = signature;
    fill(this.parts[name], contents());
  }

  async drawCurves(names) {
    const { run } = this;
    const chosen = CURVES.map(([title, ...options]) => {
      const found = options.find(([name]) => names.includes(name));
      return found && [found === options[0] ? title : found[0], found[0]];
    }).filter(Boolean);
    if (!chosen.length) {
      fill(this.parts.curves, empty("No metrics", app.runs[run].ending ? "The run ended before its first step did." : "This page updates when the run has finished its first step."));
      return;
    }
    const [found, marks] = await Promise.all([ask("series", { run, name: chosen.map(([, name]) => name), points: POINTS }), marksOf([run])]);
    if (this.run !== run || this.closed) return;
    const opened = (step) => go("rollouts", { run, step: Math.round(step) });
    for (const [title, name] of chosen) {
      if (!this.charts.has(title)) this.charts.set(title, new Chart(title, { names: [name], height: 130, opened }));
    }
    const cards = chosen.map(([title]) => this.charts.get(title).card);
    if (cards.some((card) => !this.parts.curves.contains(card))) fill(this.parts.curves, cards);
    for (const [title, name] of chosen) {
      const line = found[run]?.[name];
      if (line) this.charts.get(title).show([{ ...line, label: shortName(run), colour: runColour(run) }], { x: "step" }, marks);
    }
  }

  /** The best and the worst completion of the last step whose rollouts were logged. */
  async drawSamples() {
    const { run } = this;
    const found = await ask("extremes", { run }).catch(() => ({})); // the step may be damaged, or removed meanwhile
    if (this.run !== run || this.closed) return;
    const { best, worst } = found;
    this.fillPart("samples", [found], () => best && [el("h2", {}, `Completions of step ${shown(best.step)}`),
      el("div", { class: "side-by-side" }, sample(run, best.total === worst.total ? "One of equal reward" : "Highest reward", best), best.total !== worst.total && sample(run, "Lowest reward", worst))]);
  }

  closeCharts() {
    for (const chart of this.charts.values()) chart.close();
    this.charts = new Map();
  }

  themed() {
    for (const chart of this.charts.values()) chart.lines = [];
    this.read();
  }

  close() {
    this.closed = true;
    this.closeCharts();
  }
}

function head(run, facts, progress, outcome) {
  const { step, num_steps: total, elapsed_s: elapsed, remaining_s: remaining, tokens, started_at: started } = progress;
  const { status, ending, note } = app.runs[run];
  const part = total && step !== null ? Math.min(step / total, 1) : null;
  const bar = part !== null && el("div", { class: "progress", role: "progressbar", "aria-label": "Steps", "aria-valuemin": "0", "aria-valuemax": String(total), "aria-valuenow": String(step) }, el("i"));
  if (bar) bar.firstChild.style.setProperty("--part", String(part));
  const about = [
    step === null ? "no step yet" : total ? `step ${shown(step)} of ${shown(total)}` : `step ${shown(step)}`,
    elapsed !== null && `${duration(elapsed)} of training`,
    remaining !== null && remaining > 0 && (status === "live" ? `about ${duration(remaining)} left` : `${duration(remaining)} were left`),
    tokens !== null && `${compact(tokens)} tokens`,
    started && `started ${when(started)}`,
  ].filter(Boolean);
  return [
    el("div", { class: "run-title" }, el("h2", { title: run }, visible(note?.name || run)), el("span", { class: `status ${status}` }, status), tagsOf(run),
      el("a", { class: "button needs-server", href: `/api/export?${new URLSearchParams({ run })}`, download: "" }, "Save as one file")),
    el("p", { class: "subject" }, [facts.recipe && `Recipe ${facts.recipe}`, facts.model && `model ${shortModel(facts.model)}`, facts.rewards && `rewards ${facts.rewards}`].filter(Boolean).map((text, index) => [index > 0 && " · ", visible(text)])),
    note?.notes && el("p", { class: "notes" }, visible(note.notes)),
    outcome.map((text) => el("p", { class: "outcome" }, visible(text))),
    bar,
    el("p", { class: "facts" }, about.join(" · ")),
    progress.fleet && el("p", { class: "fleet" }, progress.fleet),
    ending && status !== "done" && el("div", { class: "fault" }, explained(visible(ending))),
  ];
}

/** Returns a time of the log as the reader's local time; as it is, if it is no time. */
function when(text) {
  const time = new Date(text);
  return Number.isNaN(time.getTime()) ? visible(String(text)) : time.toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
}

function sample(run, title, { step, prompt_index: prompt, sample_index: number, total, prompt: question, text }) {
  return el("article", { class: "card" },
    el("header", {}, el("h3", {}, title), el("span", { class: "mean" }, fixed(total)),
      el("a", { class: "facts", href: address("rollouts", { run, step, prompt }) }, `prompt ${prompt}, #${number}`)),
    el("p", { class: "preview" }, visible(question)),
    el("pre", { class: "text completion", tabindex: "0", "aria-label": title }, visible(text)));
}

/** The tags of a run. */
export function tagsOf(run) {
  return (app.runs[run].note?.tags ?? []).map((tag) => el("span", { class: "tag" }, visible(tag)));
}

/** Names a model by the last two parts of its path. */
function shortModel(model) {
  return model.startsWith("/") ? model.split("/").filter(Boolean).slice(-2).join("/") : model;
}

/** Returns the class of a difference: up or down if its interval and its test tell it from 0, else nothing. */
export function directionOf({ value, low, high }, p) {
  const isClear = low !== null && (low > 0 || high < 0) && (p === null || p === undefined || p < 0.05);
  return isClear ? (value > 0 ? "up" : "down") : "";
}

function change(each) {
  const { before, after, difference, when, set, name } = each;
  const direction = directionOf(difference, each.p_value);
  return el("li", {},
    el("h3", { title: name }, visible(name.replace(/^rewards\/(.+)\/mean$/, "$1")), set && el("small", {}, visible(set))),
    el("p", { class: "from-to" }, el("span", {}, fixed(before.value)), el("i", { "aria-label": "to" }, "→"), el("b", {}, fixed(after.value))),
    difference.low !== null && el("p", { class: "facts" }, el("span", { class: direction }, `${signed(difference.value)} `), `[${signed(difference.low)}, ${signed(difference.high)}]`),
    difference.low === null && after.low !== null && el("p", { class: "facts" }, `95 % [${fixed(after.low)}, ${fixed(after.high)}]`),
    el("p", { class: "facts" }, `${visible(when[0])} → ${visible(when[1])}`));
}

function factList(facts) {
  return el("dl", { class: "about" }, Object.entries(facts).map(([label, text]) => [
    el("dt", {}, visible(label)),
    el("dd", { title: label === "model" ? text : null }, label === "command" ? command(text) : visible(label === "model" ? shortModel(text) : label === "continued" ? when(text) : text)),
  ]));
}

function command(text) {
  const copy = el("button", { type: "button", class: "quiet", on: { click: async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code); // no permission: select it, to be copied by hand
    }
  } } }, "Copy");
  const code = el("code", {}, visible(text));
  return el("div", { class: "command" }, code, copy);
}

export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "an unknown time";
  if (seconds < 90) return `${shown(seconds, 2)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172_800) return `${shown(seconds / 3600, 2)} h`;
  return `${shown(seconds / 86_400, 2)} days`;
}

export function compact(number) {
  return number.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
}

/** Formats a number with as many digits as those beside it have. */
function fixed(value) {
  return value === null || value === undefined ? "–" : Math.abs(value) < 10 ? value.toFixed(3) : shown(value);
}

function signed(value) {
  return value === null || value === undefined ? "–" : `${value > 0 ? "+" : ""}${fixed(value)}`;
}
