// Groups of runs that differ in their seeds only.

import { ask } from "./api.js";
import { app } from "./state.js";

const OWN = new Set(["seed", "output_dir", "run_name", "project"]); // settings in which runs of a group may differ

let known = { signature: "", groups: [] };

/** Returns groups of at least two of these runs: `{ label, runs }`. */
export async function bands(runs) {
  const signature = JSON.stringify([runs, runs.map((run) => app.runs[run]?.path)]);
  if (known.signature === signature) return known.groups;
  const found = await ask("config");
  const groups = new Map();
  for (const run of runs) {
    const { config, command } = found[run] ?? {};
    if (!config || !Object.keys(config).length) continue;
    const key = JSON.stringify([command, Object.entries(config).filter(([name]) => !OWN.has(name)).sort()]);
    groups.set(key, [...(groups.get(key) ?? []), run]);
  }
  const several = [...groups.values()].filter((names) => names.length > 1);
  known = { signature, groups: several.map((names) => ({ label: `${commonName(names)} (${names.length} runs)`, runs: names })) };
  return known.groups;
}

/** Returns the beginning that names have in common, without what ends in the middle of a word or is a separator. */
export function commonName(names) {
  let length = 0;
  while (length < names[0].length && names.every((name) => name[length] === names[0][length])) length += 1;
  const common = names[0].slice(0, length).replace(/[-_./ =]+(seed|s)?[-_./ =]*$/i, "");
  return common || names[0];
}
