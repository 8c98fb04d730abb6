// The state that all views share: the runs, the selection, and the current view.

export const app = {
  runs: {}, // name -> state, as the server reports it
  hidden: new Set(JSON.parse(localStorage.getItem("groupax-hidden") ?? "[]")),
};

const NUM_COLOURS = 8;

/** Returns the names of the selected runs. */
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

/** Returns the colour of a run, which is the same in every view. */
export function runColour(name) {
  return colour(Object.keys(app.runs).indexOf(name));
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
  return { view: view || "curves", parameters: Object.fromEntries(new URLSearchParams(query ?? "")) };
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

/** Returns the run for a view of a single run: the named one, else the first selected one. */
export function oneRun(parameters) {
  return parameters.run in app.runs ? parameters.run : (shownRuns()[0] ?? null);
}
