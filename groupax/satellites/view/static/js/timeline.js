// Where the time of steps went: their phases on a time axis, and the shares of phases in all steps.

import { ask } from "./api.js";
import { drawn, el, empty, failure, fill, select, shown } from "./dom.js";
import { duration } from "./overview.js";
import { RunChoice } from "./runs.js";
import { address, colour, go, oneRun } from "./state.js";

const NUMBERS = [5, 10, 20, 50, 100, 200];
const LONGEST = 2; // median steps; a longer bar is drawn broken
// Names of phases, and their colours.
const PHASES = {
  compile: ["compilation", 3],
  rollout: ["rollout", 0],
  reward: ["waiting for rewards", 1],
  wait: ["waiting for rollouts", 1],
  train: ["update", 2],
  other: ["other", 7],
};

export class Timeline {
  constructor(root) {
    this.root = root;
    this.runChoice = new RunChoice("time");
    this.number = 20;
    this.last = null; // the last step that is shown, null for the newest
    this.hint = el("p", { class: "hint" });
    this.shares = el("div");
    this.chart = el("div", { class: "timeline" });
    this.reading = el("p", { class: "phase-reading", role: "status" });
    this.range = el("span", { class: "hint" });
    const move = (text, by) => el("button", { type: "button", on: { click: () => this.move(by) } }, text);
    fill(root, el("h1", { class: "sr" }, "Time"),
      el("div", { class: "toolbar" }, this.runChoice.element,
        select("Steps", NUMBERS.map((number) => [String(number), String(number)]), String(this.number), (number) => { this.number = Number(number); this.read(); }, "number"),
        el("div", { class: "joined" }, move("‹ Earlier", -1), move("Later ›", 1), move("Newest", Infinity)), this.range),
      this.shares, this.hint, this.chart, this.reading);
  }

  async moved(parameters) {
    const run = oneRun(parameters);
    if (run === null) return;
    if (run !== this.run) this.last = null;
    this.run = run;
    this.runChoice.show(run);
    await this.read();
  }

  async read() {
    const { run } = this;
    try {
      const found = await ask("timeline", { run, last: this.last, num: this.number });
      if (this.run !== run || this.closed) return;
      this.draw(found);
      drawn();
    } catch (error) {
      if (this.run === run && !this.closed) fill(this.chart, failure(error, () => this.read()));
    }
  }

  draw({ lanes, bars, shares, is_ahead: isAhead }) {
    this.hint.textContent = isAhead
      ? "Rollouts are generated during updates: each bar of that lane ends when a step received the rollout."
      : "The phases of a step follow each other. Rewards are computed during the rollout; only the time that the step waited for them is shown.";
    if (lanes.includes("compile")) this.hint.textContent += " The log has how long a step compiled, not in which phases: it is taken from those that took longer than usual.";
    if (!bars.length) {
      this.range.textContent = "";
      this.shares.replaceChildren();
      fill(this.chart, empty("No times yet", "This page updates when the run has finished its first step."));
      return;
    }
    const steps = [...new Set(bars.map((bar) => bar.step))].sort((a, b) => a - b);
    this.steps = steps;
    this.range.textContent = `steps ${shown(steps[0])} to ${shown(steps[steps.length - 1])}`;
    fill(this.shares, shareBar(shares), shareTable(shares));
    const begin = Math.min(...bars.map((bar) => bar.start_s));
    const end = Math.max(...bars.map((bar) => bar.end_s));
    const axis = new BrokenAxis(bars, isAhead);
    fill(this.chart,
      lanes.map((lane) => el("div", { class: "lane" },
        el("span", { class: "lane-name" }, PHASES[lane][0]),
        el("div", { class: "lane-bars" }, bars.filter((bar) => bar.lane === lane).map((bar) => this.bar(bar, axis))))),
      el("div", { class: "lane" }, el("span", { class: "lane-name" }, "step"), el("div", { class: "lane-bars lane-steps" }, stepMarks(bars, steps, axis))),
      el("p", { class: "axis-ends" }, el("span", {}, duration(begin)), axis.isBroken && el("span", {}, `hatched bars are longer than they are drawn: more than ${shown(axis.limit_s, 2)} s`), el("span", {}, `${duration(end)} of training`)),
      this.table(lanes, bars, steps));
  }

