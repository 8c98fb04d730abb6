// What the update of a step was made of: its figures and findings, rows by their share of the gradient, tokens.

import { ask } from "./api.js";
import { bySeverity } from "./diagnostics.js";
import { drawn, el, failure, fill, plural, shown, visible } from "./dom.js";

const NAMES = { replay: "Recompute the step", why: "Compute exact shares" };

export class Why {
  /** `open(prompt, sample)` shows a completion in the group of its prompt. */
  constructor(open) {
    this.open = open;
    this.root = el("div", { class: "why", role: "region", "aria-label": "Why" });
  }

  async show(run, step) {
    this.where = { run, step };
    const { where } = this;
    fill(this.root, el("p", { class: "hint", role: "status" }, `Reading step ${step}…`));
    try {
      const found = await ask("why", where);
      if (this.where === where) this.draw(found, step);
    } catch (error) {
      if (this.where === where) fill(this.root, failure(error, () => this.show(run, step)));
    }
  }

  /** Something else takes the place: an answer that is still to come is left out. */
  leave() {
    this.where = null;
  }

  draw(found, step) {
    fill(this.root,
      el("header", {}, el("h2", {}, `What the update of step ${step} was made of`)),
      found.findings.length > 0 && el("ul", { class: "diagnostics" }, bySeverity(found.findings).map((each) =>
        el("li", { class: each.severity },
          el("header", {}, el("span", { class: `severity ${each.severity}` }, each.severity), el("b", {}, visible(each.name).replaceAll("_", " "))),
          el("p", {}, visible(each.text))))),
      this.facts(found.facts),
      el("section", {}, el("h3", {}, "From a shell"),
        el("dl", { class: "commands" }, Object.entries(found.commands).map(([name, command]) => [
          el("dt", {}, NAMES[name]), el("dd", {}, el("code", {}, visible(command)), copyButton(command))]))),
      this.rows(found),
      this.tokens(found.tokens),
    );
    drawn();
  }

  facts(facts) {
    const entries = Object.entries(facts);
    return entries.length > 0 && el("table", {},
      el("caption", {}, "This step, and the median of the lines before it"),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Metric"), el("th", { scope: "col", class: "number" }, "Step"), el("th", { scope: "col", class: "number" }, "Before"))),
      el("tbody", {}, entries.map(([name, { value, before }]) => el("tr", {},
        el("th", { scope: "row" }, visible(name)),
        el("td", { class: "number" }, value === null ? "not finite" : shown(value)), el("td", { class: "number" }, shown(before))))));
  }

  rows(found) {
    const { rows, is_exact: isExact } = found;
    const title = isExact ? "Rows by their share of the gradient" : "Rows by an estimate of their share of the gradient";
    const note = isExact
      ? "Exact, from groupax replay --why: shares add up to 100 %, and a negative one pulls against the others. They are of the gradient before clipping and the optimizer."
      : "An estimate from recorded log-probs, advantages and ratios, which knows neither the model's inner gradient nor its direction. The command above computes exact shares.";
    return el("section", {},
      el("h3", {}, title),
      found.fault && el("p", { class: "hint" }, visible(found.fault)),
      rows.length > 0 && el("p", { class: "hint" }, `${note} ${rows.length < found.num_rows ? `${rows.length} of ${plural(found.num_rows, "row")}.` : ""}`),
      rows.length > 0 && el("div", { class: "scrolls", tabindex: "0", role: "group", "aria-label": title }, el("table", { class: "rows" },
        el("thead", {}, el("tr", {}, ["Share", isExact && "Norm", "Advantage", "Tokens", "Row", "Completion"].filter(Boolean).map((name) =>
          el("th", { scope: "col", class: name === "Row" || name === "Completion" ? "" : "number" }, name)))),
        el("tbody", {}, rows.map((row) => this.row(row, isExact))))));
  }

  row(row, isExact) {
    const share = isExact ? row.share : row.estimate;
    const bar = el("i", { class: share < 0 ? "bar below" : "bar", "aria-hidden": "true" });
    bar.style.setProperty("--part", String(Math.min(Math.abs(share ?? 1), 1)));
    const text = share === undefined ? "–" : share === null ? "not finite" : `${isExact ? "" : "≈ "}${(100 * share).toFixed(1)} %`;
    return el("tr", {},
      el("td", { class: "number" }, text, bar),
      isExact && el("td", { class: "number" }, row.norm === null ? "not finite" : shown(row.norm)),
      el("td", { class: "number" }, shown(row.advantage)),
      el("td", { class: "number" }, shown(row.num_tokens)),
      el("td", {}, el("button", { type: "button", class: "quiet", on: { click: () => this.open(row.prompt_index, row.sample_index) } }, `prompt ${row.prompt_index}, #${row.sample_index}`)),
      el("td", { class: "text" }, visible(row.preview ?? "")));
  }

  tokens(tokens) {
    return tokens.length > 0 && el("section", {},
      el("h3", {}, "Tokens with the largest terms"),
      el("p", { class: "hint" }, "By |advantage × ratio| × (1 − p): the size of a token's gradient at the logits. The ratio is that of the trainer's probability to the sampler's."),
      el("div", { class: "scrolls", tabindex: "0", role: "group", "aria-label": "Tokens with the largest terms" }, el("table", { class: "rows" },
        el("thead", {}, el("tr", {}, ["Token", "Advantage", "Ratio", "p", "Row"].map((name) =>
          el("th", { scope: "col", class: name === "Token" || name === "Row" ? "" : "number" }, name)))),
        el("tbody", {}, tokens.map((token) => el("tr", {},
          el("td", {}, el("code", {}, visible(token.text) || "·"), el("small", {}, ` at ${token.token + 1}`)),
          el("td", { class: "number" }, shown(token.advantage)),
          el("td", { class: "number" }, shown(token.ratio)),
          el("td", { class: "number" }, shown(Math.exp(token.logp), 3)),
          el("td", {}, el("button", { type: "button", class: "quiet", on: { click: () => this.open(token.prompt_index, token.sample_index) } }, `prompt ${token.prompt_index}, #${token.sample_index}`))))))));
  }
}

function copyButton(text) {
  const button = el("button", { type: "button", class: "quiet", on: { click: async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select it to copy";
    }
  } } }, "Copy");
  return button;
}
