// A prompt and its completions side by side.

import { ask, imageAddress } from "./api.js";
import { el, failure, fill, plural, select, shown, visible } from "./dom.js";
import { Chat, endBadge } from "./episode.js";
import { FOLDED, folding } from "./folding.js";
import { Pinned } from "./pinned.js";
import { address } from "./state.js";
import { shadedTokens, shadingLegend, tokenReading } from "./tokens.js";

const ORDERS = {
  best: ["highest reward first", (a, b) => (b.total ?? -Infinity) - (a.total ?? -Infinity)],
  worst: ["lowest reward first", (a, b) => (a.total ?? Infinity) - (b.total ?? Infinity)],
  longest: ["longest first", (a, b) => b.num_tokens - a.num_tokens],
  sampled: ["as sampled", (a, b) => a.sample_index - b.sample_index],
};

// Completions that an address can name by what they are.
const NAMED = {
  highest: (a, b) => (b.total ?? -Infinity) > (a.total ?? -Infinity),
  longest: (a, b) => b.num_tokens > a.num_tokens,
};

export class Group {
  constructor(root) {
    this.root = root;
    this.at = null; // sample index of the completion that the keys act on
    this.pinned = new Pinned((row) => this.fullText(row));
    this.order = localStorage.getItem("groupax-order") ?? "best";
    this.channel = localStorage.getItem("groupax-channel");
    this.tokens = new Map();
  }

  /** @param {string} sample is the sample index of the completion to go to, or one of `NAMED` */
  async show(where, sample) {
    this.where = where;
    try {
      const group = await ask("group", where);
      if (this.where !== where) return;
      this.group = group;
      this.tokens = new Map();
      this.pinned.clear();
      this.at = null;
      this.draw();
      const named = sample in NAMED ? group.rows.reduce((best, row) => (NAMED[sample](best, row) ? row : best)).sample_index : Number(sample);
      if (this.cards.has(named)) this.goTo(named);
      await this.shade();
    } catch (error) {
      if (this.where === where) fill(this.root, failure(error, () => this.show(where, sample)));
    }
  }

  /** Whether a group is shown, so that it need not be asked for again. */
  shows(prompt) {
    return this.where?.prompt === prompt && this.group !== undefined;
  }

  /** Something else takes the place: answers that are still to come are left out. */
  leave() {
    this.where = null;
  }

  draw() {
    const { group } = this;
    const channels = Object.keys(group.channels);
    if (this.channel !== "" && !channels.includes(this.channel)) this.channel = channels[0] ?? "";
    const rows = [...group.rows].sort(ORDERS[this.order][1]);
    this.legend = el("span", { class: "shading" });
    this.reading = el("p", { class: "token-reading", role: "status" }, "Point at a token, or use the arrow keys, to read its value.");
    const totals = rows.map((row) => row.total).filter((total) => total !== null);
    const bounds = [Math.min(...totals), Math.max(...totals)];
    this.cards = new Map(rows.map((row, rank) => [row.sample_index, this.card(row, rank, bounds)]));
    this.mark(this.at);
    this.told = el("span", { class: "told hint", role: "status" });
    const follow = el("a", { class: "button needs-server", href: address("prompts", { run: this.where.run, key: group.key }) }, "Follow this prompt over steps");
    fill(
      this.root,
      el("section", { class: "prompt", "aria-label": "Prompt" },
        el("header", {}, el("h2", {}, `Prompt ${this.where.prompt}`), el("small", {}, `step ${this.where.step} · ${plural(rows.length, "completion")}`), follow),
        this.images(),
        this.promptText()),
      el("div", { class: "toolbar slim" },
        select("Order", Object.entries(ORDERS).map(([key, [text]]) => [key, text]), this.order, (value) => {
          this.order = value;
          localStorage.setItem("groupax-order", value);
          this.draw();
          this.shade();
        }, "order"),
        select("Shade tokens by", [["", "nothing"], ...channels.map((name) => [name, readable(name)])], this.channel ?? "", (value) => {
          this.channel = value;
          localStorage.setItem("groupax-channel", value);
          this.tokens = new Map();
          this.draw();
          this.shade();
        }, "channel"),
        this.legend, this.told),
      this.pinned.root,
      el("div", { class: "side-by-side", tabindex: "0", "aria-label": "Completions, side by side" }, [...this.cards.values()].map((card) => card.root)),
      this.reading,
    );
    this.root.onmouseover = (event) => this.readToken(event);
  }

