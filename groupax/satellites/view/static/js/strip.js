// A small histogram of the completions of a step, and the range of values by which it filters groups.

import { debounced, el, fill, shown } from "./dom.js";

const MAX_BINS = 32;

export class Strip {
  /** `valuesOf(group)` are the values of a group's completions; `changed()` is called when the range has changed. */
  constructor(label, valuesOf, changed) {
    this.valuesOf = valuesOf;
    this.changed = debounced(changed, 80);
    this.range = [-Infinity, Infinity]; // of values
    this.ends = ["at least", "at most"].map((end, index) => el("input", {
      type: "range", min: "0", name: `${label.toLowerCase()}-${end.replace(" ", "-")}`, "aria-label": `${label}, ${end}`, on: { input: () => this.moved(index) },
    }));
    this.told = el("output");
    this.root = el("div", { class: "strip", role: "group", "aria-label": `${label}: range of the completions` },
      el("div", { class: "strip-head" }, el("span", {}, label), this.told), this.bars = el("div", { class: "bars", "aria-hidden": "true" }), this.ends);
  }

  /** Shows the values of a step; the range stays that of the step before. */
  show(groups) {
    const values = groups.flatMap(this.valuesOf).filter((value) => value !== null);
    this.low = values.reduce((least, value) => Math.min(least, value), Infinity);
    this.high = values.reduce((most, value) => Math.max(most, value), -Infinity);
    this.root.hidden = !(this.high > this.low);
    if (this.root.hidden) return;
    this.gap = values.every(Number.isInteger) ? 1 : 0; // between the end of a bin and the next one
    const span = this.high - this.low + this.gap;
    this.width = this.gap ? Math.ceil(span / MAX_BINS) : span / MAX_BINS;
    this.numBins = this.gap ? Math.ceil(span / this.width) : MAX_BINS;
    const counts = new Array(this.numBins).fill(0);
    for (const value of values) counts[Math.min(Math.floor((value - this.low) / this.width), this.numBins - 1)] += 1;
    const most = Math.max(...counts);
    fill(this.bars, counts.map((count) => {
      const bar = el("i");
      bar.style.setProperty("--part", String(count ? Math.max(count / most, 0.04) : 0));
      return bar;
    }));
    for (const end of this.ends) end.max = String(this.numBins);
    this.draw();
  }

  /** The value at which the range begins (index 0) or ends (1) if its end is at a place between bins. */
  edge(place, index) {
    return Math.min(this.low + place * this.width - index * this.gap, this.high);
  }

  /** The places between bins at which the range begins and ends; a range of integers has at least one bin. */
  places() {
    return this.range.map((value, index) => {
      if (!Number.isFinite(value)) return index * this.numBins;
      const place = Math.round((value + index * this.gap - this.low) / this.width);
      return Math.min(Math.max(place, index * this.gap), this.numBins - (1 - index) * this.gap);
    });
  }

  moved(index) {
    const [from, to] = this.ends.map((end) => Number(end.value));
    const place = index ? Math.max(to, from + this.gap) : Math.min(from, to - this.gap);
    this.range[index] = place === index * this.numBins ? [-Infinity, Infinity][index] : this.edge(place, index);
    this.draw();
    this.changed();
  }

  draw() {
    const places = this.places();
    const values = places.map((place, index) => shown(this.edge(place, index), 3));
    this.ends.forEach((end, index) => {
      end.value = String(places[index]);
      end.setAttribute("aria-valuetext", values[index]);
    });
    [...this.bars.children].forEach((bar, bin) => bar.classList.toggle("out", bin < places[0] || bin >= places[1]));
    this.told.textContent = values.join(" to ");
  }

  /** Whether a value is in the range; an unknown one is if the range is not limited. */
  holds(value) {
    const [least, most] = this.range;
    if (this.root.hidden || (least === -Infinity && most === Infinity)) return true;
    return value !== null && value >= least && value <= most;
  }

  clear() {
    this.range = [-Infinity, Infinity];
  }
}
