// The diagnostics of the runs, with cause and remedy, in order of severity.

import { ask } from "./api.js";
import { drawn, el, empty, failure, fill, plural, visible } from "./dom.js";
import { address, app, markRead, runColour, shownRuns } from "./state.js";

const ORDER = ["error", "warning", "note"];
const TRACEBACK = "Traceback (most recent call last)";
// Where the link of a diagnostic leads beyond its step: to what its text asks to read.
const READ_FIRST = {
  reward_hacking: { sort: "highest", sample: "highest" },
  length_collapse: { sort: "highest", sample: "highest" },
  length_explosion: { sort: "longest", sample: "longest" },
};
const FRAME = /^\s*File "(.*)", line \d+/;
// Frames of Python, of installed packages and of groupax, none of which the user has written.
const OF_OTHERS = /^<frozen|[\\/](?:site-packages|dist-packages|lib[\\/]python3[^\\/]*)[\\/]|[\\/]groupax[\\/](?:data|environments|episodes|evaluation|rewards|rollouts|tools)[\\/]/i;

const PATIENCE_STEPS = 5; // in which a problem must last to be reported

/** Says that there are no diagnostics after these steps, and for how few steps that says nothing. */
export function noneFound(step) {
  if (step === null) return "None so far; no step has ended yet.";
  return step < PATIENCE_STEPS ? `None so far; most problems are reported only after ${PATIENCE_STEPS} steps.` : `No problems found in ${plural(step, "step")}.`;
}

/** Sorts diagnostics by severity, then by step. */
function bySeverity(diagnostics) {
  return [...diagnostics].sort((a, b) => ORDER.indexOf(a.severity) - ORDER.indexOf(b.severity) || (a.step ?? 0) - (b.step ?? 0));
}

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
      const signature = JSON.stringify([found, runs, [...app.read]]);
      if (signature === this.drawn) return;
      this.drawn = signature;
      const parts = runs.filter((run) => found[run]?.length).map((run) => this.section(run, found[run], runs.length > 1));
      fill(this.body, parts.length ? parts : empty("No diagnostics", "The selected runs have none so far."));
      drawn();
    } catch (error) {
      fill(this.body, failure(error, () => this.start()));
    }
  }

  section(run, diagnostics, isNamed) {
    const dot = el("i", { class: "dot" });
    dot.style.setProperty("--key", runColour(run));
    return el("section", {},
      el("h2", {}, isNamed && dot, isNamed ? `${visible(run)}: ` : "", plural(diagnostics.length, "diagnostic")),
      diagnosticList(run, diagnostics.slice(-500), () => this.start()));
  }

  update() {
    return this.start();
  }
}

/** A list of a run's diagnostics; `changed()` is called when one is marked as read. */
export function diagnosticList(run, diagnostics, changed) {
  return el("ul", { class: "diagnostics" }, bySeverity(diagnostics).map((diagnostic) => item(run, diagnostic, changed)));
}

function item(run, diagnostic, changed) {
  const isRead = app.read.has(`${app.runs[run]?.path}\n${diagnostic.name}`);
  const mark = el("button", { type: "button", class: "quiet", "aria-pressed": String(isRead), on: { click: () => {
    markRead(run, diagnostic.name, !isRead);
    dispatchEvent(new CustomEvent("groupax-read"));
    changed();
  } } }, isRead ? "Mark as unread" : "Mark as read");
  return el("li", { class: `${diagnostic.severity}${isRead ? " read" : ""}` },
    el("header", {}, el("span", { class: `severity ${diagnostic.severity}` }, diagnostic.severity),
      el("b", {}, visible(diagnostic.name).replaceAll("_", " ")),
      diagnostic.step !== null && diagnostic.step > 0 && el("a", { href: address("rollouts", { run, step: diagnostic.step, ...READ_FIRST[diagnostic.name] }) }, `step ${diagnostic.step}`),
      mark),
    explained(visible(diagnostic.text)));
}

/** The text; of a traceback the user's last frame and the error first, and the whole of it folded. */
export function explained(text) {
  const start = text.indexOf(TRACEBACK);
  if (start < 0) return el("p", {}, text);
  const lines = text.slice(start).trimEnd().split("\n");
  return [
    el("p", {}, text.slice(0, start).trimEnd()),
    el("pre", { class: "text trace" }, ownFrame(lines).join("\n")),
    el("details", {}, el("summary", {}, "Whole traceback"), el("pre", { class: "text trace" }, lines.join("\n"))),
  ];
}

/** Returns the lines of the last frame of the user's code, or if there is none of the last one, and of the error. */
export function ownFrame(lines) {
  const first = lines.findLastIndex((line) => line.includes(TRACEBACK)) + 1; // of errors that caused others, the last
  const places = lines.flatMap((line, place) => (place >= first && FRAME.test(line) ? [place] : []));
  if (!places.length) return lines.slice(first);
  const own = places.findLastIndex((place) => !OF_OTHERS.test(FRAME.exec(lines[place])[1]));
  const chosen = own < 0 ? places.length - 1 : own;
  const error = lines.findIndex((line, place) => place > places[places.length - 1] && !line.startsWith(" "));
  const frame = lines.slice(places[chosen], places[chosen + 1] ?? (error < 0 ? lines.length : error));
  return [...frame, ...(error < 0 ? [] : lines.slice(error))];
}
