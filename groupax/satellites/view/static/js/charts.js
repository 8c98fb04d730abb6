// Charts: a card with a title, a legend, a labelled reading at the pointer, and uPlot's canvas.

import { el, fill, shown, visible } from "./dom.js";
import { savePicture } from "./saving.js";
import { cssVariable } from "./state.js";

const HEIGHT = 190;
// Those of the style sheet's .dash-0 to .dash-5 too.
const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3], [12, 5], [4, 2, 1, 2]];
const MAX_LEGEND = 8; // lines in a legend; of more it has the dashes, and the list of runs the colours
const MAX_READINGS = 12; // lines in a reading
const CLIPPED = [0.01, 0.99]; // quantiles of the values that are shown when outliers are clipped
const NEAR_PX = 6; // of a mark

// How an x axis shows and names its values.
export const X_AXES = {
  step: { shown: (x) => (Number.isInteger(x) ? shown(x) : ""), reading: (x) => `step ${shown(Math.round(x))}`, title: "step" },
  tokens: { shown: (x) => compact(x), reading: (x) => `${compact(x)} tokens`, title: "tokens" },
  time: { shown: (x) => hours(x), reading: (x) => `${hours(x)} of training`, title: "time" },
};

export class Chart {
  /**
   * @param {string} title
   * @param {{note?: string, names?: string[], height?: number, wide?: boolean,
   *   zoomed?: (from: number, to: number) => void, opened?: (x: number, line: object) => void}} options
   *   `names` are metrics; `opened` is called with the x of a click and the line that is nearest to it.
   */
  constructor(title, options = {}) {
    this.options = options;
    this.height = options.height ?? HEIGHT;
    this.lines = [];
    this.hidden = new Set(); // labels and parts of lines
    this.marks = [];
    this.axes = { x: "step", isLog: false, isClipped: false };
    this.plot = null;
    this.legend = el("ul", { class: "legend" });
    this.reading = el("div", { class: "reading", "aria-live": "polite" });
    this.reading.hidden = true;
    this.canvas = el("div", { class: "canvas", tabindex: "0", role: "img", "aria-label": title, on: {
      keydown: (event) => this.key(event), blur: () => this.read(null),
      pointerenter: () => { this.isPointed = true; }, pointerleave: () => { this.isPointed = false; this.read(null); },
    } });
    this.canvas.style.setProperty("--height", `${this.height}px`);
    const names = options.names ?? [];
    this.card = el(
      "section",
      { class: `chart${options.wide ? " wide" : ""}`, "aria-label": title, data: { title } },
      el("header", {}, el("h3", {}, title), names.length > 0 && title !== names[0] && el("code", { class: "metric", title: names.join("\n") }, names.length === 1 ? names[0] : `${names[0]} …`),
        options.zoomed && this.saving(title)),
      options.note && el("p", { class: "note" }, options.note),
      el("div", { class: "plot" }, this.canvas, this.reading),
      this.legend,
    );
    this.title = title;
    this.resized = new ResizeObserver(() => this.resize());
    this.resized.observe(this.canvas);
  }

  /**
   * @param {{label: string, part?: string, colour: string, dash?: number, faint?: boolean, x: number[],
   *   y: (number|null)[], low?: (number|null)[], high?: (number|null)[]}[]} lines `part` names what lines of several
   *   runs have in common, `low` and `high` bound a band.
   * @param {{x?: string, isLog?: boolean, isClipped?: boolean}} axes
   * @param {{x: number, colour: string, text: string}[]} marks on the x axis
   */
  show(lines, axes = this.axes, marks = []) {
    const isKnown = this.lines.length > 0;
    Object.assign(this, { lines, axes: { x: "step", ...axes }, marks });
    const labels = new Set(this.entries().map((entry) => entry.label));
    this.hidden = new Set([...this.hidden].filter((label) => labels.has(label)));
    const signature = JSON.stringify([lines.map(({ label, colour, dash, faint, low }) => [label, colour, dash, faint, Boolean(low)]), axes, [...this.hidden]]);
    const isSame = this.plot !== null && signature === this.signature && isKnown;
    this.signature = signature;
    const data = this.data();
    if (isSame) this.plot.setData(data);
    else this.draw(data);
    this.describe();
  }

