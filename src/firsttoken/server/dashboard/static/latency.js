// Percentiles by class: the table, and the lines over time.

import { LineChart } from "./charts.js";
import { byId, CLASSES, key, make, number, say } from "./format.js";

const KINDS = ["ttft_ms", "itl_ms", "e2e_ms"];
const LEVELS = ["p50", "p95", "p99"];

export class Latency {
  constructor() {
    const lines = CLASSES.flatMap((name) => [{ colour: name, dash: true }, { colour: name }]);
    this.ttft = new LineChart(byId("ttft"), lines, "No first token in the last minute.");
    this.itl = new LineChart(byId("itl"), lines, "No token in the last minute.");
    this.rate = new LineChart(byId("rate"), CLASSES.map((name) => ({ colour: name })), "No token yet.");
    this.queue = new LineChart(byId("queue"), [{ colour: "decode" }, { colour: "prefill" }], "Nothing told yet.", true);
    byId("queue-legend").append(key("decode", "running"), key("prefill", "waiting"));
    this.rows = new Map();
    this.shown = "";
    for (const name of CLASSES) this.addRow(name);
  }

  addRow(name) {
    const cells = Array.from({ length: 13 }, () => make("td", {}, "–"));
    const swatch = make("i", { class: "swatch", style: { background: `var(--${name})` } });
    byId("latency").tBodies[0].append(make("tr", {}, make("th", { scope: "row" }, swatch, name), ...cells));
    this.rows.set(name, cells);
  }

  show(frame) {
    const seconds = frame.now_ms / 1000;
    const lines = (kind) => CLASSES.flatMap((name) => [frame.classes[name][kind].p50, frame.classes[name][kind].p99]);
    this.ttft.push(seconds, lines("ttft_ms"));
    this.itl.push(seconds, lines("itl_ms"));
    const busy = CLASSES.filter((name) => frame.classes[name].itl_ms.count || frame.classes[name].ttft_ms.count);
    this.rate.push(seconds, CLASSES.map((name) => (busy.includes(name) ? frame.classes[name].tokens_per_s : null)));
    this.queue.push(seconds, [frame.running, frame.waiting]);
    for (const name of CLASSES) this.showRow(name, frame.classes[name]);
    this.legends(busy);
    for (const [id, kind] of [["ttft", "ttft_ms"], ["itl", "itl_ms"]]) {
      byId(id).setAttribute("aria-label", busy.map((name) =>
        `${name}: median ${number(frame.classes[name][kind].p50)} ms, p99 ${number(frame.classes[name][kind].p99)} ms`).join("; ") || "nothing");
    }
  }

  showRow(name, told) {
    const values = KINDS.flatMap((kind) => LEVELS.map((level) => told[kind][level]));
    values.push(told.running ?? null, told.waiting ?? null, told.requests_per_s, told.tokens_per_s);
    const cells = this.rows.get(name);
    values.forEach((value, at) => say(cells[at], number(value)));
  }

  /** Only classes that are there are explained. */
  legends(busy) {
    if (busy.join() === this.shown) return;
    this.shown = busy.join();
    for (const id of ["ttft-legend", "itl-legend"]) {
      byId(id).replaceChildren(...busy.map((name) => key(name, name)), ...(busy.length ? [key("muted", "p99"), key("muted", "p50", "dash")] : []));
    }
    byId("rate-legend").replaceChildren(...busy.map((name) => key(name, name)));
  }
}
