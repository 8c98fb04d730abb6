// The search in all steps of a run: conditions, and hits page by page.

import { ask } from "./api.js";
import { el, fill, plural, select, shown, visible } from "./dom.js";
import { address } from "./state.js";

const NUM_HITS = 100; // until further ones are asked for
const ORDERS = {
  newest: ["newest first", () => 0],
  highest: ["highest reward first", (a, b) => (b.total ?? -Infinity) - (a.total ?? -Infinity)],
  lowest: ["lowest reward first", (a, b) => (a.total ?? Infinity) - (b.total ?? Infinity)],
  up: ["highest advantage first", (a, b) => (b.advantage ?? -Infinity) - (a.advantage ?? -Infinity)],
  down: ["lowest advantage first", (a, b) => (a.advantage ?? Infinity) - (b.advantage ?? Infinity)],
  longest: ["longest first", (a, b) => b.num_tokens - a.num_tokens],
  shortest: ["shortest first", (a, b) => a.num_tokens - b.num_tokens],
};
const RANGES = [["reward", "Reward"], ["length", "Tokens"], ["advantage", "Advantage"]];

export class SearchAll {
  /** @param {(link: HTMLAnchorElement) => void} followed is called with the link of a hit that is opened. */
  constructor(followed) {
    this.followed = followed;
    this.conditions = { regex: "", end: "" };
    this.order = "newest";
    this.found = []; // hits, newest first
    this.hits = el("ol", { class: "hits" });
    this.status = el("p", { role: "status" });
    this.actions = el("div", { class: "joined" });
    this.root = el("section", { class: "found" });
  }

  /** @param {string} run @param {string} query @param {number} numSteps that the run has logged */
  start(run, query, numSteps) {
    Object.assign(this, { run, query, numSteps });
    fill(this.root, el("h2", {}, query ? `“${visible(query)}” in all steps` : "Rollouts of all steps"), this.form(), this.status, this.actions, this.hits);
    this.again();
  }

  form() {
    const changed = (name) => (event) => {
      this.conditions[name] = event.target.type === "checkbox" ? (event.target.checked ? "1" : "") : event.target.value;
      this.again();
    };
    const number = (name, label) => el("input", { type: "number", step: "any", name, value: this.conditions[name] ?? "", "aria-label": label, placeholder: label.split(" ").pop(), on: { change: changed(name) } });
    const ends = el("select", { name: "end", on: { change: changed("end") } }, [["", "either"], ["complete", "complete"], ["truncated", "truncated"]].map(([value, text]) => el("option", { value }, text)));
    ends.value = this.conditions.end;
    return el("div", { class: "toolbar conditions" },
      el("label", { class: "field" }, el("input", { type: "checkbox", name: "regex", checked: this.conditions.regex === "1", on: { change: changed("regex") } }), el("span", {}, "Regular expression")),
      RANGES.map(([name, label]) => el("span", { class: "field", role: "group", "aria-label": label }, el("span", {}, label), number(`min_${name}`, `${label}, at least`), el("span", {}, "to"), number(`max_${name}`, `${label}, at most`))),
      el("label", { class: "field" }, el("span", {}, "End"), ends));
  }

  question() {
    return { run: this.run, q: this.query, ...this.conditions };
  }

  again() {
    this.next = {};
    this.numSearched = 0;
    this.isEnd = false;
    this.found = [];
    this.hits.replaceChildren();
    this.more(NUM_HITS);
  }

  /** Searches further, newest steps first, until there are so many more hits. */
  async more(number) {
    this.stop();
    const stopping = new AbortController();
    this.searching = stopping;
    fill(this.actions, el("button", { type: "button", on: { click: () => this.stop() } }, "Stop"));
    const wanted = this.found.length + number;
    try {
      do {
        const answer = await ask("search", { ...this.question(), ...this.next }, stopping.signal);
        this.numSearched += answer.num_searched;
        this.found.push(...answer.hits);
        this.hits.append(...answer.hits.map((hit) => this.hit(hit)));
        this.next = answer.next;
        this.isEnd = this.next === null;
        this.tell();
      } while (!this.isEnd && this.found.length < wanted);
    } catch (error) {
      if (this.searching !== stopping && this.searching !== null) return; // another search has begun
      if (error.name === "AbortError") this.tell();
      else this.status.textContent = error.message;
    }
    if (this.order !== "newest") this.sort();
    this.layOutActions();
  }

  /** Puts the hits in the chosen order: all of them once the search is complete, before that those found so far. */
  sort() {
    fill(this.hits, [...this.found].sort(ORDERS[this.order][1]).map((hit) => this.hit(hit)));
  }

  tell() {
    const numHits = this.found.length;
    const end = !this.isEnd ? "." : numHits ? ". Search complete." : ". No completion matches.";
    this.status.textContent = `${plural(numHits, "completion")} in ${plural(this.numSearched, "step")} of ${this.numSteps} searched${end}`;
  }

  layOutActions() {
    fill(this.actions,
      !this.isEnd && this.numSearched > 0 && el("button", { type: "button", on: { click: () => this.more(NUM_HITS) } }, "Search further"),
      this.found.length > 1 && select(this.isEnd ? "Order" : "Order of the hits so far", Object.entries(ORDERS).map(([key, [text]]) => [key, text]), this.order, (order) => {
        this.order = order;
        this.sort();
      }, "hits-order"));
  }

  hit(hit) {
    const where = address("rollouts", { run: this.run, step: hit.step, prompt: hit.prompt_index, sample: hit.sample_index });
    return el("li", {}, el("a", { href: where, on: { click: (event) => this.followed(event.currentTarget) } }, `step ${hit.step}, prompt ${hit.prompt_index}, #${hit.sample_index}`),
      el("span", { class: "mean" }, shown(hit.total, 3)), el("span", { class: "facts" }, ` ${hit.advantage === null ? "" : `A ${shown(hit.advantage, 3)} · `}${plural(hit.num_tokens, "token")}`), el("div", { class: "preview" }, visible(hit.excerpt)));
  }

  stop() {
    this.searching?.abort();
    this.searching = null;
  }
}
