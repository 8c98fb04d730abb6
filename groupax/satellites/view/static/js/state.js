// The state that all views share: the runs, the selection, their colours, and the current view.

import { shortNames } from "./names.js";

export const app = {
  runs: {}, // name -> state, as the server reports it
  short: new Map(), // name -> its short form
  one: null, // the run that views of a single run show
  hidden: new Set(stored("hidden", [])),
  read: new Set(stored("read", [])), // diagnostics that were marked as read
  colours: new Map(stored("colours", [])), // path of a run -> number of its colour
  groups: new Map(), // name of a run -> number of its colour where the value of a setting decides it
};

const NUM_COLOURS = 12;
const NUM_REMEMBERED = 500;

/** Returns a setting of the page that this browser remembers. */
export function stored(name, missing) {
  try {
    return JSON.parse(localStorage.getItem(`groupax-${name}`)) ?? missing;
  } catch {
    return missing;
  }
}

export function store(name, value) {
  localStorage.setItem(`groupax-${name}`, JSON.stringify(value));
}

/** Returns the names of the selected runs. */
export function shownRuns() {
  return Object.keys(app.runs).filter((name) => !app.hidden.has(name));
}

export function toggleRun(name) {
  if (app.hidden.has(name)) app.hidden.delete(name);
  else app.hidden.add(name);
  store("hidden", [...app.hidden]);
}

/** Selects these runs and no others. */
export function chooseRuns(names) {
  const chosen = new Set(names);
  for (const name of Object.keys(app.runs)) {
    if (chosen.has(name)) app.hidden.delete(name);
    else app.hidden.add(name);
  }
  store("hidden", [...app.hidden]);
}

/** Takes the runs from the server's answer, and gives each new one the colour that fewest others have. */
export function takeRuns(runs) {
  const given = Object.entries(runs).map(([name, { note }]) => [name, note?.name ?? ""]);
  const signature = JSON.stringify(given);
  if (signature !== app.named) app.short = new Map([...shortNames(Object.keys(runs)), ...given.filter(([, title]) => title && given.filter(([, other]) => other === title).length === 1)]);
  app.named = signature;
  app.runs = runs;
  app.one ??= newest(runs);
  const paths = Object.values(runs).map((run) => run.path);
  const fresh = paths.filter((path) => !app.colours.has(path));
  if (!fresh.length) return;
  const counts = new Array(NUM_COLOURS).fill(0);
  for (const path of paths) if (app.colours.has(path)) counts[app.colours.get(path) % NUM_COLOURS] += 1;
  for (const path of fresh) {
    const number = counts.indexOf(Math.min(...counts));
    app.colours.set(path, number + NUM_COLOURS * counts[number]);
    counts[number] += 1;
  }
  store("colours", [...app.colours].slice(-NUM_REMEMBERED));
}

/** Returns the colour of a run: the same in every view, whatever other runs come and go. */
export function runColour(name) {
  return colour(colourNumber(name));
}

/** Returns the dash of a run's line, which tells apart runs of the same colour. */
export function runDash(name) {
  return Math.floor(colourNumber(name) / NUM_COLOURS);
}

function colourNumber(name) {
  return app.groups.get(name) ?? app.colours.get(app.runs[name]?.path) ?? 0;
}

/** Returns the short form of a run's name, which no other run has. */
export function shortName(name) {
  return app.short.get(name) ?? name;
}

export function colour(index) {
  return cssVariable(`--series-${(((index % NUM_COLOURS) + NUM_COLOURS) % NUM_COLOURS) + 1}`);
}

export function cssVariable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Parses the location hash into `{ view, parameters }`. */
export function place() {
  const [view, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: view || "overview", parameters: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

export function address(view, parameters = {}) {
  const known = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(known).toString();
  return `#/${view}${query ? `?${query}` : ""}`;
}

/** Navigates to a location; `replace` adds no history entry. */
export function go(view, parameters, replace = false) {
  const target = address(view, parameters);
  if (replace) {
    history.replaceState(null, "", target);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = target;
  }
}

/** Returns the run for a view of a single run: the named one, else the one that such a view showed last, if it is selected. */
export function oneRun(parameters) {
  const names = shownRuns().length ? shownRuns() : Object.keys(app.runs);
  if (parameters.run in app.runs) app.one = parameters.run;
  else if (!names.includes(app.one)) app.one = names[0] ?? null;
  return app.one;
}

/** Returns the run that wrote last, which a live run does; null without runs. */
function newest(runs) {
  const ages = Object.entries(runs).map(([name, { age_s: age }]) => [name, age ?? Infinity]);
  return ages.length ? ages.reduce((first, other) => (other[1] < first[1] ? other : first))[0] : null;
}

/** Whether a text in lower case is in the name of a run, in its tags or in its notes. */
export function mentions(name, text) {
  const { name: title = "", tags = [], notes = "" } = app.runs[name].note ?? {};
  return [name, title, tags.join(" "), notes].some((each) => each.toLowerCase().includes(text));
}

/** Returns the diagnostics of a run that were not marked as read, as pairs of name and severity. */
export function unread(name) {
  const { path, diagnostics } = app.runs[name];
  return Object.entries(diagnostics).filter(([diagnostic]) => !app.read.has(`${path}\n${diagnostic}`));
}

export function markRead(name, diagnostic, isRead) {
  const key = `${app.runs[name].path}\n${diagnostic}`;
  if (isRead) app.read.add(key);
  else app.read.delete(key);
  store("read", [...app.read].slice(-2000));
}
