// Charts: a card with a title, a legend, and uPlot's canvas.

import { el, fill, shown } from "./dom.js";
import { cssVariable } from "./state.js";

const HEIGHT = 190;
const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3], [12, 5], [4, 2, 1, 2]];

export class Chart {
  /**
   * @param {string} title
   * @param {{note?: string, zoomed?: (from: number, to: number) => void, stacked?: boolean}} options
   */
  constructor(title, options = {}) {
    this.options = options;
    this.lines = [];
    this.plot = null;
    this.legend = el("ul", { class: "legend" });
    this.reading = el("span", { class: "reading", "aria-live": "polite" });
    this.canvas = el("div", { class: "canvas", tabindex: "0", role: "img", "aria-label": title, on: { keydown: (event) => this.key(event) } });
    this.card = el(
      "section",
      { class: `chart${options.wide ? " wide" : ""}`, "aria-label": title, data: { title } },
      el("header", {}, el("h3", {}, title), this.reading),
      options.note && el("p", { class: "note" }, options.note),
      this.canvas,
      this.legend,
    );
    this.title = title;
    this.resized = new ResizeObserver(() => this.resize());
    this.resized.observe(this.canvas);
  }

  /** @param {{label: string, colour: string, dash?: number, faint?: boolean, x: number[], y: (number|null)[]}[]} lines */
  show(lines) {
    const same =
      this.plot !== null &&
      lines.length === this.lines.length &&
      lines.every((line, index) => line.label === this.lines[index].label && line.colour === this.lines[index].colour);
    this.lines = lines;
    const data = this.options.stacked ? stack(lines) : uPlot.join(lines.map((line) => [line.x, line.y]));
    if (same) this.plot.setData(data);
    else this.draw(data);
    this.describe();
  }

  draw(data) {
    this.plot?.destroy();
    this.plot = null;
    if (!this.lines.length) return;
    const ink = cssVariable("--muted");
    const grid = { stroke: cssVariable("--line"), width: 1 };
    const axis = { stroke: ink, grid, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const { stacked } = this.options;
    const options = {
      width: Math.max(this.canvas.clientWidth, 200),
      height: HEIGHT,
      padding: [10, 10, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "groupax", setSeries: false }, points: { size: 6 }, drag: { x: true, y: false, setScale: false } },
      scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) } },
      axes: [
        { ...axis, size: 28, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? shown(tick) : "")) },
        { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => shown(tick, 3)) },
      ],
      series: [
        {},
        ...this.lines.map((line, index) => ({
          label: line.label,
          stroke: line.faint ? `${line.colour}55` : line.colour,
          fill: stacked ? `${line.colour}cc` : undefined,
          width: line.faint ? 1 : stacked ? 0.5 : 1.75,
          dash: DASHES[(line.dash ?? 0) % DASHES.length],
          points: { show: () => this.lines[index].x.length < 3 },
        })),
      ],
      hooks: {
        setSelect: [
          (plot) => {
            const { left, width } = plot.select;
            plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
            if (width > 4) this.options.zoomed?.(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
          },
        ],
        setCursor: [(plot) => this.read(plot.cursor.idx)],
      },
    };
    if (stacked) options.scales.y = { range: (_, low, high) => [0, high * 1.05 || 1] };
    this.plot = new uPlot(options, data, this.canvas);
    this.plot.over.addEventListener("dblclick", () => this.options.zoomed?.(null, null));
  }

  /** Describes the chart as text. */
  describe() {
    const lines = this.lines.filter((line) => !line.faint);
    fill(
      this.legend,
      lines.map((line) => {
        const key = el("i", { class: "key" });
        key.style.setProperty("--key", line.colour);
        if (line.dash) key.classList.add("dashed");
        return el("li", {}, key, el("span", {}, line.label), el("b", {}, shown(last(line.y))));
      }),
    );
    const summary = lines.map((line) => `${line.label}: ${shown(line.y.find((y) => y !== null))} to ${shown(last(line.y))}`);
    this.canvas.setAttribute("aria-label", `${this.title} by step. ${summary.join("; ")}. Arrow keys read the values.`);
  }

  read(index) {
    if (index === null || index === undefined || !this.plot) {
      this.reading.textContent = "";
      return;
    }
    const step = this.plot.data[0][index];
    const values = this.lines
      .filter((line) => !line.faint)
      .map((line) => (this.options.stacked ? line.y[index] : near(line, step)))
      .map((value) => shown(value));
    this.reading.textContent = `step ${shown(Math.round(step))}: ${values.slice(0, 6).join(" · ")}`;
  }

  key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") this.options.zoomed?.(null, null);
    if (!(event.key in moves) || !this.plot) return;
    event.preventDefault();
    event.stopPropagation();
    const xs = this.plot.data[0];
    const index = Math.min(Math.max((this.plot.cursor.idx ?? xs.length - 1) + moves[event.key], 0), xs.length - 1);
    this.plot.setCursor({ left: this.plot.valToPos(xs[index], "x"), top: 10 });
    this.read(index);
  }

  resize() {
    if (this.plot && this.canvas.clientWidth > 50) this.plot.setSize({ width: this.canvas.clientWidth, height: HEIGHT });
  }

  close() {
    this.resized.disconnect();
    this.plot?.destroy();
  }
}

function last(values) {
  for (let index = values.length - 1; index >= 0; index -= 1) if (values[index] !== null) return values[index];
  return null;
}

/** Returns the value at the last point up to a step. */
function near(line, step) {
  let low = 0;
  let high = line.x.length - 1;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (line.x[middle] <= step) low = middle;
    else high = middle - 1;
  }
  return line.y[low];
}

/** Stacks the lines, the first line on top, so that each covers the lines below it. */
function stack(lines) {
  if (!lines.length) return [[]];
  const sums = lines[0].x.map(() => 0);
  const stacked = [];
  for (const line of [...lines].reverse()) {
    line.y.forEach((y, index) => {
      sums[index] += y ?? 0;
    });
    stacked.unshift([...sums]);
  }
  return [lines[0].x, ...stacked];
}