  data() {
    const positive = this.axes.isLog ? (values) => values.map((y) => (y > 0 ? y : null)) : (values) => values;
    const data = uPlot.join(this.lines.map((line) => [line.x, ...[line.y, line.low, line.high].filter(Boolean).map(positive)]));
    return data.length ? data : [[]];
  }

  draw(data) {
    this.plot?.destroy();
    this.plot = null;
    if (!this.lines.length) return;
    const ink = cssVariable("--muted");
    const grid = { stroke: cssVariable("--line"), width: 1 };
    const axis = { stroke: ink, grid, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const { series, bands } = this.series();
    const options = {
      width: Math.max(this.canvas.clientWidth, 200),
      height: this.height,
      padding: [10, 22, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: `groupax-${this.axes.x}`, setSeries: false }, points: { size: 6 }, drag: { x: true, y: false, setScale: false } },
      scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: this.scale() },
      axes: [
        { ...axis, size: 28, space: 56, values: (_, ticks) => ticks.map(X_AXES[this.axes.x].shown) },
        { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : shown(tick, 3))) },
      ],
      series,
      bands,
      hooks: {
        setSelect: [(plot) => this.select(plot)],
        setCursor: [(plot) => this.read(plot.cursor.idx)],
        draw: [(plot) => this.drawMarks(plot)],
      },
    };
    this.plot = new uPlot(options, data, this.canvas);
    this.listen(this.plot.over);
  }

  series() {
    const series = [{}];
    const bands = [];
    this.lines.forEach((line, index) => {
      const show = !this.isHidden(line);
      series.push({
        label: line.label,
        show,
        stroke: line.faint ? `${line.colour}55` : line.colour,
        width: line.faint ? 1 : 1.75,
        dash: dashOf(line.dash),
        points: { show: () => this.lines[index].x.length < 3 },
      });
      if (!line.low) return;
      const edge = { show, width: 0, stroke: "transparent", points: { show: false } };
      series.push(edge, edge);
      bands.push({ series: [series.length - 1, series.length - 2], fill: `${line.colour}2e` });
    });
    return { series, bands };
  }

  scale() {
    if (this.axes.isLog) return { distr: 3, range: (_, low, high) => (low > 0 && high > 0 ? uPlot.rangeLog(low, high, 10, false) : [0.1, 1]) };
    return { range: (_, low, high) => {
      if (low === null || high === null || low === undefined) return [0, 1];
      const [from, to] = this.axes.isClipped ? quantiles(this.lines.filter((line) => !this.isHidden(line)), low, high) : [low, high];
      if (from === to) return from === 0 ? [0, 1] : [from - Math.abs(from) * 0.1, from + Math.abs(from) * 0.1];
      return uPlot.rangeNum(from, to, 0.08, true);
    } };
  }

  select(plot) {
    const { left, width } = plot.select;
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (width > 4) this.options.zoomed?.(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
  }

  listen(over) {
    over.addEventListener("dblclick", () => this.options.zoomed?.(null, null));
    let pressed = 0;
    over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
    over.addEventListener("click", (event) => {
      if (!this.isOpening() || Math.abs(event.clientX - pressed) > 4 || event.detail > 1) return;
      const x = this.plot.posToVal(event.offsetX, "x");
      const y = this.plot.posToVal(event.offsetY, "y");
      const found = this.readings(x).sort((a, b) => Math.abs(a.y - y) - Math.abs(b.y - y))[0];
      if (found) this.options.opened(found.x, found.line);
    });
    const touched = (event) => {
      this.isPointed = true;
      const { left, top } = over.getBoundingClientRect();
      this.plot.setCursor({ left: event.touches[0].clientX - left, top: event.touches[0].clientY - top });
    };
    over.addEventListener("touchstart", touched, { passive: true });
    over.addEventListener("touchmove", touched, { passive: true });
  }

  /** Findings are marked by triangles on the x axis. */
  drawMarks(plot) {
    const { ctx, bbox } = plot;
    const size = 5 * devicePixelRatio;
    for (const mark of this.marks) {
      const x = plot.valToPos(mark.x, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      const bottom = bbox.top + bbox.height;
      ctx.fillStyle = mark.colour;
      ctx.beginPath();
      ctx.moveTo(x - size, bottom);
      ctx.lineTo(x + size, bottom);
      ctx.lineTo(x, bottom - 1.7 * size);
      ctx.fill();
    }
  }

  /** Describes the chart as text. */
  describe() {
    const lines = this.lines.filter((line) => !line.faint);
    const entries = this.entries();
    const isLong = entries.length < lines.length || entries.length > MAX_LEGEND;
    fill(this.legend,
      entries.length <= MAX_LEGEND && entries.map((entry) => this.legendItem(entry)),
      isLong && el("li", {}, `${lines.length} lines, in the colors of the list of runs`));
    const summary = lines.slice(0, MAX_LEGEND).map((line) => `${line.label}: ${shown(line.y.find((y) => y !== null))} to ${shown(last(line.y))}`);
    const marks = this.marks.slice(0, MAX_LEGEND).map((mark) => mark.text);
    this.canvas.setAttribute("aria-label", `${this.title} by ${X_AXES[this.axes.x].title}. ${[...summary, ...marks].join("; ")}. Arrow keys read the values${this.isOpening() ? ", Enter opens their rollouts" : ""}.`);
  }

  /** Returns the entries of the legend: the lines, or what they have in common where they are many. */
  entries() {
    const lines = this.lines.filter((line) => !line.faint);
    const parts = new Map(lines.filter((line) => line.part).map((line) => [line.part, line]));
    if (lines.length <= MAX_LEGEND || !parts.size) return lines.map((line) => ({ label: line.label, colour: line.colour, dash: line.dash, last: last(line.y) }));
    return [...parts].map(([label, { colour, dash }]) => {
      const isOneColour = lines.every((line) => line.part !== label || line.colour === colour);
      return { label, colour: isOneColour ? colour : cssVariable("--muted"), dash, last: null };
    });
  }

  legendItem({ label, colour, dash, last: value }) {
    const isShown = !this.hidden.has(label);
    return el("li", {}, el("button", {
      type: "button", class: "legend-item", "aria-pressed": String(isShown), title: `${visible(label)}\nClick: hide or show. Double click: show alone.`,
      on: { click: (event) => this.toggle(label, event.detail > 1) },
    }, keyOf({ colour, dash }), el("span", {}, visible(label)), value !== null && el("b", {}, shown(value, 3))));
  }

  /** Whether a click on a point opens the step. */
  isOpening() {
    return Boolean(this.options.opened) && this.axes.x === "step";
  }

  isHidden(line) {
    return this.hidden.has(line.label) || this.hidden.has(line.part);
  }

  toggle(label, isSolo) {
    const labels = this.entries().map((entry) => entry.label);
    if (isSolo) this.hidden = new Set(labels.filter((each) => each !== label));
    else if (this.hidden.has(label)) this.hidden.delete(label);
    else this.hidden.add(label);
    if (this.lines.every((line) => this.isHidden(line))) this.hidden.clear();
    this.show(this.lines, this.axes, this.marks);
  }

  saving(title) {
    const what = "Save the chart as PNG";
    const click = () => this.plot && savePicture(this.plot.ctx.canvas, title, this.entries().map(({ label, colour, dash }) => ({ label, colour, dash: dashOf(dash) })));
    return el("span", { class: "saving" }, el("button", { type: "button", class: "quiet", title: what, "aria-label": `${title}: ${what}`, on: { click } }, "PNG"));
  }

  /** Returns the values of the visible lines at their points nearest to x, the highest first. */
  readings(x) {
    return this.lines
      .filter((line) => !line.faint && !this.isHidden(line) && line.x.length)
      .map((line) => {
        const index = nearest(line.x, x);
        return { line, x: line.x[index], y: line.y[index], low: line.low?.[index], high: line.high?.[index] };
      })
      .filter(({ line, y }) => y !== null && y !== undefined && x >= line.x[0] && x <= line.x[line.x.length - 1])
      .sort((a, b) => b.y - a.y);
  }

  read(index) {
    const isRead = index !== null && index !== undefined && this.plot && (this.isPointed || this.canvas.contains(document.activeElement));
    this.reading.hidden = !isRead;
    if (!isRead) {
      this.reading.replaceChildren();
      return;
    }
    const x = this.plot.data[0][index];
    const found = this.readings(x);
    const at = this.plot.valToPos(x, "x");
    const marks = this.marks.filter((mark) => Math.abs(this.plot.valToPos(mark.x, "x") - at) <= NEAR_PX);
    fill(this.reading,
      el("p", {}, X_AXES[this.axes.x].reading(x)),
      el("ul", {}, found.slice(0, MAX_READINGS).map((each) => readingItem(each))),
      found.length > MAX_READINGS && el("p", {}, `and ${found.length - MAX_READINGS} more`),
      marks.map((mark) => el("p", { class: "marked" }, `▲ ${visible(mark.text)}`)));
    const box = this.plot.over;
    const left = at + box.offsetLeft;
    const isRight = at > box.clientWidth / 2;
    this.reading.style.left = isRight ? "" : `${left + 14}px`;
    this.reading.style.right = isRight ? `${this.canvas.clientWidth - left + 14}px` : "";
  }

  key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") this.options.zoomed?.(null, null);
    if (event.key === "Enter" && this.isOpening() && Number.isInteger(this.plot?.cursor.idx)) {
      const [found] = this.readings(this.plot.data[0][this.plot.cursor.idx]);
      if (found) this.options.opened(found.x, found.line);
    }
    if (!(event.key in moves) || !this.plot) return;
    event.preventDefault();
    event.stopPropagation();
    const xs = this.plot.data[0];
    const index = Math.min(Math.max((this.plot.cursor.idx ?? xs.length - 1) + moves[event.key], 0), xs.length - 1);
    this.plot.setCursor({ left: this.plot.valToPos(xs[index], "x"), top: 10 });
    this.read(index);
  }

  resize() {
    if (this.plot && this.canvas.clientWidth > 50) this.plot.setSize({ width: this.canvas.clientWidth, height: this.height });
  }

  close() {
    this.resized.disconnect();
    this.plot?.destroy();
  }
}

