// Puts the page together: what the feed hears is shown, what a person does is sent.

import { Chart, tokens } from "./chart.js";
import { Chat } from "./chat.js";
import { byId, count, decimal, duration, element, keyed, percent, plural, bytes, say } from "./dom.js";
import { Feed, History, forgetKey, hasKey, headers } from "./feed.js";
import { showPrefixes } from "./prefixes.js";
import { showTiers } from "./tiers.js";
import { Watcher, listed, troubles } from "./trouble.js";

const EVENTS = 30;
const WAITING = ["queued", "lookup", "prefetching", "ready", "retracted"];

const history = new History();
const watcher = new Watcher();
const chart = new Chart(byId("chart"), byId("chart-note"));
const chat = new Chat(() => askKey(true));
let heardAt = 0;
let lostTo = ""; // "scheduler" or "gateway" while it doesn't answer
let model = "";

const feed = new Feed({
  heard(status) {
    if (lostTo) note(`the ${lostTo} answers again`, "good");
    lostTo = "";
    heardAt = performance.now();
    byId("key-form").hidden = true;
    byId("forget").hidden = !hasKey();
    document.body.classList.remove("stale");
    history.add(status);
    for (const [text, level] of watcher.changes(status)) note(text, level);
    show(status);
    if (!model) nameModel();
  },
  lost(who, text) {
    if (lostTo !== who) note(`the ${who} does not answer`, "bad");
    lostTo = who;
    document.body.classList.add("stale");
    state("bad", `${who} gone`);
    const since = heardAt ? " The numbers below are the last that were heard." : "";
    notices([["bad", text[0].toUpperCase() + text.slice(1) + (/[.!]$/.test(text) ? "" : ".") + since]]);
  },
  keyWanted: (wrong) => askKey(wrong),
});

function askKey(wrong) {
  forgetKey();
  document.body.classList.add("stale");
  byId("forget").hidden = true;
  byId("key-form").hidden = false;
  byId("key").focus();
  say(byId("key-wrong"), wrong ? "This key is not one of the gateway's." : "");
  state("wait", "key wanted");
  notices([]);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  feed.useKey(byId("key").value);
  byId("key").value = "";
});
byId("forget").addEventListener("click", () => askKey(false));

async function nameModel() {
  const response = await fetch("v1/models", { headers: headers() }).catch(() => null);
  const card = response?.ok ? (await response.json()).data[0] : null;
  if (!card) return;
  model = card.id;
  chat.use(model);
  say(byId("model"), `${card.id}, context ${count(card.max_model_len)}`);
  byId("chat-max").max = card.max_model_len;
}

function state(level, text) {
  byId("state").dataset.state = level;
  say(byId("state"), text);
}

/** [level, text] pairs above everything else; unchanged ones aren't announced again. */
function notices(list) {
  keyed(byId("notices"), list, ([, text]) => text, (text) => element("p", { class: "notice" }, text), (node, [level]) => {
    node.dataset.level = level;
  });
}

function show(status) {
  const silent = listed(status).filter((peer) => !peer.up);
  const list = silent.map((peer) => ["bad", `${peer.identity} is silent. ${meaning(peer.role)}`]);
  if (status.integrity !== "ok") list.push(["bad", `The integrity check failed: ${status.integrity}. Please report it.`]);
  if (!status.ready && !silent.length) list.push(["warn", missing(status)]);
  notices(list);
  if (!status.ready) state("warn", "not ready");
  else state(list.length ? "warn" : "good", list.length ? "degraded" : "ready");
  tiles(status);
  showTiers(byId("tiers"), history);
  chart.show(history);
  showPrefixes(status);
  processes(status);
  trouble(status);
}

function missing(status) {
  const roles = listed(status).filter((peer) => peer.up).map((peer) => peer.role);
  const none = ["worker", "storage"].filter((role) => !roles.includes(role));
  return none.length ? `Not ready: no ${none.join(" and no ")} is up.` : "Not ready: the scheduler waits for its peers' pools.";
}

function meaning(role) {
  if (role === "storage") return "Its host pages and L3 can't be used: what the device lacks is computed anew, answers stay right.";
  return role === "worker" ? "Requests wait until it is back." : "";
}

