// Texts of which the beginning is shown until all of them is asked for.

import { el, visible } from "./dom.js";

export const FOLDED = 4000; // number of characters shown until expanded

/**
 * A text, folded if it is long.
 *
 * `size` is the number of characters of the full text if `text` is only its beginning, which `whole()` then gives;
 * `unit` stands behind it on the button, in thousands.
 */
export function folding(text, { size = 0, whole = null, limit = FOLDED, unit = "characters" } = {}) {
  const shownText = text.length > limit ? text.slice(0, limit) : text;
  const body = el("pre", { class: "text" }, visible(shownText));
  if (shownText.length === text.length && !size) return body;
  const told = size ? ` (${unit === "kB" ? `${thousands(size)} kB` : `${size.toLocaleString("en")} ${unit}`})` : "";
  const button = el("button", { type: "button", class: "show-all", on: { click: async () => {
    button.disabled = true;
    try {
      body.textContent = visible(size && whole ? await whole() : text);
      button.remove();
    } catch (error) {
      button.disabled = false;
      button.textContent = error.message;
    }
  } } }, `Show all${told}`);
  return el("div", {}, body, button);
}

function thousands(size) {
  return (size / 1000).toLocaleString("en", { maximumFractionDigits: 0 });
}
