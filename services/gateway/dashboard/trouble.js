// What was dropped and what went wrong: the counters that are not 0, in words.

// [pattern, words ($1 = the group), is it a fault?]; a drop is the stack keeping a bound, a fault is something broken.
const WORDS = [
  [/^backup_dropped_no_host_page$/, "pages not backed up: host memory had no room", false],
  [/^backup_dropped_(\w+)$/, "pages not backed up: $1", false],
  [/^archive_dropped_pages$/, "pages not archived: the queue was full", false],
  [/^prefetch_dropped_no_(\w+)$/, "pages not prefetched: no $1", false],
  [/^prefetch_timed_out$/, "prefetches ended by their time limit", false],
  [/^prefetch_corrupt_pages$/, "pages from L3 with a wrong checksum", true],
  [/^rejected_(\d+)$/, "requests refused with $1", false],
  [/^abort_(\w+)$/, "requests aborted while $1", false],
  [/^retracted$/, "requests retracted for want of pages", false],
  [/^late_answers$/, "answers that came too late", false],
  [/^peers_lost$/, "processes that fell silent", true],
  [/^peers_exited$/, "processes that ended", true],
  [/^load_failed_(\w+)$/, "loads failed: $1", true],
  [/^step_failed_(\w+)$/, "steps failed: $1", true],
  [/^map_failed$/, "segments that could not be mapped", true],
  [/^segment_refused$/, "segments refused", true],
  [/^backup_failed$/, "backups failed", true],
  [/^load_back_failed$/, "load-backs failed", true],
  [/^(\w+)_failed$/, "$1 failed", true],
  [/^dropped_(\w+)$/, "messages dropped: $1", false],
  [/^checksum_failed$/, "host pages with a wrong checksum", true],
  [/^l3_corrupt$/, "L3 files with a wrong checksum", true],
  [/^l3_quarantined$/, "L3 files moved to quarantine", true],
  [/^l3_dropped$/, "pages not archived: the queue was full", false],
  [/^l3_detached$/, "times that L3 was given a rest", true],
  [/^l3_failures$/, "calls of L3 that failed", true],
  [/^l3_timed_out$/, "calls of L3 that took too long", true],
  [/^l3_refused$/, "calls of L3 not made while it rests", false],
  [/^l3_bad_answers$/, "answers of L3 that made no sense", true],
];

/** [{key, where, words, value, fault}], faults first. */
export function troubles(status) {
  const found = [];
  const look = (where, values) => {
    for (const [name, value] of Object.entries(values ?? {})) {
      const rule = value > 0 && WORDS.find(([pattern]) => pattern.test(name));
      if (!rule) continue;
      const words = name.replace(rule[0], rule[1]).replaceAll("_", " ");
      found.push({ key: `${where}/${name}`, where, words, value, fault: rule[2] });
    }
  };
  look("scheduler", status.counters);
  const { epoch, uptime_s, ...dropped } = status.scheduler ?? {};
  look("scheduler", Object.fromEntries(Object.entries(dropped).map(([name, value]) => [`dropped_${name}`, value])));
  for (const peer of status.peers ?? []) look(peer.identity, peer.stats);
  return found.sort((a, b) => Number(b.fault) - Number(a.fault) || a.words.localeCompare(b.words));
}

/** Remembers the last status and says what has happened since. */
export class Watcher {
  #peers = null;
  #scheduler = null;
  #counts = new Map();

  /** [text, level] of everything that is new in `status`. */
  changes(status) {
    const news = [];
    const peers = new Map(listed(status).map((peer) => [peer.identity, peer]));
    if (this.#peers) {
      if (this.#scheduler !== status.scheduler?.epoch) news.push(["scheduler started anew: its tree is empty", "bad"]);
      for (const [id, peer] of peers) {
        const before = this.#peers.get(id);
        if (!before) news.push([`${id} has come`, "good"]);
        else if (before.epoch !== peer.epoch) news.push([`${id} started anew`, "bad"]);
        else if (before.up && !peer.up) news.push([`${id} fell silent`, "bad"]);
        else if (!before.up && peer.up) news.push([`${id} is back`, "good"]);
      }
      for (const id of this.#peers.keys()) if (!peers.has(id)) news.push([`${id} has gone`, "bad"]);
    }
    for (const { key, words, value, fault, where } of troubles(status)) {
      const more = value - (this.#counts.get(key) ?? 0);
      if (this.#peers && fault && more > 0 && !/^processes/.test(words)) news.push([`${where}: ${more} ${words}`, "bad"]);
      this.#counts.set(key, value);
    }
    this.#peers = peers;
    this.#scheduler = status.scheduler?.epoch;
    return news;
  }
}

/** The processes to show: without the command line's, which come and go. */
export const listed = (status) => (status.peers ?? []).filter((peer) => !peer.identity.startsWith("cli-"));
