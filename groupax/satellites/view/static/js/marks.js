// Diagnostics as marks on the x axes of charts.

import { ask } from "./api.js";
import { visible } from "./dom.js";
import { runColour, shortName } from "./state.js";

/** Returns the marks of runs between two positions of an axis: of the diagnostics of a severity that may matter. */
export async function marksOf(runs, by = "step", from = null, to = null) {
  const found = await ask("diagnostics", { run: runs, by });
  return Object.entries(found).flatMap(([run, diagnostics]) => diagnostics
    .filter(({ step, x, severity }) => step > 0 && severity !== "note" && x !== null && x >= (from ?? -Infinity) && x <= (to ?? Infinity))
    .map(({ step, x, name }) => ({ x, colour: runColour(run), text: `${visible(shortName(run))}: ${visible(name).replaceAll("_", " ")}${by === "step" ? "" : ` at step ${step}`}` })));
}
