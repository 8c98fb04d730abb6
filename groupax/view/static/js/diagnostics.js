// The diagnostics of the runs, with cause and remedy.

import { ask } from "./api.js";
import { el, empty, failure, fill, plural, visible } from "./dom.js";
import { address, runColour, shownRuns } from "./state.js";

export class Diagnostics {
  constructor(root) {
    this.root = root;
    this.body = el("div");
    fill(root, el("h1", { class: "sr" }, "Diagnostics"), this.body);
  }

  async start() {
    try {
      const found = await ask("diagnostics");
      const runs = shownRuns();
      const signature = JSON.stringify([found, runs]);
      if (signature === this.drawn) return;
      this.drawn = signature;
      const parts = runs.filter((run) => found[run]?.length).map((run) => this.section(run, found[run], runs.length > 1));
      fill(this.body, parts.length ? parts : empty("No problems found", "The selected runs have no diagnostics: rewards vary, completions end, log-probs agree."));
    } catch (error) {
      fill(this.body, failure(error, () => this.start()));
    }
  }

  section(run, diagnostics, isNamed) {
    const dot = el("i", { class: "dot" });
    dot.style.setProperty("--key", runColour(run));
    return el("section", {},
      el("h2", {}, isNamed && dot, isNamed ? `${run}: ` : "", plural(diagnostics.length, "diagnostic")),
      el("ul", { class: "diagnostics" }, diagnostics.slice(-500).reverse().map((diagnostic) => el("li", {},
        el("header", {}, el("b", {}, visible(diagnostic.name).replaceAll("_", " ")),
          diagnostic.step !== null && el("a", { href: address("rollouts", { run, step: diagnostic.step }) }, `step ${diagnostic.step}`)),
        el("p", {}, visible(diagnostic.text))))));
  }

  update() {
    return this.start();
  }

  key() {
    return false;
  }

  close() {}
}
