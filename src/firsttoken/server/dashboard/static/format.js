// Numbers and elements, as the page writes them.

export const CLASSES = ["p0", "p1", "p2"];

const plain = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 0 });

/** A number in few characters: 3 significant digits, thousands separated; a dash for none. */
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 100 || Number.isInteger(value)) return plain.format(value);
  return value.toFixed(size >= 10 ? 1 : size >= 0.1 ? 2 : 3);
}

/** A large count: 12.3 k, 4.1 M. */
export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  return value >= 1e5 ? `${(value / 1e3).toFixed(0)} k` : plain.format(value);
}

/** "1 token", "2 tokens". */
export function counted(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** Milliseconds with their unit. */
export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms >= 60000) return `${(ms / 60000).toFixed(1)} min`;
  if (ms >= 10000) return `${(ms / 1000).toFixed(1)} s`;
  return ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${number(ms)} ms`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
  return `${at && value < 100 ? value.toFixed(1) : plain.format(value)} ${units[at]}`;
}

export function percent(ratio) {
  return ratio === null || ratio === undefined ? "–" : `${(ratio * 100).toFixed(ratio > 0 && ratio < 0.1 ? 1 : 0)} %`;
}

export const byId = (id) => document.getElementById(id);

/** Set an element's text, but only when it differs: a layout saved. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** An element with text and attributes; `class` and `style` as any other. No markup is ever parsed. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Rows of names and values. */
export function facts(pairs) {
  return make("dl", { class: "facts" }, ...pairs.map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))));
}

/** One entry of a legend: a line, a "dash", or a "block" of a colour named in the style sheet. */
export function key(colour, text, shape = "") {
  return make("span", { class: "key" }, make("i", { class: shape, style: { color: `var(--${colour})` } }), make("span", {}, text));
}

/** A group of buttons of which one is pressed; `chosen` is told the value of `data-NAME`. */
export function choice(group, name, chosen) {
  group.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    for (const one of group.querySelectorAll("button")) one.setAttribute("aria-pressed", String(one === button));
    chosen(button.dataset[name]);
  });
}
