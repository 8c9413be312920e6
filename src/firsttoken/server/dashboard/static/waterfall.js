// Where one request's time went: GET /v1/requests/{id}.

import { address, headers, reason } from "./feed.js";
import { byId, count, duration, facts, key, make, percent } from "./format.js";

// The state that begins with each mark of a timeline, by the name of its stage in the account, and its colour.
const STATES = {
  received: ["parse", "run-queue"], parsed: ["template", "run-queue"], templated: ["tokenize", "run-queue"], tokenized: ["transport", "run-queue"],
  arrived: ["queue", "prefill"], restoring: ["kv", "p2"], scheduled: ["prefill", "mixed"], first_token: ["decode", "decode"],
  preempted: ["queue", "prefill"], finished: ["transport", "run-queue"], held: ["write", "run-queue"], delivered: ["detokenize", "run-queue"], detokenized: ["write", "run-queue"],
  failed: ["write", "gc"],
};
const ORDER = ["parse", "template", "tokenize", "transport", "queue", "kv", "prefill", "decode", "detokenize", "write"];
const MAX_TICKS = 400;
// What may take a gap's time, in words, and its colour.
const CAUSES = {
  prefill: ["another prompt's prefill", "prefill"], preemption: ["preempted", "p0"], gc: ["garbage collection", "gc"], run_queue: ["wait for a processor", "run-queue"],
  kv_copy: ["KV copies", "p2"], graph_miss: ["a step without a graph", "mixed"], batch: ["a larger batch", "p1"], host: ["between steps", "heat-1"],
  api: ["the API process", "warn"], write: ["the caller's reading", "muted"], unexplained: ["unexplained", "free"], decode: ["steps as usual", "decode"],
};

export async function openWaterfall(id) {
  const dialog = byId("waterfall"), body = byId("waterfall-body");
  byId("waterfall-title").textContent = id;
  body.replaceChildren(make("p", { class: "empty" }, "loading"));
  if (!dialog.open) dialog.showModal();
  try {
    const reply = await fetch(address(`v1/requests/${encodeURIComponent(id)}`), { headers: headers() });
    if (!reply.ok) throw new Error(await reason(reply));
    body.replaceChildren(...picture(await reply.json()));
  } catch (error) {
    body.replaceChildren(make("p", { class: "empty" }, error.message));
  }
}

function picture(one) {
  const timings = one.timings ?? {}, whole = timings.total_ms || 0.001;
  const parts = [
    facts([["class", one.service_class ?? "–"], ["route", one.route], ["ended", one.error ? `${one.outcome}: ${one.error}` : one.finish_reason ?? one.outcome],
      ["prompt", `${count(one.prompt_tokens)} tokens`], ["answer", `${count(one.output_tokens)} tokens`], ["first token", duration(one.ttft_ms)], ["total", duration(timings.total_ms)],
      ...(one.answers > 1 ? [["answers", `${one.answers}: the first token is that of any, stages and tokens below are of the one that ended last`]] : [])]),
    lanes(one, whole),
  ];
  if (timings.worst_gap) parts.push(worstGap(timings.worst_gap));
  parts.push(facts(details(timings)));
  return parts;
}

/** A lane for each state that was passed, with the stretches of it. */
function lanes(one, whole) {
  const timeline = one.timeline ?? [], stretches = new Map();
  timeline.forEach(([mark, from], at) => {
    const [name, tint] = STATES[mark] ?? [];
    const to = timeline[at + 1]?.[1];
    if (!name || to === undefined) return;
    if (!stretches.has(name)) stretches.set(name, []);
    stretches.get(name).push({ from, to, tint });
  });
  const end = Math.max(whole, timeline.length ? timeline[timeline.length - 1][1] : 0);
  const rows = [make("span", {}), make("div", { class: "axis" }, make("span", {}, "0"), make("span", {}, duration(end / 2)), make("span", {}, duration(end))), make("span", {})];
  for (const name of ORDER.filter((state) => stretches.has(state))) {
    const of = stretches.get(name), took = of.reduce((sum, { from, to }) => sum + to - from, 0);
    const lane = make("div", { class: "lane", role: "img", "aria-label": `${name}: ${duration(took)} of ${duration(end)}` },
      ...of.map(({ from, to, tint }) => make("i", { style: { left: `min(${(from / end) * 100}%, calc(100% - 2px))`, width: `${((to - from) / end) * 100}%`, background: `var(--${tint})` } })),
      ...(name === "decode" ? [...gapMark(one, end), ...ticks(one.token_ms ?? [], end)] : []));
    rows.push(make("span", {}, name), lane, make("span", { class: "ms" }, duration(took)));
  }
  return make("div", { class: "fall" }, ...rows);
}

