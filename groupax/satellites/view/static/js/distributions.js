// Heat maps of the completions' values over steps.

import { ask } from "./api.js";
import { drawn, el, empty, failure, fill, shown, visible } from "./dom.js";
import { RunChoice } from "./runs.js";
import { cssVariable, go, oneRun } from "./state.js";

const HEIGHT = 150;
const NOTES = {
  reward: "Weighted sum of the rewards of a completion.",
  length: "Sampled tokens of a completion.",
  advantage: "Weight of a completion in the update.",
  entropy: "Mean over the tokens of a completion, in nats.",
};
const AGAIN_MS = 60;

export class Distributions {
  constructor(root) {
    this.root = root;
    this.runChoice = new RunChoice("distributions");
    this.progress = el("span", { class: "hint", role: "status" });
    this.grid = el("div", { class: "grid heat-maps" });
    this.maps = new Map();
    fill(root, el("h1", { class: "sr" }, "Distributions"), el("div", { class: "toolbar" }, this.runChoice.element, this.progress,
      el("span", { class: "hint" }, "Columns are steps; darker cells hold more completions; the line is the median. Click a column to open its step.")), this.grid);
  }

  async start(parameters) {
    await this.moved(parameters);
  }

  async moved(parameters) {
    const run = oneRun(parameters);
    if (run === null) return;
    if (run !== this.run) {
      this.maps = new Map();
      this.grid.replaceChildren();
    }
    this.run = run;
    this.runChoice.show(run);
    await this.read();
  }

  async read() {
    clearTimeout(this.timer);
    const { run } = this;
    try {
      const found = await ask("distributions", { run });
      if (this.run !== run || this.closed) return;
      this.draw(found);
      if (found.steps.length < found.num_steps) this.timer = setTimeout(() => this.read(), AGAIN_MS);
      drawn();
    } catch (error) {
      if (this.run === run && !this.closed) fill(this.grid, failure(error, () => this.read()));
    }
  }

  draw({ steps, num_steps: number, maps }) {
    this.progress.textContent = number ? `${steps.length} of ${number} steps` : "";
    if (!steps.length) {
      this.maps = new Map();
      fill(this.grid, empty("No rollouts yet", "Distributions show the rollouts that a run has logged. Set log_completions to log them."));
      return;
    }
    for (const [name, map] of Object.entries(maps)) {
      if (!this.maps.has(name)) this.maps.set(name, new HeatMap(name, (step) => go("rollouts", { run: this.run, step })));
    }
    const cards = [...this.maps.values()].map((map) => map.card);
    if (cards.some((card) => !this.grid.contains(card))) fill(this.grid, cards);
    for (const [name, map] of Object.entries(maps)) this.maps.get(name).show(steps, map);
  }

  themed() {
    for (const map of this.maps.values()) map.paint();
  }

  async update(changed) {
    this.runChoice.show(this.run);
    if (changed.includes(this.run)) await this.read();
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
    for (const map of this.maps.values()) map.close();
  }
}

class HeatMap {
  constructor(name, opened) {
    this.name = name;
    this.opened = opened;
    this.at = null; // index of the column that is read
    this.canvas = el("canvas", { class: "heat", tabindex: "0", role: "img", "aria-label": name, on: {
      pointermove: (event) => this.read(this.column(event)), pointerleave: () => this.read(null), click: (event) => this.opened(this.steps[this.column(event)]),
      keydown: (event) => this.key(event), blur: () => this.read(null),
    } });
    this.canvas.style.setProperty("--height", `${HEIGHT}px`);
    this.low = el("span");
    this.high = el("span");
    this.first = el("span");
    this.last = el("span");
    this.reading = el("p", { class: "heat-reading", "aria-live": "polite" });
    this.card = el("section", { class: "chart", "aria-label": `Distribution of ${name}` },
      el("header", {}, el("h2", {}, visible(name))),
      name in NOTES && el("p", { class: "note" }, NOTES[name]),
      el("div", { class: "heat-box" }, el("div", { class: "heat-y" }, this.high, this.low), this.canvas, el("div", { class: "heat-x" }, this.first, this.last)),
      this.reading);
    this.resized = new ResizeObserver(() => this.paint());
    this.resized.observe(this.canvas);
  }

  show(steps, { edges, shares, quantiles }) {
    Object.assign(this, { steps, edges, shares, quantiles });
    this.low.textContent = shown(edges[0], 3);
    this.high.textContent = shown(edges[edges.length - 1], 3);
    this.first.textContent = `step ${shown(steps[0])}`;
    this.last.textContent = shown(steps[steps.length - 1]);
    const [begin, end] = [quantiles[0], quantiles[quantiles.length - 1]].map((each) => shown(each[1], 3));
    this.canvas.setAttribute("aria-label", `Distribution of ${this.name} over steps ${steps[0]} to ${steps[steps.length - 1]}: median ${begin} to ${end}. Arrow keys read the steps, Enter opens one.`);
    this.read(this.at);
    this.paint();
  }

  paint() {
    const { canvas, steps, shares, edges, quantiles } = this;
    if (!steps || canvas.clientWidth < 20) return;
    const scale = devicePixelRatio;
    canvas.width = canvas.clientWidth * scale;
    canvas.height = HEIGHT * scale;
    const context = canvas.getContext("2d");
    const [wide, high] = [canvas.width / steps.length, canvas.height / (edges.length - 1)];
    const most = Math.max(...shares.flat(), 1e-9);
    context.fillStyle = cssVariable("--accent");
    shares.forEach((column, index) => column.forEach((share, bin) => {
      if (!share) return;
      context.globalAlpha = 0.06 + 0.94 * Math.sqrt(share / most);
      context.fillRect(Math.floor(index * wide), Math.floor(canvas.height - (bin + 1) * high), Math.ceil(wide), Math.ceil(high));
    }));
    context.globalAlpha = 1;
    context.strokeStyle = cssVariable("--series-2");
    context.lineWidth = 1.5 * scale;
    context.beginPath();
    const span = edges[edges.length - 1] - edges[0];
    quantiles.forEach(([, median], index) => {
      if (median === null) return;
      const y = canvas.height * (1 - Math.min(Math.max((median - edges[0]) / span, 0), 1));
      context.lineTo((index + 0.5) * wide, Math.min(Math.max(y, scale), canvas.height - scale));
    });
    context.stroke();
    if (this.at === null) return;
    context.strokeStyle = cssVariable("--ink");
    context.lineWidth = scale;
    context.strokeRect(Math.floor(this.at * wide), 0, Math.ceil(wide), canvas.height);
  }

  column(event) {
    return Math.min(Math.max(Math.floor((event.offsetX / this.canvas.clientWidth) * this.steps.length), 0), this.steps.length - 1);
  }

  read(index) {
    const isMoved = index !== this.at;
    this.at = index;
    if (index === null) this.reading.textContent = "";
    else {
      const [low, median, high] = this.quantiles[index];
      this.reading.textContent = `step ${shown(this.steps[index])}: median ${shown(median, 3)}, 10th percentile ${shown(low, 3)}, 90th ${shown(high, 3)}`;
    }
    if (isMoved) this.paint();
  }

  key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (event.key === "Enter" && this.at !== null) this.opened(this.steps[this.at]);
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    this.read(Math.min(Math.max((this.at ?? this.steps.length - 1) + moves[event.key], 0), this.steps.length - 1));
  }

  close() {
    this.resized.disconnect();
  }
}