  /** The prompt's images in their order, each at most as large as its place. */
  images() {
    const { run } = this.where;
    return this.group.images.length > 0 && el("div", { class: "images" }, this.group.images.map((name, index) =>
      el("img", {
        src: imageAddress(run, name),
        alt: `Image ${index + 1} of ${this.group.images.length} of prompt ${this.where.prompt}`,
        loading: "lazy",
      })));
  }

  promptText() {
    const { group } = this;
    if (group.messages.length) {
      return el("ol", { class: "turns" }, group.messages.map((turn) =>
        el("li", {}, el("b", {}, visible(turn.role)), this.folding(turn.content, false, {}))));
    }
    return this.folding(group.prompt, group.is_cut, group);
  }

  /** The full text is asked for of a text that the server has cut; its button tells the size of others too. */
  folding(text, isCut, more) {
    const whole = isCut ? async () => (await ask("text", { ...this.where, sample: more.sample_index })).text : async () => text;
    return folding(text, { size: isCut || text.length > FOLDED ? more.num_bytes : 0, whole, unit: "kB" });
  }

  card(row, rank, [low, high]) {
    const chat = row.episode && new Chat(row.episode, async (turn, call) =>
      (await ask("text", { ...this.where, sample: row.sample_index, turn, call })).text);
    const body = el("div", { class: "completion" }, chat ? chat.root : this.folding(row.text, row.is_cut, row));
    const part = high > low && row.total !== null ? (row.total - low) / (high - low) : null;
    const extra = Object.entries(row.extra);
    const root = el("article", { class: "card", tabindex: "-1", "aria-label": `Completion ${row.sample_index}, reward ${shown(row.total)}`, on: { click: () => this.mark(row.sample_index) } },
      el("header", {},
        el("span", { class: "rank" }, `${rank + 1}.`),
        el("span", { class: `total ${part === null ? "" : part > 0.5 ? "high" : "low"}` }, shown(row.total)),
        el("span", { class: "advantage", title: "Advantage" }, row.advantage === null ? "" : `A ${row.advantage > 0 ? "+" : ""}${shown(row.advantage, 3)}`),
        el("span", { class: "facts" }, plural(row.num_tokens, "token"), ` · #${row.sample_index}`),
        endBadge(row.finish_reason, Boolean(chat)),
        this.pinned.button(row)),
      el("dl", { class: "rewards" }, Object.entries(row.rewards).map(([name, value]) => {
        const bar = el("i", { class: value !== null && value < 0 ? "bar below" : "bar" });
        bar.style.setProperty("--part", String(Math.abs(value ?? 0) / this.scaleOf(name)));
        return [el("dt", {}, visible(name)), el("dd", {}, el("span", {}, shown(value)), bar)];
      })),
      body,
      row.streams.map((stream, index) => el("details", { class: "stream" },
        el("summary", {}, `Stream ${index + 2}: ${plural(stream.num_turns, "turn")}, ${plural(stream.num_tokens, "further token")}`),
        new Chat(stream.parts).root)),
      extra.length > 0 && el("details", { class: "extra" }, el("summary", {}, plural(extra.length, "further column")),
        el("dl", {}, extra.map(([name, value]) => [el("dt", {}, visible(name)), el("dd", {}, visible(value))]))),
    );
    return { root, body, row, chat };
  }

  async fullText(row) {
    return row.is_cut ? (await ask("text", { ...this.where, sample: row.sample_index })).text : row.text;
  }

  /** Marks the completion that the keys act on. */
  mark(sample) {
    this.at = sample;
    for (const [each, { root }] of this.cards) {
      if (each === sample) root.setAttribute("aria-current", "true");
      else root.removeAttribute("aria-current");
    }
  }

  goTo(sample) {
    this.mark(sample);
    const { root } = this.cards.get(sample);
    root.focus({ preventScroll: true });
    root.scrollIntoView({ block: "nearest" });
  }

  move(by) {
    const samples = [...this.cards.keys()];
    this.goTo(samples[Math.min(Math.max(samples.indexOf(this.at) + by, 0), samples.length - 1)]);
  }

  async copy() {
    const { row } = this.cards.get(this.at);
    await this.toClipboard(await this.fullText(row), `Completion ${row.sample_index} copied`);
  }

  async copyLink() {
    history.replaceState(null, "", address("rollouts", { ...this.where, sample: this.at }));
    await this.toClipboard(location.href, `Link to completion ${this.at} copied`);
  }

  async toClipboard(text, done) {
    try {
      await navigator.clipboard.writeText(text);
      this.told.textContent = done;
    } catch {
      this.told.textContent = "The browser does not let this page write to the clipboard";
    }
  }

