// The three tiers, one above the other, and between them what flows.

import { bytes, count, element, keyed, percent, plural, say } from "./dom.js";

const FLOW_S = 10; // heartbeats come every second while there is work

/** The rows to draw, from the latest sample. */
function rows(history) {
  const { status, stats } = history.last;
  const up = new Map((status.peers ?? []).map((peer) => [peer.identity, peer.up]));
  const worker = (status.peers ?? []).find((peer) => peer.role === "worker");
  const storages = [...new Set([...Object.keys(status.host ?? {}), ...[...up.keys()].filter((id) => isStorage(status, id))])];
  const device = status.device ?? {};
  const made = [
    {
      key: "device", tier: "device", name: "L1 device", where: worker ? worker.identity : "no GPU worker",
      total: device.total, free: device.free, size: stats.get(worker?.identity)?.device_bytes, gone: !worker?.up,
      parts: [["in requests", device.requests, 1], ["cached, in use", device.protected, 0.78], ["cached", device.evictable, 0.55]],
      quarantined: device.quarantined, moving: device.in_flight,
    },
    flow("write_backup", "load_back", history, "write", "load"),
  ];
  if (!storages.length) made.push({ key: "host", tier: "host", name: "L2 host", where: "off, or no storage yet", parts: [], gone: true });
  for (const id of storages) {
    const pool = status.host?.[id] ?? {};
    made.push({
      key: `host-${id}`, tier: "host", name: "L2 host", where: id, total: pool.total, free: pool.free,
      size: stats.get(id)?.host_bytes, gone: up.get(id) !== true || !pool.usable, parts: [["cached", pool.cached, 0.78]],
      quarantined: pool.quarantined, moving: pool.in_flight,
    });
  }
  made.push(flow("archive", "prefetch", history, "l3_set", "l3_get"));
  for (const id of storages) {
    const l3 = stats.get(id) ?? {};
    if (!("l3_set_pages" in l3)) made.push({ key: `l3-${id}`, tier: "storage", name: "L3 storage", where: `${id}: off`, parts: [], gone: true });
    else made.push({
      key: `l3-${id}`, tier: "storage", name: "L3 storage", where: id, parts: [["stored", l3.l3_bytes, 0.78]],
      total: l3.l3_quota_bytes, free: (l3.l3_quota_bytes ?? 0) - (l3.l3_bytes ?? 0), inBytes: true, pages: l3.l3_files,
      gone: up.get(id) !== true || l3.l3_attached === 0, held: l3.l3_attached === 0,
    });
  }
  return made;
}

const isStorage = (status, id) => status.peers.some((peer) => peer.identity === id && peer.role === "storage");

function flow(down, up, history, downStat, upStat) {
  const way = (name, stat) => ({
    name,
    rate: history.rate((sample) => sample.stat(`${stat}_bytes`), FLOW_S),
    pages: history.last.stat(`${stat}_pages`),
  });
  return { key: `flow-${down}`, down: way(down, downStat), up: way(up, upStat) };
}

function make(key) {
  if (key.startsWith("flow-")) {
    const way = (arrow, kind) =>
      element("p", { class: `way ${kind}` }, element("b", { "aria-hidden": "true" }, arrow), element("span", { class: "name" }), element("span", { class: "rate" }), element("span", { class: "sum quiet" }));
    return element("div", { class: "flow" }, way("↓", "down"), way("↑", "up"));
  }
  return element(
    "div", { class: "tier" },
    element("div", { class: "tier-head" }, element("h3"), element("span", { class: "where quiet" }), element("span", { class: "amount" })),
    element("div", { class: "bar", role: "img" }),
    element("p", { class: "parts small quiet" }),
  );
}

function update(node, row) {
  if (row.down) {
    for (const kind of ["down", "up"]) {
      const way = node.querySelector(`.${kind}`);
      way.classList.toggle("live", row[kind].rate > 0);
      say(way.querySelector(".name"), row[kind].name);
      say(way.querySelector(".rate"), `${bytes(row[kind].rate)}/s`);
      say(way.querySelector(".sum"), plural(row[kind].pages, "page"));
    }
    return;
  }
  node.className = `tier ${row.tier}`;
  node.classList.toggle("gone", Boolean(row.gone));
  say(node.querySelector("h3"), row.name);
  say(node.querySelector(".where"), row.held ? `${row.where}: held off after failures` : row.where);
  const used = (row.total ?? 0) - (row.free ?? 0);
  const share = row.total ? used / row.total : 0;
  say(node.querySelector(".amount"), amount(row, used, share));
  const bar = node.querySelector(".bar");
  const segments = row.parts.map(([name, value, shade]) => ({ name, value: value ?? 0, shade }));
  if (row.quarantined) segments.push({ name: "quarantined", value: row.quarantined, shade: 0 });
  const rest = used - segments.reduce((sum, segment) => sum + segment.value, 0);
  if (rest > 0) segments.push({ name: "other", value: rest, shade: 0.3 });
  keyed(bar, segments, (segment) => segment.name, (name) => element("i", { class: name === "quarantined" ? "bad" : "" }), (child, segment) => {
    child.style.width = `${row.total ? (100 * segment.value) / row.total : 0}%`;
    child.style.opacity = segment.shade || 1;
  });
  const shown = segments.filter((segment) => segment.value > 0);
  const show = row.inBytes ? bytes : count;
  const words = shown.map((segment) => `${segment.name} ${show(segment.value)}`);
  if (row.total) words.push(`free ${show(row.free)}`);
  if (row.moving) words.push(`moving ${count(row.moving)}`);
  if (row.pages) words.push(plural(row.pages, "page"));
  say(node.querySelector(".parts"), words.join(" · "));
  bar.setAttribute("aria-label", `${row.name}, ${row.where}: ${row.total ? percent(share) : "nothing"} in use`);
}

function amount(row, used, share) {
  if (!row.total) return row.gone ? "" : `${plural(row.pages ?? 0, "page")}`;
  if (row.inBytes) return `${percent(share)} · ${bytes(used)} of ${bytes(row.total)}`;
  const size = row.size ? ` · ${bytes(share * row.size)} of ${bytes(row.size)}` : "";
  return `${percent(share)} · ${count(used)} of ${count(row.total)} pages${size}`;
}

export function showTiers(box, history) {
  keyed(box, rows(history), (row) => row.key, make, update);
}
