// Lines over the last two minutes, by uPlot.

import { colour, onScheme, FONT } from "./colours.js";
import { make, number } from "./format.js";

/* global uPlot */

const SPAN_S = 120, LEAST_S = 20;
// Ten a second for the span, and no more: memory does not grow.
const MAX_POINTS = 1200;

const charts = [];
onScheme(() => { for (const chart of charts) chart.plot?.redraw(false, true); });

export class LineChart {
  /** `series`: {colour, dash}; `holder` gets an `empty` text while there is nothing to draw; `whole`: of whole numbers. */
  constructor(holder, series, empty, whole = false) {
    this.whole = whole;
    this.holder = holder;
    this.series = series;
    this.data = [[], ...series.map(() => [])];
    this.empty = make("p", { class: "empty" }, empty);
    this.plot = null;
    this.due = false;
    holder.append(this.empty);
    charts.push(this);
    new ResizeObserver(() => this.resize()).observe(holder);
  }

  /** One moment: seconds, and a value or null for each series. */
  push(seconds, values) {
    const [times] = this.data;
    if (times.length && seconds <= times[times.length - 1]) return;
    times.push(seconds);
    values.forEach((value, at) => this.data[at + 1].push(value ?? null));
    let old = times.length > MAX_POINTS ? times.length - MAX_POINTS : 0;
    while (times[old] < seconds - SPAN_S) old += 1;
    if (old) for (const column of this.data) column.splice(0, old);
    this.draw();
  }

  draw() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => {
      this.due = false;
      const any = this.data.some((column, at) => at && column.some((value) => value !== null));
      this.empty.hidden = any;
      if (!any || !this.holder.clientWidth) return;
      if (this.plot === null) this.create();
      const [times] = this.data, now = times[times.length - 1];
      const span = Math.min(Math.max(now - times[0], LEAST_S), SPAN_S);
      this.plot.batch(() => {
        this.plot.setData(this.data, false);
        this.plot.setScale("x", { min: now - span, max: now });
      });
    });
  }

  create() {
    const axis = { stroke: () => colour("muted"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false }, font: FONT };
    this.plot = new uPlot({
      width: this.holder.clientWidth,
      height: this.holder.clientHeight,
      padding: [8, 16, 0, 0],
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { time: false }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.12 : 1] } },
      axes: [
        { ...axis, size: 22, values: (plot, at) => at.map((value) => ago(plot.scales.x.max - value)),
          splits: (plot) => ages(plot.scales.x).map((age) => plot.scales.x.max - age) },
        { ...axis, size: 46, space: 28, ...(this.whole ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] } : {}), values: (_, at) => at.map((value) => (value === 0 ? "0" : number(value))) },
      ],
      series: [{}, ...this.series.map((one) => ({
        stroke: () => colour(one.colour), width: one.dash ? 1.25 : 1.75, dash: one.dash ? [4, 3] : undefined, points: { show: false },
      }))],
    }, this.data, this.holder);
    this.holder.setAttribute("role", "img");
  }

  resize() {
    if (this.plot !== null && this.holder.clientWidth) {
      this.plot.setSize({ width: this.holder.clientWidth, height: this.holder.clientHeight });
    }
  }
}

/** Where the axis is labelled: four or five round ages. */
function ages({ min, max }) {
  const span = max - min, step = span > 75 ? 30 : span > 32 ? 15 : 5, found = [];
  for (let age = 0; age <= span + 0.01; age += step) found.unshift(age);
  return found;
}

function ago(seconds) {
  return seconds < 0.5 ? "now" : `−${Math.round(seconds)} s`;
}
