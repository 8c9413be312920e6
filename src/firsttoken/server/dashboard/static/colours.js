// The style sheet's colours for canvases, which cannot read variables; they change with the reader's scheme.

const dark = matchMedia("(prefers-color-scheme: dark)");
const listeners = [];
let known = new Map();

dark.addEventListener("change", () => {
  known = new Map();
  for (const listener of listeners) listener();
});

export function colour(name) {
  let value = known.get(name);
  if (value === undefined) {
    value = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
    known.set(name, value);
  }
  return value;
}

export function onScheme(listener) {
  listeners.push(listener);
}

function channels(name) {
  const hex = colour(name).replace("#", "");
  const full = hex.length === 3 ? [...hex].map((digit) => digit + digit).join("") : hex;
  return [0, 2, 4].map((at) => parseInt(full.slice(at, at + 2), 16));
}

/** The heat map's colour of a ratio, 0 to 1, and a colour that can be read on it. */
export function heat(ratio) {
  const from = channels("heat-0"), to = channels("heat-1");
  const mixed = from.map((low, at) => Math.round(low + (to[at] - low) * ratio));
  const bright = mixed[0] * 0.299 + mixed[1] * 0.587 + mixed[2] * 0.114 > 115;
  return { fill: `rgb(${mixed.join(" ")})`, ink: colour(bright ? "heat-dark" : "heat-light") };
}

/** A canvas of the size that its style gives it, at the screen's own resolution; null while it is not shown. */
export function surface(canvas, height) {
  const width = canvas.clientWidth, ratio = devicePixelRatio || 1;
  if (!width) return null;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

export const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
