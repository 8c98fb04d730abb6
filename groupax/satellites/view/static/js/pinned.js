// The two completions of a group that are pinned, and the words in which they differ.

import { diffText } from "./diff.js";
import { el, fill, shown } from "./dom.js";

const NUM_PINNED = 2;

export class Pinned {
  /** `fullText(row)` returns a promise of the full text of a completion. */
  constructor(fullText) {
    this.fullText = fullText;
    this.root = el("section", { class: "pinned", "aria-label": "Pinned completions" });
    this.clear();
  }

  clear() {
    this.rows = [];
    this.buttons = new Map();
    this.root.replaceChildren();
  }

  /** The button that pins a completion: a third one takes the place of the first. */
  button(row) {
    const button = el("button", {
      type: "button", class: "quiet pin", "aria-pressed": String(this.rows.includes(row)), "aria-label": `Pin completion ${row.sample_index}`,
      title: "Pin two completions to see the words in which they differ", on: { click: () => this.toggle(row) },
    }, "Pin");
    this.buttons.set(row, button);
    return button;
  }

  toggle(row) {
    this.rows = this.rows.includes(row) ? this.rows.filter((each) => each !== row) : [...this.rows, row].slice(-NUM_PINNED);
    for (const [each, button] of this.buttons) button.setAttribute("aria-pressed", String(this.rows.includes(each)));
    this.draw();
  }

  async draw() {
    const { rows } = this;
    if (rows.length < NUM_PINNED) {
      fill(this.root, rows.length > 0 && el("p", { class: "hint", role: "status" }, `Completion ${rows[0].sample_index} is pinned. Pin another one to see the words in which they differ.`));
      return;
    }
    const [from, to] = rows;
    try {
      const texts = await Promise.all(rows.map((row) => this.fullText(row)));
      if (this.rows !== rows) return;
      fill(this.root,
        el("h3", {}, `From completion ${from.sample_index} (${shown(from.total)}) to ${to.sample_index} (${shown(to.total)})`),
        texts[0] === texts[1] && el("p", { class: "hint" }, "Their texts are equal."),
        el("div", { class: "words", tabindex: "0", role: "group", "aria-label": "Words in which the pinned completions differ" }, diffText(...texts)));
    } catch (error) {
      if (this.rows === rows) fill(this.root, el("p", { class: "hint", role: "alert" }, error.message));
    }
  }
}
