// The chat box: streams an answer and shows which tier had which of its prompt's tokens, and why the rest was computed.

import { byId, count, decimal, element, plural } from "./dom.js";
import { headers } from "./feed.js";
import { why } from "./why.js";

const PARTS = ["device", "host", "storage", "computed"];

const NEAR_PX = 40; // a reader who has scrolled further up isn't taken back down

export class Chat {
  atEnd = true;
  #messages = []; // what the model is sent
  #stopper = null;
  #model = "";

  constructor(keyWanted) {
    this.keyWanted = keyWanted;
    this.log = byId("chat-log");
    this.text = byId("chat-text");
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("chat-form").requestSubmit();
    });
    this.log.addEventListener("scroll", () => {
      this.atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR_PX;
    });
    new ResizeObserver(() => this.#follow()).observe(this.log);
    byId("chat-stop").addEventListener("click", () => this.#stopper?.abort());
    byId("chat-new").addEventListener("click", () => {
      this.#stopper?.abort();
      this.#messages = [];
      this.log.replaceChildren();
      this.text.focus();
    });
  }

  use(model) {
    this.#model = model;
  }

  async #send() {
    const question = this.text.value.trim();
    if (!question || this.#stopper || !this.#model) return;
    this.log.querySelector(".empty")?.remove();
    const asked = element("p", { class: "said user" }, question);
    const answer = element("p", { class: "said model waiting" });
    this.log.append(asked, answer);
    this.atEnd = true;
    this.text.value = "";
    this.#busy(new AbortController());
    const history = this.#messages;
    const messages = [...history, { role: "user", content: question }];
    try {
      const result = await this.#stream(messages, (text) => {
        answer.classList.remove("waiting");
        answer.append(text);
        this.#follow();
      });
      // "New chat" may have come meanwhile.
      if (this.#messages === history) this.#messages = [...messages, { role: "assistant", content: answer.textContent }];
      answer.after(origin(result));
    } catch (error) {
      const stopped = error.name === "AbortError";
      if (!answer.textContent) answer.remove();
      this.log.append(element("p", { class: "small " + (stopped ? "quiet" : "bad") }, stopped ? "Stopped." : error.message));
      if (!stopped && !this.text.value) this.text.value = question;
    } finally {
      answer.classList.remove("waiting");
      this.#busy(null);
      this.#follow();
    }
  }

  async #stream(messages, show) {
    const started = performance.now();
    const body = {
      model: this.#model, messages, stream: true, stream_options: { include_usage: true }, kvtide_explain: true,
      max_tokens: Math.max(1, Number(byId("chat-max").value) || 200),
    };
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: { "content-type": "application/json", ...headers() }, body: JSON.stringify(body), signal: this.#stopper.signal,
    }).catch((error) => {
      throw error.name === "AbortError" ? error : new Error("The gateway does not answer: send it again in a moment.");
    });
    if (response.status === 401) this.keyWanted();
    if (!response.ok) throw new Error((await response.json().catch(() => null))?.error?.message ?? `HTTP ${response.status}`);
    const result = { usage: null, explanation: null, firstMs: 0, seconds: 0 };
    let complete = false;
    for await (const data of events(response.body)) {
      if (data === "[DONE]") {
        complete = true;
        break;
      }
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      result.usage = event.usage ?? result.usage;
      result.explanation = event.kvtide?.explanation?.[0] ?? result.explanation;
      const text = event.choices?.[0]?.delta?.content;
      if (text) {
        result.firstMs ||= performance.now() - started;
        show(text);
      }
    }
    if (!complete) throw new Error("The answer broke off: send it again.");
    result.seconds = (performance.now() - started - result.firstMs) / 1000;
    return result;
  }

  #busy(stopper) {
    this.#stopper = stopper;
    byId("chat-stop").hidden = !stopper;
    byId("chat-send").disabled = Boolean(stopper);
    this.log.setAttribute("aria-busy", String(Boolean(stopper)));
  }

  #follow() {
    if (this.atEnd) this.log.scrollTop = this.log.scrollHeight;
  }
}

/** The data of each server-sent event. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const blocks = held.split("\n\n");
    held = blocks.pop();
    for (const block of blocks) if (block.startsWith("data: ")) yield block.slice(6);
  }
}

/** A bar of the prompt's tokens by tier, and the words for it. */
function origin({ usage, explanation, firstMs, seconds }) {
  const box = element("div", { class: "origin small" });
  if (!usage) return box;
  const details = usage.prompt_tokens_details;
  const parts = { device: details?.device_tokens ?? 0, host: details?.host_tokens ?? 0, storage: details?.storage_tokens ?? 0 };
  parts.computed = usage.prompt_tokens - parts.device - parts.host - parts.storage;
  const words = PARTS.filter((part) => parts[part] > 0).map((part) => `${count(parts[part])} ${part === "computed" ? "computed" : `from ${part}`}`);
  const bar = element("div", { class: "bar", "aria-hidden": "true" });
  for (const part of PARTS) {
    const piece = element("i", { class: part });
    piece.style.width = `${(100 * parts[part]) / usage.prompt_tokens}%`;
    bar.append(piece);
  }
  const list = element("span");
  list.textContent = details ? `Prompt of ${plural(usage.prompt_tokens, "token")}: ${words.join(", ")}.` : "The scheduler could not say which tier had the prompt.";
  const speed = usage.completion_tokens > 1 && seconds > 0 ? `, then ${decimal((usage.completion_tokens - 1) / seconds)} tokens/s` : "";
  box.append(bar, list, element("span", { class: "quiet" }, ` First token after ${count(firstMs)} ms${speed}.`), why(explanation));
  return box;
}