function tiles(status) {
  const requests = status.requests ?? {};
  const all = tokens(history, -Infinity);
  const waiting = WAITING.reduce((sum, name) => sum + (requests[name] ?? 0), 0);
  const inStates = WAITING.filter((name) => requests[name]).map((name) => `${count(requests[name])} ${name}`);
  const draining = requests.draining ? `${count(requests.draining)} ending` : "";
  const best = status.regret;
  const shown = [
    ["Cache hit rate", all.total ? percent(all.hits / all.total) : "–", all.total ? `of ${count(all.total)} prompt tokens` : "no prompt yet"],
    ["Of the best possible", best?.optimal_hit_rate ? percent(best.hit_rate / best.optimal_hit_rate) : "–", best ? `${percent(best.hit_rate)} of ${percent(best.optimal_hit_rate)}, last ${plural(best.requests, "request")}` : "not known yet"],
    ["Running", count(requests.running), draining],
    ["Waiting", count(waiting), inStates.join(", ")],
    ["Computed tokens/s", decimal(history.rate((sample) => sample.stat("prompt_tokens") + sample.stat("decode_tokens"))), "prompts and answers"],
    ["Answer tokens/s", decimal(history.rate((sample) => sample.counter("output_tokens"), 30)), "of answers that ended"],
  ];
  keyed(byId("tiles"), shown, ([name]) => name, (name) => element("div", {}, element("dt", {}, name), element("dd", { class: "big" }), element("dd", { class: "small quiet" })), (node, [, value, more]) => {
    say(node.children[1], value);
    say(node.children[2], more);
  });
}

function processes(status) {
  const scheduler = status.scheduler ?? {};
  const now = scheduler.epoch / 1e6 + 1000 * scheduler.uptime_s; // the scheduler's clock: an epoch is ns since 1970
  const self = { identity: "scheduler", role: "scheduler", up: true, epoch: scheduler.epoch, stats: {} };
  keyed(byId("processes").tBodies[0], [self, ...listed(status)], (peer) => peer.identity, () => element("tr", {}, element("th", { scope: "row" }), element("td", {}, element("span", { class: "dot" })), element("td", { class: "quiet" })), (row, peer) => {
    say(row.children[0], peer.identity);
    const dot = row.children[1].firstChild;
    dot.dataset.level = peer.up ? "good" : "bad";
    say(dot, peer.up ? `up ${duration((now - peer.epoch / 1e6) / 1000)}` : `silent for ${duration(peer.silent_s)}`);
    say(row.children[2], did(peer, status));
  });
}

function did({ role, stats = {} }, status) {
  if (role === "scheduler") return `${plural(status.counters?.requests ?? 0, "request")}, ${plural(status.tree?.nodes ?? 0, "node")} in the tree`;
  if (role === "gateway") return plural(stats.open ?? 0, "open request");
  if (role === "worker") return `${plural(stats.steps ?? 0, "step")}, ${plural((stats.prompt_tokens ?? 0) + (stats.decode_tokens ?? 0), "token")} computed`;
  const l3 = "l3_attached" in stats ? (stats.l3_attached ? `L3 ${plural(stats.l3_files ?? 0, "page")}` : "L3 held off") : "no L3";
  return `host pool ${bytes(stats.host_bytes ?? 0)}, ${l3}`;
}

function trouble(status) {
  const found = troubles(status);
  byId("trouble").hidden = !found.length;
  say(byId("trouble-none"), found.length ? "" : "None.");
  keyed(byId("trouble").tBodies[0], found, (each) => each.key, () => element("tr", {}, element("td", {}, element("span", { class: "dot" })), element("td", { class: "number" }), element("td", { class: "quiet" })), (row, each) => {
    const dot = row.children[0].firstChild;
    dot.dataset.level = each.fault ? "bad" : "warn";
    say(dot, each.words);
    say(row.children[1], count(each.value));
    say(row.children[2], each.where);
  });
}

/** A line of the list of what happened, newest first. */
function note(text, level) {
  const list = byId("events");
  list.querySelector("li:not([data-level])")?.remove();
  const time = new Date().toLocaleTimeString("en-GB");
  list.prepend(element("li", { "data-level": level }, element("time", { class: "quiet" }, time), ` ${text}`));
  while (list.children.length > EVENTS) list.lastChild.remove();
}

setInterval(() => {
  const age = heardAt ? (performance.now() - heardAt) / 1000 : 0;
  say(byId("age"), age > 3 ? `heard ${duration(age)} ago` : "");
}, 1000);

feed.now();
