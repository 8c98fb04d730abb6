// The picture that is saved of a chart.

import { visible } from "./dom.js";
import { cssVariable } from "./state.js";

const FONT = "system-ui, sans-serif";
const MARGIN = 12;
const ROW = 18; // height of a row of the legend

/**
 * Saves a chart as PNG, with its title and its legend, in the colours of the page.
 *
 * @param {HTMLCanvasElement} drawn the chart's axes and lines
 * @param {{label: string, colour: string, dash: number[]}[]} entries of the legend
 */
export function savePicture(drawn, title, entries) {
  const scale = devicePixelRatio;
  const canvas = document.createElement("canvas");
  const ink = canvas.getContext("2d");
  const width = drawn.width / scale + 2 * MARGIN;
  ink.font = `12px ${FONT}`;
  const places = placed(entries, width, (text) => ink.measureText(text).width);
  const top = 3 * MARGIN + drawn.height / scale;
  const height = top + (places.length ? places[places.length - 1].y + ROW : 0) + MARGIN;
  Object.assign(canvas, { width: Math.round(width * scale), height: Math.round(height * scale) });
  ink.scale(scale, scale);
  ink.fillStyle = cssVariable("--surface");
  ink.fillRect(0, 0, width, height);
  ink.fillStyle = cssVariable("--ink");
  ink.font = `600 14px ${FONT}`;
  ink.fillText(title, MARGIN, 1.6 * MARGIN);
  ink.drawImage(drawn, MARGIN, 2.4 * MARGIN, drawn.width / scale, drawn.height / scale);
  ink.font = `12px ${FONT}`;
  ink.lineWidth = 2;
  for (const { entry, text, x, y } of places) {
    ink.strokeStyle = entry.colour;
    ink.setLineDash(entry.dash);
    ink.beginPath();
    ink.moveTo(x, top + y + 8);
    ink.lineTo(x + 22, top + y + 8);
    ink.stroke();
    ink.fillText(text, x + 28, top + y + 12);
  }
  canvas.toBlob((blob) => {
    const address = URL.createObjectURL(blob);
    Object.assign(document.createElement("a"), { href: address, download: `${title.replace(/[^\p{L}\p{N}@.-]+/gu, "_")}.png` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
  });
}

/** Lays out the entries of a legend in rows. */
function placed(entries, width, textWidth) {
  let [x, y] = [MARGIN, 0];
  return entries.map((entry) => {
    const text = visible(entry.label);
    const needed = 28 + textWidth(text) + 14;
    if (x > MARGIN && x + needed > width - MARGIN) [x, y] = [MARGIN, y + ROW];
    const place = { entry, text, x, y };
    x += needed;
    return place;
  });
}
