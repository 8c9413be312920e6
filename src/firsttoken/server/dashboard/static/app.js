// The page: reads the feed and hands each frame to the panels.

import { Feed } from "./feed.js";
import { byId, count, duration, number, percent, say } from "./format.js";
import { Heat } from "./heat.js";
import { Latency } from "./latency.js";
import { Requests } from "./requests.js";
import { Strip } from "./strip.js";
import { Tiers } from "./kv.js";
import { openWaterfall } from "./waterfall.js";

const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
const asked = Number(new URLSearchParams(location.search).get("hz"));
const hz = asked >= 0.1 && asked <= 10 ? asked : calm ? 1 : 10;

const panels = { latency: new Latency(), heat: new Heat(), tiers: new Tiers(), strip: new Strip(), requests: new Requests(openWaterfall) };
// How requests end that got no answer, through no doing of their callers.
const LOST = ["failed", "expired", "refused"];
let slots = null;
let countdown = 0;

const feed = new Feed(hz, {
  frame(frame) {
    clearInterval(countdown);
    document.body.classList.remove("waiting", "stale");
    if (frame.engine) { engine(frame.engine); panels.heat.context = frame.engine.max_model_len; }
    health(frame);
    panels.latency.show(frame);
    panels.strip.show(frame);
    tiles(frame);
    panels.requests.show(frame);
    if (frame.kv) { panels.heat.show(frame.kv, frame.now_ms); panels.tiers.show(frame.kv); }
    say(byId("clock"), `${new Date(frame.unix_ms).toLocaleTimeString()}, the server's time`);
  },
  lost(why, waitMs) {
    document.body.classList.add("stale");
    pill("lost", "not connected");
    const until = performance.now() + waitMs;
    const tell = () => banner(`The connection is lost: ${why.replace(/\.$/, "")}. Trying again ${wait(until)}.`, "warn", true);
    clearInterval(countdown);
    countdown = setInterval(tell, 1000);
    tell();
  },
  key(wrong) {
    pill("lost", "no key");
    document.body.classList.add("stale");
    say(byId("key-why"), wrong ? "The server does not know this key. Try another one." : "This server asks for a key. It is kept in this tab only.");
    if (!byId("key").open) byId("key").showModal();
    byId("key-input").select();
  },
});

function wait(until) {
  const seconds = Math.ceil((until - performance.now()) / 1000);
  return seconds > 0 ? `in ${seconds} s` : "now";
}

function engine(told) {
  slots = told.max_num_seqs;
  say(byId("engine"), `${told.model} · ${told.device} · ${told.dtype}${told.quantization === "none" ? "" : `, ${told.quantization}`} · context ${count(told.max_model_len)} · version ${told.version}`);
  document.title = `firsttoken · ${told.model}`;
}

const HEALTH = {
  dead: ["bad", (frame) => `The engine is dead${frame.error ? `: ${frame.error}` : ""}. The server must be started again; what is shown is its last.`],
  restarting: ["bad", (frame) => `The engine is being started again${frame.error ? `: ${frame.error}` : ""}. What is shown is its last.`],
  stuck: ["bad", (frame) => `The engine is stuck: no step has ended for ${duration(frame.step_age_ms ?? frame.heartbeat_age_ms)}.`],
  draining: ["warn", () => "The server is draining: it finishes what runs and takes nothing new."],
};

function health(frame) {
  pill(frame.state, frame.state);
  document.body.classList.toggle("stale", frame.state === "dead" || frame.state === "restarting");
  const [kind, text] = HEALTH[frame.state] ?? [];
  if (kind) banner(text(frame), kind, false);
  else byId("banner").hidden = true;
}

function pill(state, text) {
  byId("state").dataset.state = state;
  say(byId("state"), text);
}

function banner(text, kind, retry) {
  const box = byId("banner");
  box.className = kind;
  box.hidden = false;
  say(byId("banner-text"), text);
  byId("banner-retry").hidden = !retry;
}

function tiles(frame) {
  const { rates, kv_blocks: kv } = frame;
  say(byId("now-requests"), number(rates.requests_per_s));
  say(byId("now-tokens"), number(rates.output_tokens_per_s));
  say(byId("now-running"), number(frame.running));
  say(byId("now-slots"), slots === null ? "" : `of ${slots}`);
  say(byId("now-waiting"), number(frame.waiting));
  say(byId("now-steps"), number(rates.steps_per_s));
  say(byId("now-batch"), number(rates.tokens_per_step));
  say(byId("now-errors"), number(LOST.reduce((sum, how) => sum + (frame.outcomes[how] ?? 0), 0)));
  say(byId("now-kv"), kv.total ? percent(kv.used / kv.total) : "–");
}

byId("banner-retry").addEventListener("click", () => { clearInterval(countdown); feed.start(); });
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  byId("key").close();
  feed.use(byId("key-input").value.trim());
});
byId("waterfall").addEventListener("click", (event) => { if (event.target === event.currentTarget) event.currentTarget.close(); });
feed.start();
