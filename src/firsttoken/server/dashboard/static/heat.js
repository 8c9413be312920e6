// The heat map of KV hits: rows of tiers or classes, columns of token positions, colour the share that was found.

import { colour, FONT, heat, onScheme, surface } from "./colours.js";
import { byId, choice, CLASSES, count, make, percent, say } from "./format.js";

const MINUTE_MS = 60000;
const KEPT = 61;
const ROW = 30, BARS = 34, AXIS = 20, LEFT = 62;

export class Heat {
  constructor() {
    this.canvas = byId("heat");
    this.rows = "tier";
    this.span = "start";
    this.history = []; // {ms, tokens}: one a second, of the last minute
    this.context = Infinity; // tokens that a prompt can have
    this.table = null;
    this.at = null;
    choice(byId("heat-rows"), "rows", (rows) => {
      this.rows = rows;
      this.at = null;
      say(byId("heat-detail"), "");
      this.draw();
    });
    choice(byId("heat-span"), "span", (span) => { this.span = span; this.draw(); });
    onScheme(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("keydown", (event) => this.move(event));
    this.legend();
  }

  show(kv, nowMs) {
    if (!kv?.heat) return;
    this.heat = kv.heat;
    this.positions = kv.heat.positions.filter((edge) => edge < this.context);
    const last = this.history[this.history.length - 1];
    if (!last || nowMs - last.ms >= 950) {
      this.history.push({ ms: nowMs, tokens: kv.heat.tokens });
      while (this.history.length > KEPT || nowMs - this.history[0].ms > MINUTE_MS + 2000) this.history.shift();
    }
    this.draw();
  }

  /** Tokens of `cls` and `kind` at each position, of the chosen time. */
  tokens(cls, kind) {
    const now = this.heat.tokens[cls][kind];
    if (this.span === "start") return now;
    const before = this.history[0].tokens[cls]?.[kind] ?? [];
    return now.map((value, at) => Math.max(value - (before[at] ?? 0), 0));
  }

  /** {names, found[row][column], all[row][column]} */
  build() {
    const kinds = Object.keys(this.heat.tokens.p2), tiers = kinds.filter((kind) => kind !== "missed");
    const sum = (classes, of) => this.positions.map((_, at) => classes.reduce((total, cls) =>
      total + of.reduce((some, kind) => some + this.tokens(cls, kind)[at], 0), 0));
    const all = sum(CLASSES, kinds);
    if (this.rows === "class") {
      return { names: CLASSES, found: CLASSES.map((cls) => sum([cls], tiers)), all: CLASSES.map((cls) => sum([cls], kinds)), total: all };
    }
    const names = tiers.length > 1 ? [...tiers, "any tier"] : tiers;
    const found = tiers.map((tier) => sum(CLASSES, [tier]));
    if (tiers.length > 1) found.push(sum(CLASSES, tiers));
    return { names, found, all: names.map(() => all), total: all };
  }

  draw() {
    if (!this.heat) return;
    const table = this.build();
    this.table = table;
    const any = table.total.some((value) => value > 0);
    byId("heat-empty").hidden = any;
    say(byId("heat-empty"), this.span === "minute" && this.heat ? "No prompt in the last minute." : "No prompt yet.");
    const paper = surface(this.canvas, BARS + table.names.length * ROW + AXIS);
    if (!paper) return;
    const { context, width } = paper;
    context.font = FONT;
    context.textBaseline = "middle";
    const step = (width - LEFT) / this.positions.length;
    this.step = step;
    this.drawBars(context, table, step);
    table.names.forEach((name, row) => {
      const y = BARS + row * ROW;
      context.textAlign = "left";
      context.fillStyle = colour("muted");
      context.fillText(name, 0, y + ROW / 2);
      this.positions.forEach((_, column) => this.cell(context, table, row, column, step));
    });
    this.axis(context, table, step);
    if (this.at) this.tell();
    this.canvas.setAttribute("aria-label", `KV hit ratio, ${this.span === "start" ? "since the start" : "of the last minute"}: ` +
      table.names.map((name, row) => `${name} ${percent(ratio(total(table.found[row]), total(table.all[row])))}`).join(", "));
  }

  /** How many tokens stand behind a column. */
  drawBars(context, table, step) {
    const most = Math.max(...table.total, 1);
    context.fillStyle = colour("cached");
    table.total.forEach((value, column) => {
      const height = value ? Math.max((value / most) * (BARS - 12), 1.5) : 0;
      context.fillRect(LEFT + column * step + 1, BARS - 4 - height, step - 2, height);
    });
    context.textAlign = "left";
    context.fillStyle = colour("muted");
    context.fillText("tokens", 0, BARS / 2 + 2);
  }

  cell(context, table, row, column, step) {
    const x = LEFT + column * step, y = BARS + row * ROW, share = ratio(table.found[row][column], table.all[row][column]);
    const { fill, ink } = share === null ? { fill: colour("heat-none"), ink: colour("muted") } : heat(share);
    context.fillStyle = fill;
    context.fillRect(x + 1, y + 1, step - 2, ROW - 2);
    if (share !== null && step > 22) {
      context.fillStyle = ink;
      context.textAlign = "center";
      context.fillText(`${Math.round(share * 100)}`, x + step / 2, y + ROW / 2);
    }
    if (this.at && this.at.row === row && this.at.column === column) {
      context.strokeStyle = colour("text");
      context.lineWidth = 2;
      context.strokeRect(x + 1, y + 1, step - 2, ROW - 2);
    }
  }

  axis(context, table, step) {
    const y = BARS + table.names.length * ROW + AXIS / 2 + 1;
    context.fillStyle = colour("muted");
    context.textAlign = "left";
    const every = step < 38 ? 2 : 1;
    this.positions.forEach((edge, column) => {
      if (column % every === 0) context.fillText(short(edge), LEFT + column * step + 2, y);
    });
    context.fillText("from", 0, y);
  }

  point(event) {
    if (!this.table) return;
    const box = this.canvas.getBoundingClientRect();
    this.choose(Math.floor((event.clientY - box.top - BARS) / ROW), Math.floor((event.clientX - box.left - LEFT) / this.step));
  }

  move(event) {
    const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!by || !this.table) return;
    event.preventDefault();
    const at = this.at ?? { row: 0, column: -by[1] };
    const clamp = (value, most) => Math.min(Math.max(value, 0), most - 1);
    this.choose(clamp(at.row + by[0], this.table.names.length), clamp(at.column + by[1], this.positions.length));
  }

