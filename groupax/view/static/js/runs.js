// Which run a view of one run shows.

import { el, fill, select } from "./dom.js";
import { app, go } from "./state.js";

/** A choice among the runs. It is made anew only when there are others: it may be open. */
export class RunChoice {
  constructor(view) {
    this.view = view;
    this.element = el("span");
  }

  show(run) {
    const names = Object.keys(app.runs);
    const told = JSON.stringify([names, run]);
    if (told === this.told) return;
    this.told = told;
    fill(this.element, select("Run", names.map((name) => [name, name]), run, (chosen) => go(this.view, { run: chosen }), "run"));
  }
}