function readingItem({ line, y, low, high }) {
  const band = low !== undefined && low !== null ? ` (${shown(low, 3)} to ${shown(high, 3)})` : "";
  return el("li", {}, keyOf(line), el("span", {}, visible(line.label)), el("b", {}, `${shown(y)}${band}`));
}

function dashOf(dash) {
  return DASHES[(dash ?? 0) % DASHES.length];
}

/** A piece of a line, with its colour and its dash. */
function keyOf({ colour, dash }) {
  const key = el("i", { class: `key dash-${(dash ?? 0) % DASHES.length}` });
  key.style.setProperty("--key", colour);
  return key;
}

function last(values) {
  for (let index = values.length - 1; index >= 0; index -= 1) if (values[index] !== null) return values[index];
  return null;
}

/** Returns the index of the position that is nearest to x; positions rise. */
function nearest(positions, x) {
  let low = 0;
  let high = positions.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (positions[middle] <= x) low = middle;
    else high = middle;
  }
  return Math.abs(positions[high] - x) < Math.abs(positions[low] - x) ? high : low;
}

/** Returns the range of the values without the outermost ones. */
function quantiles(lines, low, high) {
  const values = lines.flatMap((line) => line.y.filter((y) => y !== null && y >= low && y <= high));
  if (values.length < 20) return [low, high];
  values.sort((a, b) => a - b);
  return CLIPPED.map((part) => values[Math.round(part * (values.length - 1))]);
}

function compact(number) {
  return number.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
}

function hours(seconds) {
  if (seconds < 60) return `${shown(seconds, 2)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes}:${String(Math.floor(seconds % 60)).padStart(2, "0")} min` : `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")} h`;
}