  /** Handles a key, and returns whether it is one of the group's. Without a completion to start from it is the first one. */
  key(event) {
    const actions = { j: () => this.move(1), k: () => this.move(-1), c: () => this.copy(), p: () => this.copyLink() };
    if (!this.where || !this.cards?.size || !Object.hasOwn(actions, event.key)) return false;
    const isFirst = this.at === null;
    if (isFirst) this.goTo(this.cards.keys().next().value);
    if (!isFirst || "cp".includes(event.key)) actions[event.key]();
    return true;
  }

  /** The largest size of a reward in this group, at least 1 where rewards are fractions of 1. */
  scaleOf(name) {
    const sizes = this.group.rows.map((row) => Math.abs(row.rewards[name] ?? 0));
    const most = Math.max(...sizes);
    return most > 0.1 && most <= 1 ? 1 : most || 1;
  }

  async shade() {
    const { channel, where, group } = this;
    const kind = group.channels[channel]?.kind;
    fill(this.legend, kind ? shadingLegend(kind) : []);
    this.reading.hidden = !kind;
    if (!kind) return;
    try {
      const found = await ask("tokens", { ...where, channel });
      if (this.where !== where || this.channel !== channel) return;
      if (found.fault) this.legend.append(el("small", { class: "hint" }, visible(found.fault)));
      for (const [sample, row] of Object.entries(found.rows)) this.shadeCard(Number(sample), row, kind, found.fault);
    } catch (error) {
      this.legend.append(el("small", { class: "hint", role: "alert" }, visible(error.message)));
    }
  }

  /** Shade a completion's text, or if the tokens' texts are not known, their ids below it. */
  shadeCard(sample, row, kind, fault) {
    const card = this.cards.get(sample);
    if (!card || !row.ids.length) return;
    this.tokens.set(sample, row);
    const rest = card.row.length - row.ids.length;
    const more = rest > 0 && el("button", { type: "button", class: "show-all", on: { click: async () => {
      more.disabled = true;
      const found = await ask("tokens", { ...this.where, channel: this.channel, sample });
      this.shadeCard(sample, found.rows[sample], kind, found.fault);
    } } }, `Show all (${plural(rest, "more token")})`);
    if (card.chat && !fault) {
      card.chat.onMore = () => this.shadeCard(sample, row, kind, fault);
      this.shadeTurns(card, sample, row, kind);
      card.more?.remove();
      card.more = more;
      if (more) card.body.append(more);
      return;
    }
    fill(card.body, fault && (card.chat?.root ?? this.folding(card.row.text, card.row.is_cut, card.row)), this.tokenText(sample, row, kind, 0, row.ids.length), more);
  }

  /** Tokens take the place of the texts of turns; those between two turns are not the model's, and folded. */
  shadeTurns(card, sample, row, kind) {
    let before = 0;
    for (const { part, text } of card.chat.texts.values()) {
      const others = Math.min(part.start, row.ids.length) - before;
      fill(text,
        others > 0 && el("details", { class: "between" }, el("summary", {}, `${plural(others, "token")} that the model read`), this.tokenText(sample, row, kind, before, part.start)),
        this.tokenText(sample, row, kind, part.start, part.end));
      before = part.end;
    }
  }

  tokenText(sample, row, kind, start, end) {
    return el("pre", {
      class: "text", data: { sample: String(sample) }, tabindex: "0", role: "group",
      "aria-label": `Tokens of completion ${sample}; arrow keys read them`, on: { keydown: (event) => this.walk(event, sample) },
    }, shadedTokens(row, kind, start, end));
  }

  readToken(event) {
    const index = event.target.dataset?.token;
    const sample = event.target.closest?.("[data-sample]")?.dataset.sample;
    if (index !== undefined && sample !== undefined) this.tellToken(Number(sample), Number(index));
  }

  tellToken(sample, index) {
    const row = this.tokens.get(sample);
    const kind = this.group.channels[this.channel]?.kind;
    if (row && kind) this.reading.textContent = tokenReading(row, index, readable(this.channel), kind);
  }

  /** Go from token to token with the keyboard. */
  walk(event, sample) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    const tokens = [...event.currentTarget.querySelectorAll(".tok")];
    const at = tokens.findIndex((token) => token.classList.contains("at"));
    const next = Math.min(Math.max(at + moves[event.key], 0), tokens.length - 1);
    tokens[at]?.classList.remove("at");
    if (next < 0) return;
    tokens[next].classList.add("at");
    tokens[next].scrollIntoView({ block: "nearest" });
    this.tellToken(sample, Number(tokens[next].dataset.token));
  }
}

function readable(name) {
  return { policy_logps: "log-prob", sampler_logps: "sampler's log-prob", entropies: "entropy" }[name] ?? name.replaceAll("_", " ");
}
