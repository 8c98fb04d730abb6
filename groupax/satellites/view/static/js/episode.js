// An episode with tools or an environment as a chat: turns of the model with their calls, and what answered them.

import { el, plural, shown, visible } from "./dom.js";
import { folding } from "./folding.js";

const SHOWN_PARTS = 80; // until the others are asked for
const FOLDED_RESULT = 400; // number of characters shown until expanded

// Why an episode ended: in words, and whether it ended as it should.
const ENDS = {
  stop: ["the model stopped", true],
  done: ["the environment ended it", true],
  length: ["truncated", false],
  abort: ["cancelled", false],
  max_turns: ["no more turns", false],
  max_tool_calls: ["too many calls", false],
  turn_length: ["turn cut off", false],
  tool_result_too_long: ["result too long", false],
  parse_error: ["unreadable call", false],
  timeout: ["timed out: left out", false],
  env_error: ["environment failed: left out", false],
};

/** A badge that tells why a completion ended; none for a single turn that ended by itself. */
export function endBadge(reason, hasTurns) {
  if (!reason || (!hasTurns && reason === "stop")) return null;
  const [words, isGood] = Object.hasOwn(ENDS, reason) ? ENDS[reason] : [visible(reason), false];
  return el("span", { class: isGood ? "badge" : "badge warn", title: visible(reason) }, words);
}

/** The chat, and the elements in which a turn's tokens can replace its text, by number of the turn. */
export class Chat {
  /** `askFor(turn, call)` gives the full text of a turn or of a call's result; without it they stay cut. */
  constructor(parts, askFor = null) {
    this.askFor = askFor;
    this.texts = new Map();
    this.list = el("ol", { class: "chat" }, parts.slice(0, SHOWN_PARTS).map((part) => this.part(part)));
    const rest = parts.slice(SHOWN_PARTS);
    const more = rest.length > 0 && el("button", { type: "button", class: "show-all", on: { click: () => {
      this.list.append(...rest.map((part) => this.part(part)));
      more.remove();
      this.onMore?.();
    } } }, `Show all (${plural(rest.length, "more message")})`);
    this.root = el("div", {}, this.list, more);
  }

  part(part) {
    if (part.role !== "assistant") {
      return el("li", { class: "said by-others" }, el("b", {}, visible(part.role)), this.folding(part, {}));
    }
    const text = el("div", { class: "turn-text" }, this.words(part));
    this.texts.set(part.turn, { part, text });
    return el("li", { class: "said" },
      el("b", {}, `assistant · turn ${part.turn + 1}`, this.reward(part)),
      text,
      part.calls.map((call, number) => this.call(call, part.turn, number)));
  }

  /** The reward of a turn, by reward function in its tooltip; the environment's where no function has rewards per turn. */
  reward(part) {
    const rewards = Object.entries(part.rewards);
    const total = rewards.length ? rewards.reduce((sum, [, value]) => sum + value, 0) : part.reward;
    if (total === 0 && rewards.every(([, value]) => value === 0)) return null;
    const names = rewards.map(([name, value]) => `${visible(name)} ${shown(value, 3)}`);
    return el("span", { class: total < 0 ? "turn-reward down" : "turn-reward up", title: ["Reward of this turn", ...names].join("\n") }, ` ${total > 0 ? "+" : ""}${shown(total, 3)}`);
  }

  /** A text, which says how long it is where all of it cannot be asked for. */
  folding({ text, cut }, { whole = null, limit }) {
    if (whole && this.askFor) return folding(text, { size: cut, whole, limit });
    return folding(cut ? `${text}… (${cut.toLocaleString("en")} characters)` : text, { limit });
  }

  words(part) {
    return [
      part.reasoning && el("details", { class: "reasoning" }, el("summary", {}, "Reasoning"), el("pre", { class: "text" }, visible(part.reasoning))),
      (part.text || !part.calls.length) && this.folding(part, { whole: () => this.askFor(part.turn) }),
    ];
  }

  call(call, turn, number) {
    const milliseconds = call.seconds * 1000;
    return el("div", { class: call.is_error ? "call failed-call" : "call", role: "group", "aria-label": `Call of ${visible(call.name)}` },
      el("header", {}, el("code", { class: "call-name" }, visible(call.name)),
        call.is_error && el("span", { class: "badge warn" }, "error"),
        el("span", { class: "facts" }, `${shown(milliseconds, milliseconds < 10 ? 2 : 3)} ms`)),
      el("pre", { class: "text arguments", title: "Arguments" }, visible(call.arguments)),
      el("div", { class: "result" }, this.folding(call, { limit: FOLDED_RESULT, whole: () => this.askFor(turn, number) })));
  }
}
