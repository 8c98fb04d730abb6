// The words in which two texts differ.

import { el, visible } from "./dom.js";

const WORDS = /\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu;
const MAX_CHANGES = 600; // beyond which the texts count as different altogether
const MAX_WORDS = 20_000;

/**
 * Returns the parts of both texts in order: `{ kind, text }`, where kind is same, removed or added.
 *
 * A shortest edit script of words (Myers, "An O(ND) difference algorithm and its variations", 1986).
 */
export function wordDiff(before, after) {
  const [a, b] = [before, after].map((text) => text.match(WORDS) ?? []);
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const edits = [
    ...a.slice(0, start).map((text) => ({ kind: "same", text })),
    ...middle(a.slice(start, a.length - end), b.slice(start, b.length - end)),
    ...a.slice(a.length - end).map((text) => ({ kind: "same", text })),
  ];
  return joined(edits);
}

function middle(a, b) {
  const removed = a.map((text) => ({ kind: "removed", text }));
  const added = b.map((text) => ({ kind: "added", text }));
  if (!a.length || !b.length || a.length + b.length > MAX_WORDS) return [...removed, ...added];
  const rounds = furthest(a, b);
  return rounds ? traced(a, b, rounds) : [...removed, ...added];
}

/** Returns for each number of changes how far each diagonal reaches; null if there are too many changes. */
function furthest(a, b) {
  const rounds = [];
  let reach = new Map([[1, 0]]);
  for (let changes = 0; changes <= MAX_CHANGES; changes += 1) {
    rounds.push(new Map(reach));
    for (let diagonal = -changes; diagonal <= changes; diagonal += 2) {
      const isDown = diagonal === -changes || (diagonal !== changes && reach.get(diagonal - 1) < reach.get(diagonal + 1));
      let x = isDown ? reach.get(diagonal + 1) : reach.get(diagonal - 1) + 1;
      while (x < a.length && x - diagonal < b.length && a[x] === b[x - diagonal]) x += 1;
      reach.set(diagonal, x);
      if (x >= a.length && x - diagonal >= b.length) return rounds;
    }
    reach = new Map(reach);
  }
  return null;
}

/** Follows the rounds back from the ends of both texts. */
function traced(a, b, rounds) {
  const edits = [];
  let [x, y] = [a.length, b.length];
  for (let changes = rounds.length - 1; changes >= 0; changes -= 1) {
    const reach = rounds[changes];
    const diagonal = x - y;
    const isDown = diagonal === -changes || (diagonal !== changes && reach.get(diagonal - 1) < reach.get(diagonal + 1));
    const previous = isDown ? diagonal + 1 : diagonal - 1;
    const [fromX, fromY] = changes ? [reach.get(previous), reach.get(previous) - previous] : [0, 0];
    while (x > fromX && y > fromY) edits.push({ kind: "same", text: a[(x -= 1, y -= 1, x)] });
    if (changes && isDown) edits.push({ kind: "added", text: b[(y -= 1)] });
    else if (changes) edits.push({ kind: "removed", text: a[(x -= 1)] });
  }
  return edits.reverse();
}

function joined(edits) {
  const parts = [];
  for (const { kind, text } of edits) {
    const last = parts[parts.length - 1];
    if (last?.kind === kind) last.text += text;
    else parts.push({ kind, text });
  }
  return parts;
}

/** Returns the second text with what was removed from the first and added to it. */
export function diffText(before, after) {
  const tags = { same: "span", removed: "del", added: "ins" };
  return el("pre", { class: "text diff" }, wordDiff(before, after).map(({ kind, text }) => el(tags[kind], {}, visible(text))));
}
