// Where prompt tokens came from: five minutes in columns of five seconds, each from 0 to 100 %.

import { count, element, percent, say } from "./dom.js";
import { HISTORY_S } from "./feed.js";

const COLUMN_S = 5;
const COLUMNS = HISTORY_S / COLUMN_S;
const SVG = "http://www.w3.org/2000/svg";
export const TIERS = ["device", "host", "storage"];

export class Chart {
  constructor(box, note) {
    this.note = note;
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("viewBox", `0 0 ${COLUMNS} 100`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("role", "img");
    const axis = element("div", { class: "axis", "aria-hidden": "true" });
    axis.append(element("span", {}, "100 %"), element("span", {}, "50 %"), element("span", {}, "0 %"));
    const foot = element("div", { class: "foot", "aria-hidden": "true" });
    foot.append(element("span", {}, "5 min ago"), element("span", {}, "now"));
    box.append(axis, this.svg, foot);
  }

  show(history) {
    // Columns have borders on the clock, so that a column that is past never changes.
    const last = Math.floor(history.last.at / 1000 / COLUMN_S);
    const shapes = [];
    for (let column = 0; column < COLUMNS; column += 1) {
      const start = (last - COLUMNS + 1 + column) * COLUMN_S * 1000;
      shapes.push(...this.#column(column, tokens(history, start, start + COLUMN_S * 1000)));
    }
    this.svg.replaceChildren(...shapes);
    const all = tokens(history, -Infinity);
    const parts = TIERS.map((tier) => `${tier} ${percent(all[tier] / all.total)}`).join(", ");
    const whole = history.last.at - history.samples[0].at > (HISTORY_S - COLUMN_S) * 1000;
    const since = whole ? "in the last five minutes" : "since this page was opened";
    const text = all.total
      ? `${count(all.total)} prompt tokens ${since}: ${parts}, computed ${percent(all.computed / all.total)}.`
      : `No prompt ${since}. A column is five seconds; one without a prompt stays empty.`;
    say(this.note, text);
    this.svg.setAttribute("aria-label", text);
  }

  #column(x, part) {
    if (!part.total) return [];
    let top = 100;
    return [...TIERS, "computed"].map((tier) => {
      const height = (100 * part[tier]) / part.total;
      top -= height;
      const rect = document.createElementNS(SVG, "rect");
      for (const [name, value] of Object.entries({ x: x + 0.08, y: top, width: 0.84, height, class: tier }))
        rect.setAttribute(name, value);
      return rect;
    });
  }
}

/** Prompt tokens by where they came from. A hit is counted at admission, its prompt at arrival: so the maximum. */
export function tokens(history, from, to) {
  const found = Object.fromEntries(
    TIERS.map((tier) => [tier, history.grown((sample) => sample.counter(`${tier}_hit_tokens`), from, to)]),
  );
  const hits = found.device + found.host + found.storage;
  const total = Math.max(hits, history.grown((sample) => sample.counter("prompt_tokens"), from, to));
  return { ...found, total, hits, computed: total - hits };
}