/** When tokens arrived; of very many not all. */
function ticks(times, end) {
  const every = Math.max(1, Math.ceil(times.length / MAX_TICKS));
  return times.filter((_, at) => at % every === 0).map((ms) => make("i", { class: "token", style: { left: `${(ms / end) * 100}%` } }));
}

/** The largest gap, in words and as a bar of what took it. */
function worstGap(gap) {
  const spent = Object.entries(gap.parts_ms ?? {}).sort(([, one], [, other]) => other - one);
  const where = `before token ${gap.token + 1}${gap.step === null ? "" : `, step ${gap.step}`}`;
  return make("div", { class: "gap" },
    make("p", {}, make("b", {}, `Largest gap between tokens: ${duration(gap.ms)}`), ` ${where}. ${gap.detail ?? ""}`),
    make("div", { class: "bar", "aria-hidden": "true" }, ...spent.map(([cause, ms]) =>
      make("i", { style: { width: `${(ms / gap.ms) * 100}%`, background: `var(--${CAUSES[cause]?.[1] ?? "run-queue"})` } }))),
    make("div", { class: "legend" }, ...spent.map(([cause, ms]) => key(CAUSES[cause]?.[1] ?? "run-queue", `${CAUSES[cause]?.[0] ?? cause} ${duration(ms)}`, "block"))));
}

/** Where in the lane the largest gap lies. */
function gapMark(one, end) {
  const at = one.timings?.worst_gap?.token, from = one.token_ms?.[at - 1], to = one.token_ms?.[at];
  if (from === undefined || to === undefined) return [];
  return [make("i", { class: "worst", style: { left: `${(from / end) * 100}%`, width: `${((to - from) / end) * 100}%` } })];
}

function details(timings) {
  const pairs = [];
  const add = (name, value) => { if (value) pairs.push([name, value]); };
  for (const [why, ms] of Object.entries(timings.queue_reasons ?? {})) if (ms > 0) add(`queued for ${why}`, duration(ms));
  const cached = timings.cached_tokens;
  if (cached) add("found in KV", Object.entries(cached).map(([tier, tokens]) => `${count(tokens)} ${tier}`).join(", "));
  if (timings.miss) add("not found from", `${count(timings.miss.position)} on: ${String(timings.miss.reason).replaceAll("_", " ")}`);
  const gaps = timings.itl_ms;
  if (gaps?.p50 !== undefined) add("gaps p50 / p99 / max", `${duration(gaps.p50)} / ${duration(gaps.p99)} / ${duration(gaps.max)}`);
  if (timings.prefill_steps) add("steps", `${timings.prefill_steps} prefill, ${timings.decode_steps} decode`);
  if (timings.preemptions) add("preempted", `${timings.preemptions} times`);
  for (const [what, ms] of Object.entries(timings.overlapped_ms ?? {})) if (ms > 0) add(`beside it: ${what.replaceAll("_", " ")}`, duration(ms));
  if (timings.stop_ms) add("stop strings", duration(timings.stop_ms));
  if (timings.total_ms) add("without an owner", `${duration(timings.unaccounted_ms)} (${percent(timings.unaccounted_ms / timings.total_ms)})`);
  return pairs;
}
