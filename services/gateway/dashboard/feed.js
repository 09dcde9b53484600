// Asks the gateway for the scheduler's status again and again, keeps five minutes of it, and knows the API key.

const POLL_MS = 1000;
const SLOWEST_MS = 15000; // between two tries while nothing answers
const TIMEOUT_MS = 8000; // the gateway itself gives a scheduler two seconds
export const HISTORY_S = 300;
const KEY = "kvtide-api-key";

export const headers = () => {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
};
export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const forgetKey = () => sessionStorage.removeItem(KEY);

/** One sample: when (ms of this browser), the status, and the peers' numbers by identity. */
class Sample {
  constructor(status) {
    this.at = performance.now();
    this.status = status;
    this.stats = new Map((status.peers ?? []).map((peer) => [peer.identity, peer.stats ?? {}]));
  }

  counter(name) {
    return this.status.counters?.[name] ?? 0;
  }

  /** A number of the peers' heartbeats, summed over them or of one. */
  stat(name, identity) {
    let sum = 0;
    for (const [peer, stats] of this.stats) if (identity === undefined || peer === identity) sum += stats[name] ?? 0;
    return sum;
  }
}

/** The last five minutes. */
export class History {
  samples = [];

  add(status) {
    const sample = new Sample(status);
    this.samples.push(sample);
    while (sample.at - this.samples[0].at > HISTORY_S * 1000) this.samples.shift();
    return sample;
  }

  get last() {
    return this.samples.at(-1);
  }

  /** What a counter grew by between two moments (ms). After a restart it counts from 0 again. */
  grown(read, from, to = Infinity) {
    let sum = 0;
    for (let i = 1; i < this.samples.length; i += 1) {
      const at = this.samples[i].at;
      if (at <= from || at > to) continue;
      const [before, after] = [read(this.samples[i - 1]), read(this.samples[i])];
      sum += after >= before ? after - before : after;
    }
    return sum;
  }

  /** Per second, over the last `seconds`. */
  rate(read, seconds = 10) {
    if (this.samples.length < 2) return 0;
    const span = Math.min(seconds, (this.last.at - this.samples[0].at) / 1000);
    return span > 0 ? this.grown(read, this.last.at - seconds * 1000) / span : 0;
  }
}

/** Calls `heard(status)`, `lost(who, text)` with who "scheduler" or "gateway", and `keyWanted(wrong)`. */
export class Feed {
  #timer = 0;
  #delay = POLL_MS;
  #running = false;

  constructor(listener) {
    this.listener = listener;
    // A page that nobody sees asks nothing.
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) clearTimeout(this.#timer);
      else this.now();
    });
  }

  useKey(key) {
    sessionStorage.setItem(KEY, key);
    this.now();
  }

  /** Ask at once, and from then on every second. */
  now() {
    this.#delay = POLL_MS;
    clearTimeout(this.#timer);
    if (!this.#running) this.#ask();
  }

  async #ask() {
    this.#running = true;
    const again = await this.#once();
    this.#running = false;
    this.#delay = again === "heard" ? POLL_MS : Math.min(2 * this.#delay, SLOWEST_MS);
    if (again !== "stop" && !document.hidden) this.#timer = setTimeout(() => this.#ask(), this.#delay);
  }

  async #once() {
    let response;
    try {
      response = await fetch("status", { headers: headers(), cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
      if (response.ok) {
        this.listener.heard(await response.json());
        return "heard";
      }
    } catch (error) {
      if (response?.ok && !(error instanceof DOMException)) throw error; // a bug of this page, not of the network
      this.listener.lost("gateway", "The gateway does not answer: check that the stack runs (kvtide serve).");
      return "lost";
    }
    if (response.status === 401) {
      const wrong = hasKey();
      forgetKey();
      this.listener.keyWanted(wrong);
      return "stop";
    }
    const body = await response.json().catch(() => ({}));
    this.listener.lost("scheduler", body.error?.message ?? `/status answers ${response.status}`);
    return "lost";
  }
}
