// The latest requests that have ended, newest first.

import { byId, count, duration, make } from "./format.js";

const SHOWN = 25;

export class Requests {
  constructor(open) {
    this.body = byId("requests").tBodies[0];
    this.body.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) open(button.dataset.id);
    });
  }

  show(frame) {
    if (frame.engine !== undefined) this.body.replaceChildren(); // a new connection tells the latest again
    for (const one of frame.requests.slice(-SHOWN)) this.body.prepend(row(one));
    while (this.body.rows.length > SHOWN) this.body.rows[this.body.rows.length - 1].remove();
    byId("requests-empty").hidden = this.body.rows.length > 0;
  }
}

function row(one) {
  const name = make("button", { type: "button", "data-id": one.id, title: `${one.route} at ${new Date(one.unix_ms).toLocaleTimeString()}` }, one.id);
  const swatch = one.service_class ? [make("i", { class: "swatch", style: { background: `var(--${one.service_class})` } })] : [];
  const number = (text) => make("td", {}, text);
  return make("tr", {}, make("td", {}, name), make("td", {}, ...swatch, one.service_class || "–"), number(count(one.prompt_tokens)),
    number(count(one.output_tokens)), number(duration(one.ttft_ms)), number(duration(one.total_ms)),
    make("td", { class: `outcome-${one.outcome}` }, ending(one)));
}

function ending(one) {
  if (one.outcome === "finished") return one.finish_reason ?? "finished";
  const why = one.error || (one.status >= 400 ? String(one.status) : "");
  return why ? `${one.outcome}: ${why}` : one.outcome;
}
