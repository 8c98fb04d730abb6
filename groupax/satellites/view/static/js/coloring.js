// Colours by a setting: runs with equal values share one.

import { ask } from "./api.js";
import { app, stored } from "./state.js";

/** Returns the settings of a run, with the options of its command. */
export function settingsOf({ config, command } = { config: {}, command: {} }) {
  return { ...command, ...config };
}

/** Returns a value of a setting as text. */
export function plain(value) {
  return typeof value === "string" ? value : JSON.stringify(value) ?? "";
}

/** Gives the runs the colours of their values of the chosen setting; without one each run has its own. */
export async function colourRuns() {
  const setting = stored("colour-by", "");
  const found = setting ? Object.entries(await ask("config")) : [];
  const values = found.map(([name, each]) => [name, plain(settingsOf(each)[setting])]);
  const different = [...new Set(values.map(([, value]) => value))].sort((a, b) => Number(a) - Number(b) || a.localeCompare(b));
  app.groups = new Map(values.map(([name, value]) => [name, different.indexOf(value)]));
}
