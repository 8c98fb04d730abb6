// Where the time of steps went: the shares of their phases.

import { ask } from "./api.js";
import { drawn, el, empty, failure, fill, shown } from "./dom.js";
import { duration } from "./overview.js";
import { RunChoice } from "./runs.js";
import { colour, oneRun } from "./state.js";

// Names of phases, and their colours.
const PHASES = {
  compile: ["compilation", 3],
  rollout: ["rollout", 0],
  reward: ["waiting for rewards", 1],
  wait: ["waiting for rollouts", 1],
  train: ["update", 2],
  other: ["other", 7],
};

export class Time {
  constructor(root) {
    this.runChoice = new RunChoice("time");
    this.shares = el("div");
    this.hint = el("p", { class: "hint" });
    fill(root, el("h1", { class: "sr" }, "Time"), el("div", { class: "toolbar" }, this.runChoice.element), this.shares, this.hint);
  }

  async moved(parameters) {
    const run = oneRun(parameters);
    if (run === null) return;
    this.run = run;
    this.runChoice.show(run);
    await this.read();
  }

  async read() {
    const { run } = this;
    try {
      const found = await ask("shares", { run });
      if (this.run !== run || this.closed) return;
      this.draw(found);
      drawn();
    } catch (error) {
      if (this.run === run && !this.closed) fill(this.shares, failure(error, () => this.read()));
    }
  }

  draw(shares) {
    const phases = new Set(shares.map(({ phase }) => phase));
    if (!shares.some(({ share }) => share > 0)) {
      this.hint.textContent = "";
      fill(this.shares, empty("No times yet", "This page updates when the run has finished its first step."));
      return;
    }
    this.hint.textContent = phases.has("wait")
      ? "Rollouts are generated during updates, so that a step waits for them only where they take longer."
      : "The phases of a step follow each other. Rewards are computed during the rollout; only the time that the step waited for them counts.";
    if (phases.has("compile")) this.hint.textContent += " The log has how long a step compiled, not in which phases: it is taken from those that took longer than usual.";
    fill(this.shares, shareBar(shares), shareTable(shares));
  }

  themed() {
    this.read();
  }

  close() {
    this.closed = true;
  }
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