  /** What the bars show as a table, which the keyboard and screen readers reach. */
  table(lanes, bars, steps) {
    const seconds = new Map(bars.map((bar) => [`${bar.step} ${bar.lane}`, bar.end_s - bar.start_s]));
    const table = el("details", { class: "more", open: this.isOpen }, el("summary", {}, "These steps as a table"),
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Seconds of the phases of each step" }, el("table", { class: "data shares" },
        el("thead", {}, el("tr", {}, ["Step", ...lanes.map((lane) => `${PHASES[lane][0]}, s`)].map((text) => el("th", { scope: "col" }, text)))),
        el("tbody", {}, steps.map((step) => el("tr", {}, el("th", { scope: "row" }, el("a", { href: address("rollouts", { run: this.run, step }) }, shown(step))),
          lanes.map((lane) => el("td", { class: "number" }, shown(seconds.get(`${step} ${lane}`) ?? 0, 3)))))))));
    table.addEventListener("toggle", () => { this.isOpen = table.open; });
    return table;
  }

  bar(bar, axis) {
    const text = `step ${shown(bar.step)}, ${PHASES[bar.lane][0]}: ${shown(bar.end_s - bar.start_s, 3)} s`;
    const isCut = bar.end_s - bar.start_s > axis.limit_s;
    const element = el("i", { class: `phase ${bar.step % 2 ? "odd" : ""} ${isCut ? "cut" : ""}`, title: text, on: {
      pointerenter: () => { this.reading.textContent = text; },
      click: () => go("rollouts", { run: this.run, step: bar.step }),
    } });
    element.style.setProperty("--key", colour(PHASES[bar.lane][1]));
    place(element, axis.part(bar.start_s), axis.part(bar.end_s));
    return element;
  }

  move(by) {
    if (!this.steps) return;
    if (by === Infinity) this.last = null;
    else if (by < 0) this.last = Math.max(this.steps[0] - 1, this.number);
    else this.last = this.steps[this.steps.length - 1] + this.number;
    this.read();
  }

  themed() {
    this.read();
  }

  key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, End: Infinity };
    if (!(event.key in moves)) return false;
    this.move(moves[event.key]);
    return true;
  }

  close() {
    this.closed = true;
  }
}

/** A time axis on which a bar of far more than a usual step is cut, so that one long bar does not flatten all others. */
class BrokenAxis {
  /** @param {{step: number, lane: string, start_s: number, end_s: number}[]} bars @param {boolean} isAhead whether rollouts lie beside the other phases */
  constructor(bars, isAhead) {
    const inSequence = bars.filter((bar) => !(isAhead && bar.lane === "rollout")).sort((a, b) => a.start_s - b.start_s);
    const steps = new Map();
    for (const { step, start_s: start, end_s: end } of inSequence) steps.set(step, (steps.get(step) ?? 0) + end - start);
    const times = [...steps.values()].sort((a, b) => a - b);
    this.limit_s = LONGEST * times[times.length >> 1];
    const first = Math.min(...bars.map((bar) => bar.start_s));
    this.knots = [[first, 0]]; // seconds, position
    for (const { start_s: start, end_s: end } of inSequence) {
      this.add(start, Infinity);
      this.add(end, this.limit_s);
    }
    this.add(Math.max(...bars.map((bar) => bar.end_s)), Infinity);
    this.isBroken = inSequence.some((bar) => bar.end_s - bar.start_s > this.limit_s);
  }

  /** Extends the axis to a time, by at most so many seconds. */
  add(seconds, limit) {
    const [before, at] = this.knots[this.knots.length - 1];
    if (seconds > before) this.knots.push([seconds, at + Math.min(seconds - before, limit)]);
  }

  /** Returns the part of the axis that lies before a time, from 0 to 1. */
  part(seconds) {
    const found = this.knots.findIndex(([time]) => time >= seconds);
    const index = found < 0 ? this.knots.length - 1 : Math.max(found, 1);
    const [[before, from], [after, to]] = this.knots.slice(index - 1, index + 1);
    const inside = after > before ? Math.min((seconds - before) / (after - before), 1) : 1;
    return (from + inside * (to - from)) / this.knots[this.knots.length - 1][1];
  }
}

function place(element, from, to) {
  element.style.setProperty("--from", `${100 * from}%`);
  element.style.setProperty("--wide", `${100 * (to - from)}%`);
}

/** Numbers of steps where they begin, as many as fit. */
function stepMarks(bars, steps, axis) {
  const every = Math.ceil(steps.length / 20);
  return steps.filter((_, index) => index % every === 0).map((step) => {
    const own = bars.filter((bar) => bar.step === step && bar.lane !== "rollout");
    const from = Math.min(...(own.length ? own : bars.filter((bar) => bar.step === step)).map((bar) => bar.start_s));
    const mark = el("span", {}, shown(step));
    place(mark, axis.part(from), axis.part(from));
    return mark;
  });
}

function shareBar(shares) {
  return el("div", { class: "share-bar", "aria-hidden": "true" }, shares.filter(({ share }) => share > 0).map(({ phase, share }) => {
    const part = el("i", {});
    part.style.setProperty("--key", colour(PHASES[phase][1]));
    part.style.setProperty("--wide", `${100 * share}%`);
    return part;
  }));
}

function shareTable(shares) {
  return el("table", { class: "data shares" },
    el("thead", {}, el("tr", {}, ["All steps", "Share", "Total", "Median per step"].map((text) => el("th", { scope: "col" }, text)))),
    el("tbody", {}, shares.map(({ phase, share, total_s: total, median_s: median }) => {
      const dot = el("i", { class: "dot" });
      dot.style.setProperty("--key", colour(PHASES[phase][1]));
      return el("tr", {}, el("th", { scope: "row" }, dot, PHASES[phase][0]), el("td", { class: "number" }, `${(100 * share).toFixed(0)} %`),
        el("td", { class: "number" }, duration(total)), el("td", { class: "number" }, median === null ? "–" : `${shown(median, 3)} s`));
    })));
}
