// The page: routing, the list of runs, and polling of the server.

import { ask } from "./api.js";
import { Curves } from "./curves.js";
import { el, failure, fill, shown, visible } from "./dom.js";
import { Evaluations } from "./evaluations.js";
import { Diagnostics } from "./diagnostics.js";
import { Prompts } from "./prompts.js";
import { Rollouts } from "./rollouts.js";
import { Settings } from "./settings.js";
import { address, app, go, place, runColour, shownRuns, toggleRun } from "./state.js";

const VIEWS = {
  curves: ["Curves", Curves],
  rollouts: ["Rollouts", Rollouts],
  prompts: ["Prompts", Prompts],
  evaluations: ["Evaluations", Evaluations],
  settings: ["Settings", Settings],
  diagnostics: ["Diagnostics", Diagnostics],
};
const KEYS = [
  ["1 – 6", "the views"], ["/", "search"], ["← →", "previous step, next step"], ["↑ ↓", "previous group, next group"], ["Home End", "first, newest step"],
  ["Shift+Enter", "in the search of rollouts: search all steps"], ["Esc", "clear search and filter, leave a field"], ["t", "light or dark"], ["?", "these keys"],
];
const QUICK_MS = 1000;
const SLOW_MS = 5000;

const main = document.getElementById("main");
const side = document.getElementById("side");
const connection = document.getElementById("connection");
let view = null;

function show() {
  const { view: name, parameters } = place();
  const known = name in VIEWS ? name : "curves";
  if (!Object.keys(app.runs).length) return; // the server has not responded yet
  drawTabs(known);
  if (view?.name === known && view.page.moved) {
    view.page.moved(parameters);
    return;
  }
  view?.page.close();
  main.replaceChildren();
  document.title = `${VIEWS[known][0]} · groupax view`;
  const page = new VIEWS[known][1](main);
  view = { name: known, page };
  page.start(parameters);
}

/** Tabs and runs are made once and then changed in place: a click may be under way. */
const tabs = Object.entries(VIEWS).map(([name, [title]], index) =>
  el("a", { href: address(name), title: `${title} (${index + 1})` }, title));
const count = el("span", { class: "count" });
tabs[Object.keys(VIEWS).indexOf("diagnostics")].append(count);
fill(document.getElementById("tabs"), tabs);

function drawTabs(current) {
  const numDiagnostics = Object.values(app.runs).reduce((sum, run) => sum + run.num_diagnostics, 0);
  count.textContent = String(numDiagnostics);
  count.hidden = !numDiagnostics;
  Object.keys(VIEWS).forEach((name, index) => {
    if (name === current) tabs[index].setAttribute("aria-current", "page");
    else tabs[index].removeAttribute("aria-current");
  });
}

const cards = new Map(); // by run name

function runCard(name) {
  const box = el("input", { type: "checkbox", name: `run-${name}`, on: { change: () => {
    toggleRun(name);
    drawRuns();
    view?.page.update([name]);
  } } });
  const [status, facts, fault, bad] = [el("span"), el("div", { class: "facts" }), el("p", { class: "fault" }), el("p", { class: "fault" })];
  const label = el("label", { title: app.runs[name].path }, box, el("span", { class: "name" }, visible(name)), status);
  return { item: el("li", {}, label, facts, fault, bad), box, status, facts, fault, bad };
}

function drawRuns() {
  const chosen = new Set(shownRuns());
  const names = Object.keys(app.runs);
  if (names.join("\n") !== [...cards.keys()].join("\n")) {
    cards.clear();
    for (const name of names) cards.set(name, runCard(name));
    fill(side, el("h2", {}, "Runs"), el("ul", { class: "runs" }, [...cards.values()].map((card) => card.item)));
  }
  for (const [name, run] of Object.entries(app.runs)) {
    const { item, box, status, facts, fault, bad } = cards.get(name);
    box.checked = chosen.has(name);
    item.className = chosen.has(name) ? "" : "off";
    item.style.setProperty("--key", runColour(name));
    status.className = `status ${run.status}`;
    status.textContent = run.status;
    const about = ["reward", "loss"].find((name) => name in run.latest);
    const latest = about ? ` · ${about} ${shown(run.latest[about], 3)}` : "";
    facts.textContent = run.last_step === null ? "no step yet" : `step ${shown(run.last_step)}${latest}`;
    fault.textContent = visible(run.fault);
    bad.textContent = run.num_bad_lines > 0 ? `${run.num_bad_lines} lines could not be read` : "";
  }
}

/** Whether a view of one run has lost it, or shows another one until the run came that the address names. */
function showsAnother() {
  const { run } = view.page;
  const named = place().parameters.run;
  return run !== undefined && (!(run in app.runs) || (named in app.runs && named !== run));
}

/** Ask for news; quickly while a run is live. */
async function poll() {
  let wait = SLOW_MS;
  try {
    if (!document.hidden || !Object.keys(app.runs).length) {
      const runs = await ask("runs");
      const names = Object.keys({ ...app.runs, ...runs }); // including added and removed runs
      const changed = names.filter((name) => String(runs[name]?.version) !== String(app.runs[name]?.version));
      const isTold = JSON.stringify(Object.values(runs).map((run) => run.status)) !== JSON.stringify(Object.values(app.runs).map((run) => run.status));
      app.runs = runs;
      if (Object.values(runs).some((run) => run.status !== "done")) wait = QUICK_MS;
      if (changed.length || isTold) {
        drawRuns();
        drawTabs(place().view in VIEWS ? place().view : "curves");
      }
      if (!view || showsAnother()) show();
      else if (changed.length) await view.page.update(changed);
    }
    const isLive = Object.values(app.runs).some((run) => run.status === "live");
    connection.className = `connection ${isLive ? "live" : ""}`;
    connection.textContent = isLive ? "live" : "";
  } catch (error) {
    connection.className = "connection lost";
    connection.textContent = "no connection";
    if (!Object.keys(app.runs).length) fill(main, failure(error));
  }
  setTimeout(poll, wait);
}

function switchTheme() {
  const isDark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("groupax-theme", isDark ? "light" : "dark");
  themed();
}

function themed() {
  drawRuns();
  view?.page.themed?.();
}

function showKeys() {
  const dialog = document.getElementById("keys");
  fill(dialog, el("h2", { id: "keys-title" }, "Keys"), el("dl", {}, KEYS.map(([key, text]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, text)])),
    el("button", { type: "button", on: { click: () => dialog.close() } }, "Close"));
  dialog.showModal();
}

addEventListener("keydown", (event) => {
  const { target } = event;
  const isField = target.matches?.("input, select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (isField) {
    if (event.key === "Escape") target.blur();
    return;
  }
  if (view?.page.key(event)) {
    event.preventDefault();
    return;
  }
  const names = Object.keys(VIEWS);
  if (event.key >= "1" && event.key <= String(names.length)) go(names[Number(event.key) - 1]);
  else if (event.key === "t") switchTheme();
  else if (event.key === "?") showKeys();
});
document.getElementById("theme").addEventListener("click", switchTheme);
document.getElementById("help").addEventListener("click", showKeys);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themed);
addEventListener("hashchange", show);
poll();
