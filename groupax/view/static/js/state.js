// What all views share: the runs, which are shown, and where in the page we are.

export const app = {
  runs: {}, // name -> state, as the server tells it
  hidden: new Set(JSON.parse(localStorage.getItem("groupax-hidden") ?? "[]")),
};

const NUM_COLOURS = 8;

/** Names of the runs that are shown. */
export function shownRuns() {
  const names = Object.keys(app.runs);
  const chosen = names.filter((name) => !app.hidden.has(name));
  return chosen.length ? chosen : names;
}

export function toggleRun(name) {
  if (app.hidden.has(name)) app.hidden.delete(name);
  else app.hidden.add(name);
  localStorage.setItem("groupax-hidden", JSON.stringify([...app.hidden]));
}

/** The colour of a run, the same in every view. */
export function runColour(name) {
  return colour(Object.keys(app.runs).indexOf(name));
}

export function colour(index) {
  return cssVariable(`--series-${(((index % NUM_COLOURS) + NUM_COLOURS) % NUM_COLOURS) + 1}`);
}

export function cssVariable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** The address within the page: `{ view, parameters }`. */
export function place() {
  const [view, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: view || "curves", parameters: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

export function address(view, parameters = {}) {
  const known = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(known).toString();
  return `#/${view}${query ? `?${query}` : ""}`;
}

/** Go somewhere; `replace` leaves no trace in the history. */
export function go(view, parameters, replace = false) {
  const target = address(view, parameters);
  if (replace) {
    history.replaceState(null, "", target);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = target;
  }
}

/** The run that a view of one run shows: the one named, else the first that is shown. */
export function oneRun(parameters) {
  return parameters.run in app.runs ? parameters.run : (shownRuns()[0] ?? null);
}
