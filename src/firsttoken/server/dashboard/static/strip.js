// The steps over time: a bar each, colour by kind, height by how long it computed; marks where something held it up.

import { colour, FONT, onScheme, surface } from "./colours.js";
import { byId, choice, counted, duration, key, say } from "./format.js";

const HEIGHT = 132, TOP = 16, BOTTOM = 18, LEFT = 52;
const KEPT_MS = 62000, MAX_BARS = 20000;
// Waits for a processor shorter than this are the machine's ordinary noise.
const WAIT_MS = 0.5;

export class Strip {
  constructor() {
    this.canvas = byId("strip");
    this.bars = [];
    this.fields = {};
    this.span = 10;
    this.now = 0;
    this.held = null; // the moment at which the picture stands still
    this.chosen = -1;
    this.due = false;
    byId("strip-legend").append(key("decode", "decode", "block"), key("prefill", "prefill", "block"), key("mixed", "both", "block"),
      key("gc", "garbage collection", "block"), key("run-queue", "waited for a processor", "block"));
    choice(byId("strip-span"), "span", (span) => { this.span = Number(span); this.draw(); });
    onScheme(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") this.release(); });
    this.canvas.addEventListener("blur", () => this.release());
    this.canvas.addEventListener("keydown", (event) => this.move(event));
    document.addEventListener("pointerdown", (event) => { if (event.target !== this.canvas) this.release(); });
  }

  show(frame) {
    if (frame.step_fields) {
      this.fields = Object.fromEntries(frame.step_fields.map((name, at) => [name, at]));
      this.bars = []; // a new connection brings the last seconds again
    }
    this.bars.push(...frame.steps);
    this.now = frame.now_ms;
    const { end } = this.fields;
    let old = Math.max(this.bars.length - MAX_BARS, 0);
    while (old < this.bars.length && this.bars[old][end] < this.now - KEPT_MS) old += 1;
    if (old && this.held === null) this.bars.splice(0, old);
    this.draw();
  }

  draw() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => { this.due = false; this.paint(); });
  }

  paint() {
    const paper = surface(this.canvas, HEIGHT);
    if (!paper) return;
    const { context, width } = paper;
    const { start, end, longest, decode_rows: rows, prefill_tokens: prompt, gc, run_queue: wait } = this.fields;
    const to = this.held ?? this.now, from = to - this.span * 1000, scale = (width - LEFT) / (to - from);
    const shown = this.visible(from, to);
    byId("strip-empty").hidden = shown.length > 0;
    say(byId("strip-empty"), this.bars.length ? `No step in these ${this.span} s.` : "No step yet.");
    const most = shown.reduce((top, bar) => Math.max(top, bar[longest]), 0.001), tall = HEIGHT - TOP - BOTTOM, floor = HEIGHT - BOTTOM;
    context.font = FONT;
    this.frame(context, width, most);
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, width - LEFT, HEIGHT);
    context.clip();
    for (const bar of shown) {
      const x = LEFT + (bar[start] - from) * scale, wide = Math.max((bar[end] - bar[start]) * scale, 0.7);
      // By the root: the usual steps stay visible beside one that took ten times as long.
      const high = Math.max(Math.sqrt(bar[longest] / most) * tall, 2);
      context.fillStyle = colour(bar[prompt] === 0 ? "decode" : bar[rows] === 0 ? "prefill" : "mixed");
      context.fillRect(x, floor - high, wide > 3 ? wide - 0.6 : wide, high);
      if (bar[gc] > 0) mark(context, "gc", x + wide / 2, 2);
      if (bar[wait] > WAIT_MS) mark(context, "run-queue", x + wide / 2, 8);
    }
    const bar = this.bars[this.chosen];
    if (bar) {
      const x = LEFT + (bar[start] - from) * scale, wide = Math.max((bar[end] - bar[start]) * scale, 3);
      context.strokeStyle = colour("text");
      context.lineWidth = 1.5;
      context.strokeRect(x - 1, TOP - 2, wide + 2, floor - TOP + 3);
    }
    context.restore();
  }

  frame(context, width, most) {
    const floor = HEIGHT - BOTTOM;
    context.fillStyle = colour("line");
    for (const y of [floor, (TOP + floor) / 2, TOP]) context.fillRect(LEFT, y, width - LEFT, 1);
    context.fillStyle = colour("muted");
    context.textBaseline = "middle";
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      context.textAlign = share === 0 ? "left" : share === 1 ? "right" : "center";
      const age = this.span * (1 - share);
      context.fillText(age ? `−${age} s` : this.held === null ? "now" : "held", LEFT + share * (width - LEFT), floor + 10);
    }
    if (!this.bars.length) return;
    context.textAlign = "right";
    context.fillText(duration(most), LEFT - 6, TOP);
    context.fillText(duration(most / 4), LEFT - 6, (TOP + floor) / 2);
    context.fillText("0", LEFT - 6, floor);
  }

  visible(from, to) {
    const { start, end } = this.fields;
    return this.bars.filter((bar) => bar[end] >= from && bar[start] <= to);
  }

  point(event) {
    if (!this.bars.length) return;
    this.held ??= this.now;
    const box = this.canvas.getBoundingClientRect(), { start, end } = this.fields;
    const at = this.held - this.span * 1000 * (1 - (event.clientX - box.left - LEFT) / (box.width - LEFT));
    let best = -1, nearest = this.span * 20; // as far as 2 % of the width
    this.bars.forEach((bar, index) => {
      const far = at < bar[start] ? bar[start] - at : at > bar[end] ? at - bar[end] : 0;
      if (far < nearest) { nearest = far; best = index; }
    });
    this.choose(best);
  }

  move(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, Escape: 0 }[event.key];
    if (by === undefined || !this.bars.length) return;
    event.preventDefault();
    if (by === 0) { this.release(); return; }
    this.held ??= this.now;
    this.choose(this.chosen < 0 ? this.bars.length - 1 : Math.min(Math.max(this.chosen + by, 0), this.bars.length - 1));
  }

  choose(index) {
    this.chosen = index;
    this.draw();
    if (index >= 0) say(byId("strip-detail"), this.told(this.bars[index]));
  }

  release() {
    if (this.held === null) return;
    this.held = null;
    this.chosen = -1;
    this.draw();
  }

  told(bar) {
    const of = (name) => bar[this.fields[name]], many = of("steps") > 1;
    const words = [many ? `${of("steps")} steps to ${of("id")}: ${duration(of("end") - of("start"))} together, the longest ${duration(of("longest"))}` : `step ${of("id")}: computed ${duration(of("longest"))}`];
    words.push(counted(of("decode_rows"), "decode row"), counted(of("prefill_tokens"), "prompt token"));
    if (of("plan")) words.push(`planned in ${duration(of("plan"))}`);
    if (of("pad_tokens")) words.push(`${counted(of("pad_tokens"), "token")} of padding`);
    if (of("gc")) words.push(`garbage collection ${duration(of("gc"))}`);
    if (of("run_queue") > WAIT_MS) words.push(`waited ${duration(of("run_queue"))} for a processor`);
    if (of("copy")) words.push(`KV copies ${duration(of("copy"))}`);
    if (of("preempted")) words.push(`${of("preempted")} preempted`);
    return words.join(" · ");
  }
}

function mark(context, name, x, y) {
  context.fillStyle = colour(name);
  context.fillRect(x - 1.5, y, 3, 5);
}
