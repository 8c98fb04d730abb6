// The page: routing, the list of runs, and polling of the server.

import { ask } from "./api.js";
import { Curves } from "./curves.js";
import { Diagnostics } from "./diagnostics.js";
import { el, failure, fill } from "./dom.js";
import { Evaluations } from "./evaluations.js";
import { Overview } from "./overview.js";
import { Prompts } from "./prompts.js";
import { RunsTable } from "./runs_table.js";
import { Rollouts } from "./rollouts.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Time } from "./time.js";
import { address, app, go, place, takeRuns, unread } from "./state.js";

const VIEWS = {
  overview: ["Overview", Overview],
  runs: ["Runs", RunsTable],
  curves: ["Curves", Curves],
  time: ["Time", Time],
  rollouts: ["Rollouts", Rollouts],
  prompts: ["Prompts", Prompts],
  evaluations: ["Evaluations", Evaluations],
  settings: ["Settings", Settings],
  diagnostics: ["Diagnostics", Diagnostics],
};
const saved = globalThis.groupaxExport;
if (saved) for (const name of ["runs", "prompts"]) delete VIEWS[name]; // which compare runs and search steps
const KEYS = [
  ["1 – 9", "the views"], ["/", "search"], ["← →", "previous step, next step"], ["↑ ↓", "previous group, next group"], ["Home End", "first, newest step"],
  ["j k", "next, previous completion"], ["c", "copy the completion"], ["p", "copy a link to the completion"],
  ["Shift+Enter", "in the search of rollouts: search all steps"], ["Esc", "clear search and filter, leave a field"], ["t", "light or dark"], ["?", "these keys"],
];
const QUICK_MS = 1000;
const SLOW_MS = 5000;

const main = document.getElementById("main");
const sidebar = new Sidebar(document.getElementById("side"), (names) => view && update(names));
const connection = document.getElementById("connection");
let view = null;

function show() {
  const { view: name, parameters } = place();
  if (!Object.keys(app.runs).length) return; // the server has not responded yet
  const wanted = known(name);
  drawTabs(wanted);
  if (view?.name === wanted && view.page.moved) {
    view.page.moved(parameters);
    return;
  }
  view?.page.close?.();
  main.replaceChildren();
  document.title = `${VIEWS[wanted][0]} · groupax view`;
  const page = new VIEWS[wanted][1](main);
  view = { name: wanted, page };
  if (page.moved) page.moved(parameters);
  else page.start();
}

/** Shows what is new of these runs; by default a page reads its own run again. */
function update(names) {
  const { page } = view;
  if (page.update) return page.update(names);
  page.runChoice.show(page.run);
  return names.includes(page.run) && page.read();
}

/** Tabs are made once and then changed in place: a click may be under way. */
const names = Object.keys(VIEWS);
const tabs = names.map((name, index) => el("a", { href: address(name), title: `${VIEWS[name][0]} (${index + 1})` }, VIEWS[name][0]));
const count = el("span", { class: "count" });
tabs[names.indexOf("diagnostics")].append(count);
// On a phone the views are a select box.
const choice = el("select", { class: "view-choice", "aria-label": "View", on: { change: () => go(choice.value) } },
  names.map((name) => el("option", { value: name }, VIEWS[name][0])));
fill(document.getElementById("tabs"), tabs, choice);

function drawTabs(current) {
  const severities = Object.keys(app.runs).flatMap((name) => unread(name).map(([, severity]) => severity));
  const numShown = severities.filter((severity) => severity !== "note").length;
  count.textContent = String(numShown);
  count.className = `count ${severities.includes("error") ? "error" : ""}`;
  count.hidden = !numShown;
  choice.value = current;
  names.forEach((name, index) => {
    if (name === current) tabs[index].setAttribute("aria-current", "page");
    else tabs[index].removeAttribute("aria-current");
  });
}

function known(name) {
  return name in VIEWS ? name : "overview";
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
      const all = Object.keys({ ...app.runs, ...runs }); // including added and removed runs
      const sign = (run) => run && JSON.stringify([run.version, run.status, run.ending, run.note]);
      const changed = all.filter((name) => sign(runs[name]) !== sign(app.runs[name]));
      takeRuns(runs);
      if (Object.values(runs).some((run) => ["waiting", "live", "quiet"].includes(run.status))) wait = QUICK_MS;
      if (changed.length) {
        sidebar.draw();
        drawTabs(known(place().view));
      }
      if (!view || showsAnother()) show();
      else if (changed.length) await update(changed);
    }
    const isLive = Object.values(app.runs).some((run) => run.status === "live");
    connection.className = `connection ${isLive && !saved ? "live" : ""}`;
    connection.textContent = saved ? `saved ${new Date(saved.at).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" })}` : isLive ? "live" : "";
  } catch (error) {
    connection.className = "connection lost";
    connection.textContent = "no connection";
    if (!Object.keys(app.runs).length) fill(main, failure(error));
  }
  if (!saved) setTimeout(poll, wait);
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
  sidebar.draw();
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
  const { page } = view ?? {};
  if (event.key === "/" ? page?.search : page?.key?.(event)) {
    event.preventDefault();
    if (event.key === "/") page.search.focus();
    return;
  }
  if (/^[1-9]$/.test(event.key)) go(names[Number(event.key) - 1]);
  else if (event.key === "t") switchTheme();
  else if (event.key === "?") showKeys();
});
document.getElementById("theme").addEventListener("click", switchTheme);
document.getElementById("help").addEventListener("click", showKeys);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themed);
addEventListener("hashchange", show);
addEventListener("groupax-runs", () => sidebar.draw());
addEventListener("groupax-read", () => drawTabs(known(place().view)));
poll();
