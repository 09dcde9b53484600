// What the chat box says of a prompt: each part's tier, and why the tiers above it hadn't it.

import { count, element, plural } from "./dom.js";

/** A list to unfold, or nothing when the scheduler doesn't say. */
export function why(explanation) {
  if (!explanation) return "";
  const list = element("ul");
  for (const segment of explanation.segments) list.append(part(segment));
  const again = explanation.recomputed_tokens.any;
  if (again) list.append(element("li", { class: "quiet" }, `${plural(again, "token")} were computed that a tier had had before.`));
  return element("details", { class: "why" }, element("summary", {}, "Why"), list);
}

function part({ from_token: from, to_token: to, tier, missed }) {
  const where = tier === "computed" ? "computed" : `from ${tier}`;
  const item = element("li", { class: tier }, element("b", {}, `${count(from)}–${count(to)} ${where}`));
  const reasons = Object.entries(missed).map(([name, { text }]) => (name === "all" ? text : `${name}: ${text}`));
  if (reasons.length) item.append(element("span", { class: "quiet" }, ` ${reasons.join("; ")}`));
  return item;
}
