// The selection of a run in views of a single run.

import { el, fill, select } from "./dom.js";
import { app, go } from "./state.js";

/** A select box of the runs, rebuilt only if the runs change, as it may be open. */
export class RunChoice {
  constructor(view) {
    this.view = view;
    this.element = el("span");
  }

  show(run) {
    const names = Object.keys(app.runs);
    const signature = JSON.stringify([names, run]);
    if (signature === this.drawn) return;
    this.drawn = signature;
    fill(this.element, select("Run", names.map((name) => [name, name]), run, (chosen) => go(this.view, { run: chosen }), "run"));
  }
}
