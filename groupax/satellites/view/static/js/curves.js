// Curves of all runs, live.

import { ask } from "./api.js";
import { Chart } from "./charts.js";
import { debounced, drawn, el, empty, failure, fill, select } from "./dom.js";
import { marksOf } from "./marks.js";
import { bands } from "./seeds.js";
import { app, colour, go, runColour, runDash, shortName, shownRuns, store, stored } from "./state.js";

const POINTS = 800; // of a line
const ALL_POINTS = 12_000; // of all lines of a metric
const UNITS = { step: "Steps", tokens: "Tokens", time: "Seconds" }; // of the range
const SECTIONS = [
  ["Learning", [
    ["Reward", ["reward"], "Mean of the weighted sum of all reward functions."],
    ["Rewards by function", /^rewards\/.+\/mean$/],
    ["pass@1", ["pass@1"], "Fraction of the sampled completions that are correct."],
    ["Held out", /^eval_.*(pass@1|reward|loss)$/],
    ["Spread within groups", ["reward_std"], "Standard deviation of the reward within a group; at 0 there is nothing to learn."],
    ["Groups without signal", ["frac_reward_zero_std"], "Fraction of prompts whose completions all received the same reward."],
  ]],
  ["Stability", [
    ["KL to the reference", ["kl"]],
    ["Entropy", ["entropy"], "Mean over tokens, in nats."],
    ["Clipped ratios", /^clip_ratio\/region_mean$/],
    ["Gradient norm", ["grad_norm"]],
    ["Loss", ["loss"]],
    ["Engine vs. trainer", ["rollout/logp_diff_max"], "Maximum difference of their log-probs of a token."],
    ["Learning rate", ["learning_rate"]],
  ]],
  ["Completions", [
    ["Length", ["completions/mean_length"], "Mean, in tokens."],
    ["Truncated completions", ["completions/clipped_ratio"]],
  ]],
  ["Episodes", [
    ["Ends of episodes", /^stop\//, "Fraction of the episodes that ended so."],
    ["Turns", ["episodes/turns", "episodes/turns_per_stream"], "Mean number of turns of an episode, and of each of its streams of tokens."],
    ["Streams", ["episodes/streams"], "Mean number of streams of tokens of an episode: a program that rewrites its history, or asks in parallel, begins further ones."],
    ["Calls", ["tools/call_frequency"], "Mean number of tool calls of an episode."],
    ["Failed calls", ["tools/failure_frequency"], "Fraction of the tool calls."],
    ["Seconds per call", ["tools/seconds"]],
    ["Held-out ends of episodes", /^eval_(.*_)?stop\//],
  ]],
  ["Speed", [
    ["Seconds per step", ["step_time"]],
    ["Rollout tokens per second", ["rollout/tokens_per_s"]],
    ["Training tokens per second", ["train/tokens_per_s"]],
  ]],
];

const isWhole = Boolean(globalThis.groupaxExport); // an exported page draws what is out of sight too, for printing

export class Curves {
  constructor(root) {
    this.root = root;
    this.names = [];
    this.cards = new Map(); // title -> { chart, names, visible, section }
    this.zoom = [null, null];
    this.smoothing = stored("smoothing", 0);
    this.axes = stored("axes", { x: "step", isLog: false, isClipped: false });
    this.runsAs = stored("runs-as", "each");
    this.busy = false;
    this.again = false;
    this.seen = new IntersectionObserver((entries) => this.scrolled(entries), { rootMargin: "200px" });
    this.tools = el("div", { class: "toolbar" }, this.searchField(), el("span", { class: "fields needs-server" }, this.smoothingField(), this.axisFields(), this.rangeFields()));
    this.sections = el("div", { class: "sections" });
    this.problem = el("div");
    fill(root, el("h1", { class: "sr" }, "Curves"), this.tools, this.problem, this.sections);
    this.refreshSoon = debounced(() => this.refresh(), 60);
  }

  smoothingField() {
    const value = el("output", {}, this.smoothing.toFixed(2));
    const input = el("input", {
      type: "range", min: "0", max: "0.99", step: "0.01", value: String(this.smoothing), name: "smoothing",
      on: {
        input: () => {
          this.smoothing = Number(input.value);
          value.textContent = this.smoothing.toFixed(2);
          store("smoothing", this.smoothing);
          this.refreshSoon();
        },
      },
    });
    return el("label", { class: "field" }, el("span", {}, "Smoothing"), input, value);
  }

  axisFields() {
    const changed = (change) => {
      Object.assign(this.axes, change);
      store("axes", this.axes);
      this.refreshSoon();
    };
    const box = (name, text, title) => el("label", { class: "field", title }, el("input", { type: "checkbox", name, checked: this.axes[name], on: {
      change: (event) => changed({ [name]: event.target.checked }),
    } }), el("span", {}, text));
    return [
      select("x", [["step", "step"], ["tokens", "tokens"], ["time", "time"]], this.axes.x, (x) => {
        changed({ x });
        this.zoomTo(null, null);
      }, "x-axis"),
      select("Runs", [["each", "one line each"], ["band", "seeds as mean ± std"]], this.runsAs, (value) => {
        this.runsAs = value;
        store("runs-as", value);
        this.refreshSoon();
      }, "runs-as"),
      box("isLog", "Log", "Logarithmic y axis; values of 0 and below are left out"),
      box("isClipped", "Clip outliers", "The y axis ends at the 1st and the 99th percentile of the values"),
    ];
  }

  searchField() {
    this.search = el("input", {
      type: "search", placeholder: "Find a metric  ( / )", name: "search", "aria-label": "Find a metric",
      on: { input: debounced(() => this.layOut(), 120) },
    });
    return this.search;
  }

  /** The range of the x axis as fields, which dragging across a chart fills too. */
  rangeFields() {
    const field = (name, label) => el("input", { type: "number", min: "0", step: "any", name, "aria-label": label, placeholder: label.toLowerCase(), on: { change: () => {
      const [from, to] = this.ends.map((end) => (end.value === "" ? null : Number(end.value)));
      this.zoomTo(from, to);
    } } });
    this.ends = [field("range-from", "First"), field("range-to", "Last")];
    this.unit = el("span", {}, UNITS[this.axes.x]);
    this.whole = el("button", { type: "button", hidden: true, on: { click: () => this.zoomTo(null, null) } }, "Show all");
    return [
      el("span", { class: "field", role: "group", "aria-label": "Range of the x axis" }, this.unit, this.ends[0], el("span", {}, "to"), this.ends[1], this.whole),
      el("span", { class: "hint by-mouse" }, "Drag across a chart to zoom, double click to zoom out; click a point to open its rollouts."),
      el("span", { class: "hint by-touch" }, "Slide a finger over a chart to read it, tap a point to open its rollouts; the fields zoom."),
    ];
  }

  async start() {
    await this.update();
  }

  async update() {
    if (!Object.values(app.runs).some((run) => run.num_metrics)) {
      this.names = [];
      fill(this.sections, empty("No metrics yet", "This page updates when the run has finished its first step."));
      return;
    }
    try {
      this.problem.replaceChildren();
      const names = await ask("names");
      if (names.join("\n") !== this.names.join("\n")) {
        this.names = names;
        this.layOut();
      }
      await this.refresh();
    } catch (error) {
      fill(this.problem, failure(error, () => this.update()));
    }
  }

  /** Chooses the cards for the existing metrics. */
  layOut() {
    const query = this.search.value.trim().toLowerCase();
    const wanted = [];
    const used = new Set();
    for (const [section, cards] of SECTIONS) {
      for (const [title, names, note] of cards) {
        const found = this.names.filter((name) => (Array.isArray(names) ? names.includes(name) : names.test(name)));
        found.forEach((name) => used.add(name));
        const matches = !query || [title, ...found].some((text) => text.toLowerCase().includes(query));
        if (found.length && matches) wanted.push([section, title, found, note]);
      }
    }
    for (const name of this.names) {
      if (used.has(name) || (query && !name.toLowerCase().includes(query))) continue;
      wanted.push([`Also: ${name.includes("/") ? name.split("/")[0] : "others"}`, name, [name], undefined]);
    }
    const before = this.cards;
    this.cards = new Map();
    const sections = new Map();
    for (const [section, title, names, note] of wanted) {
      const card = before.get(title) ?? this.newCard(title, note, names);
      before.delete(title);
      this.cards.set(title, Object.assign(card, { names }));
      if (!sections.has(section)) sections.set(section, []);
      sections.get(section).push(card.chart.card);
    }
    for (const { chart } of before.values()) {
      this.seen.unobserve(chart.card);
      chart.close();
    }
    const parts = [...sections].map(([section, cards]) => {
      const grid = el("div", { class: "grid" }, cards);
      if (!section.startsWith("Also: ") || query) return el("section", {}, el("h2", {}, section.replace("Also: ", "")), grid);
      return el("details", { class: "more" }, el("summary", {}, section.replace("Also: ", ""), el("small", {}, String(cards.length))), grid);
    });
    fill(this.sections, parts.length ? parts : empty("No such metric", `No metric has “${query}” in its name.`));
    this.refreshSoon();
  }

  newCard(title, note, names) {
    const opened = (x, line) => { if (line.run) go("rollouts", { run: line.run, step: Math.round(x) }); };
    const chart = new Chart(title, { note, names, zoomed: (from, to) => this.zoomTo(from, to), opened });
    this.seen.observe(chart.card);
    return { chart, names: [], visible: isWhole };
  }

  scrolled(entries) {
    for (const entry of entries) {
      const card = this.cards.get(entry.target.dataset.title);
      if (card) card.visible = entry.isIntersecting || isWhole;
    }
    if (entries.some((entry) => entry.isIntersecting)) this.refreshSoon();
  }

  zoomTo(from, to) {
    this.zoom = [from, to];
    this.whole.hidden = from === null && to === null;
    this.unit.textContent = UNITS[this.axes.x];
    this.ends.forEach((end, index) => {
      const rounded = index === 0 ? Math.ceil : Math.floor;
      end.value = this.zoom[index] === null ? "" : String(this.axes.x === "step" ? rounded(this.zoom[index]) : Math.round(this.zoom[index]));
    });
    this.refresh();
  }

  async refresh() {
    if (this.busy) {
      this.again = true;
      return;
    }
    this.busy = true;
    try {
      do {
        this.again = false;
        await this.fetchVisible();
      } while (this.again && !this.closed);
      this.problem.replaceChildren();
    } catch (error) {
      fill(this.problem, failure(error, () => this.refresh()));
    } finally {
      this.busy = false;
    }
  }

  async fetchVisible() {
    const cards = [...this.cards.values()].filter((card) => card.visible);
    const names = [...new Set(cards.flatMap((card) => card.names))];
    const run = shownRuns();
    const [from, to] = this.zoom;
    const question = { name: names, from, to, points: Math.max(Math.min(POINTS, Math.floor(ALL_POINTS / (run.length || 1))), 100), by: this.axes.x };
    const isAsked = names.length > 0 && run.length > 0;
    const groups = this.runsAs === "band" && isAsked ? await bands(run) : [];
    const single = run.filter((name) => !groups.some((group) => group.runs.includes(name)));
    const [exact, smooth, marks, ...spread] = await Promise.all([
      isAsked && single.length ? ask("series", { ...question, run: single }) : {},
      isAsked && single.length && this.smoothing ? ask("series", { ...question, run: single, smooth: this.smoothing }) : null,
      isAsked ? marksOf(run, this.axes.x, from, to) : [],
      ...groups.map((group) => ask("band", { ...question, run: group.runs, smooth: this.smoothing })),
    ]);
    if (this.closed) return;
    for (const card of cards) {
      card.chart.show([...this.lines(card.names, single, exact, smooth), ...bandLines(card.names, groups, spread)], this.axes, marks);
    }
    if (cards.length) drawn();
  }

  lines(names, runs, exact, smooth) {
    const lines = [];
    runs.forEach((run) => {
      names.forEach((name, index) => {
        const found = exact[run]?.[name];
        if (!found) return;
        const short = name.replace(/^rewards\/(.+)\/mean$/, "$1");
        const label = names.length === 1 ? shortName(run) : runs.length === 1 ? short : `${shortName(run)}: ${short}`;
        const part = names.length > 1 ? short : undefined;
        const looks = names.length > 1 && runs.length === 1
          ? { colour: colour(index), dash: 0, run, part }
          : { colour: runColour(run), dash: names.length > 1 ? index : runDash(run), run, part };
        if (smooth) lines.push({ ...found, ...looks, label, faint: true, dash: 0 });
        lines.push({ ...(smooth?.[run]?.[name] ?? found), ...looks, label });
      });
    });
    return lines;
  }

  themed() {
    for (const { chart } of this.cards.values()) chart.lines = [];
    this.refresh();
  }

  close() {
    this.closed = true;
    this.seen.disconnect();
    for (const { chart } of this.cards.values()) chart.close();
  }
}

/** The lines of groups of runs: means with bands. */
function bandLines(names, groups, spread) {
  return groups.flatMap((group, number) => names.flatMap((name, index) => {
    const found = spread[number][name];
    const label = names.length === 1 ? group.label : `${group.label}: ${name}`;
    const part = names.length > 1 ? name.replace(/^rewards\/(.+)\/mean$/, "$1") : undefined;
    return found ? [{ ...found, label, part, colour: runColour(group.runs[0]), dash: names.length > 1 ? index : 0 }] : [];
  }));
}
