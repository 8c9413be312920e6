// What each tier of the KV cache holds, and what it did.

import { byId, bytes, count, duration, facts, key, make, percent, CLASSES } from "./format.js";

const REASONS = {
  never_seen: "not seen before", evicted: "evicted", diverged: "went on differently", all_positions: "all of it wanted",
};

export class Tiers {
  constructor() {
    this.holder = byId("kv");
    this.shown = "";
  }

  show(kv) {
    if (!kv) return;
    const text = JSON.stringify(kv);
    if (text === this.shown) return; // nothing is built anew for the same numbers
    this.shown = text;
    const parts = [device(kv)];
    if (kv.restores) parts.push(host(kv));
    if (kv.disk) parts.push(disk(kv));
    if (kv.restores) parts.push(restores(kv));
    if (kv.misses) parts.push(misses(kv));
    this.holder.replaceChildren(...parts);
  }
}

function tier(name, size, shares, ...rest) {
  const bar = make("div", { class: "bar", role: "img", "aria-label": `${name}: ${size}` },
    ...shares.map(([colour, share]) => make("i", { style: { width: `${share * 100}%`, background: `var(--${colour})` } })));
  return make("div", { class: "tier" }, make("h3", {}, name, make("span", {}, size)), bar, ...rest);
}

function hits(kv, name) {
  if (!kv.hits) return "–";
  let asked = 0, found = 0;
  for (const cls of CLASSES) { asked += kv.hits[cls][name]?.asked ?? 0; found += kv.hits[cls][name]?.found ?? 0; }
  return asked ? `${percent(found / asked)} of ${count(asked)} tokens` : "–";
}

function device(kv) {
  const { total, used, cached, free } = kv.blocks;
  const part = (blocks) => (total ? blocks / total : 0);
  const legend = make("div", { class: "legend" }, key("used", `in use ${count(used)}`, "block"), key("cached", `cached ${count(cached)}`, "block"), key("free", `free ${count(free)}`, "block"));
  return tier("Device", `${count(total)} blocks, ${bytes(total * kv.bytes_per_block)}`, [["used", part(used)], ["cached", part(cached)]], legend,
    facts([["found here", hits(kv, "device")], ["evicted blocks", count(kv.evictions?.blocks ?? 0)], ["kept by hints", `${count(kv.hints?.kept_blocks ?? 0)} blocks`]]));
}

function host(kv) {
  const { host_blocks: used, host_capacity: most } = kv.restores;
  return tier("Host memory", `${bytes(used * kv.bytes_per_block)} of ${bytes(most * kv.bytes_per_block)}`, [["cached", most ? used / most : 0]],
    facts([["found here", hits(kv, "host")], ["evicted blocks", count(kv.restores.host_evicted_blocks)], ["restored", `${count(kv.restores.host_tokens)} tokens`]]));
}

function disk(kv) {
  const { nbytes, cap_bytes: most, files, read_gb_s: read, write_gb_s: write } = kv.disk;
  const rate = (value) => (value === null ? "–" : `${value.toFixed(2)} GB/s`);
  return tier("Files", `${bytes(nbytes)} of ${bytes(most)}, ${count(files)} files`, [["cached", most ? nbytes / most : 0]],
    facts([["found here", hits(kv, "disk")], ["read / written at", `${rate(read)} / ${rate(write)}`], ["restored", `${count(kv.restores.disk_tokens)} tokens`]]));
}

function restores(kv) {
  const told = kv.restores;
  const mean = (seconds, times) => (times ? duration((seconds / times) * 1e3) : "–");
  const pairs = [["restores", count(told.restores)], ["given up", count(told.cancelled)]];
  pairs.push(["mean wait, host memory", mean(told.restore_s - told.disk_restore_s, told.restores - told.cancelled - told.disk_restores)]);
  if (kv.disk) pairs.push(["mean wait, with files", mean(told.disk_restore_s, told.disk_restores)]);
  pairs.push(["computed instead", `${count(told.declined_tokens)} tokens`]);
  return make("div", { class: "tier" }, make("h3", {}, "Restores"), facts(pairs));
}

function misses(kv) {
  return make("div", { class: "tier" }, make("h3", {}, "Why prompts were not found to their end"),
    facts(Object.entries(kv.misses).map(([reason, times]) => [REASONS[reason] ?? reason, count(times)])));
}
