// Tokens shaded by a value.

import { el, shown, visible } from "./dom.js";

const LEVELS = 10;
// The meaning of each kind of value, and the range of the shading.
const KINDS = {
  logp: { name: "surprise, −log p", scale: (value) => -value / 4, ends: ["0: certain", "4 nats or more"], ramp: "warm" },
  entropy: { name: "entropy", scale: (value) => value / 3, ends: ["0: one choice", "3 nats or more"], ramp: "cool" },
  ratio: { name: "ratio", scale: (value) => Math.log(value) / 0.4, ends: ["≤ 0.67", "1", "≥ 1.5"], ramp: "both" },
  value: { name: "value", scale: (value, most) => value / (most || 1), ends: ["0", "greatest"], ramp: "cool" },
};

/** Returns the tokens of a completion from `start` to `end` as text with a background per token. */
export function shadedTokens(row, kind, start, end) {
  const { scale, ramp } = KINDS[kind];
  const most = Math.max(...row.values.filter((value) => value !== null).map(Math.abs), 0);
  const spans = row.texts.slice(start, end).map((text, offset) => {
    const index = start + offset;
    if (row.sampled && !row.sampled[index]) return el("span", { class: "tok outside", data: { token: String(index) } }, visible(text) || "·");
    const value = row.values[index];
    const part = value === null ? 0 : Math.max(-1, Math.min(1, scale(value, most)));
    const level = Math.round(Math.abs(part) * LEVELS);
    const side = ramp === "both" ? (part < 0 ? "cool" : "warm") : ramp;
    return el("span", { class: level ? `tok ${side}${level}` : "tok", data: { token: String(index) } }, visible(text) || "·");
  });
  return el("span", { class: "tokens" }, spans);
}

/** Describes a token as text. */
export function tokenReading(row, index, channel, kind) {
  const value = row.values[index];
  const parts = [`“${visible(row.texts[index])}”`, `id ${row.ids[index]}`, `${channel} ${shown(value)}`];
  if (row.sampled && !row.sampled[index]) parts[2] = "not sampled by the model";
  if (kind === "logp" && value !== null) parts.push(`p ${shown(Math.exp(value), 3)}`);
  return `token ${index + 1}: ${parts.join(" · ")}`;
}

export function shadingLegend(kind) {
  const { name, ends, ramp } = KINDS[kind];
  const steps = [2, 4, 6, 8, 10];
  const classes = ramp === "both"
    ? [...[10, 6, 2].map((level) => `cool${level}`), "plain", ...[2, 6, 10].map((level) => `warm${level}`)]
    : ["plain", ...steps.map((level) => `${ramp}${level}`)];
  return el(
    "span",
    { class: "scale", "aria-label": `Shading by ${name}: ${ends.join(" to ")}` },
    el("small", {}, ends[0]),
    classes.map((name_) => el("i", { class: name_ })),
    el("small", {}, ends[ends.length - 1]),
  );
}