  choose(row, column) {
    if (row < 0 || column < 0 || row >= this.table.names.length || column >= this.positions.length) return;
    this.at = { row, column };
    this.draw();
  }

  tell() {
    const { row, column } = this.at, { names, found, all } = this.table, { positions } = this.heat;
    const to = column + 1 < positions.length ? ` to ${positions[column + 1] - 1}` : " on";
    const [some, of] = [found[row][column], all[row][column]];
    say(byId("heat-detail"), of
      ? `${names[row]}, tokens ${positions[column]}${to} of prompts: ${percent(some / of)} found, ${count(some)} of ${count(of)} tokens`
      : `${names[row]}, tokens ${positions[column]}${to} of prompts: none were asked for`);
  }

  legend() {
    const ramp = make("canvas", { width: "90", height: "10", "aria-hidden": "true", style: { width: "90px", height: "10px" } });
    const paint = () => {
      const context = ramp.getContext("2d");
      for (let x = 0; x < 90; x += 1) { context.fillStyle = heat(x / 89).fill; context.fillRect(x, 0, 1, 10); }
    };
    paint();
    onScheme(paint);
    byId("heat-legend").append(make("span", { class: "key" }, "0 %", ramp, "100 % found"),
      make("span", {}, "above: how many tokens stand behind a column"));
  }
}

function total(values) {
  return values.reduce((some, value) => some + value, 0);
}

function ratio(some, of) {
  return of ? some / of : null;
}

function short(edge) {
  return edge >= 1024 ? `${edge / 1024}k` : String(edge);
}
