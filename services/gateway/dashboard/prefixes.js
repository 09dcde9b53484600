// The tree's top prefixes, each as a bar of its parts in the colour of the fastest tier that has them.

import { byId, count, element, keyed, say } from "./dom.js";

export function showPrefixes(status) {
  const prefixes = status.prefixes ?? [];
  byId("prefixes").hidden = !prefixes.length;
  say(byId("prefixes-none"), prefixes.length ? "By tokens saved. The name is the beginning of the last page's digest." : "The tree is empty.");
  keyed(byId("prefixes").tBodies[0], prefixes, (each) => each.digest, make, update);
}

function make(digest) {
  const where = element("td", {}, element("div", { class: "bar", "aria-hidden": "true" }), element("span", { class: "small quiet" }));
  return element("tr", {}, element("th", { scope: "row", class: "digest" }, digest.slice(0, 8)), element("td", { class: "number" }), element("td", { class: "number" }), where);
}

function update(row, prefix) {
  say(row.children[1], count(prefix.tokens));
  say(row.children[2], count(prefix.uses));
  const [bar, words] = row.children[3].children;
  const parts = prefix.parts.map((part, index) => ({ ...part, index }));
  keyed(bar, parts, (part) => part.index, () => element("i"), (piece, part) => {
    piece.className = part.tiers[0] ?? "computed";
    piece.style.width = `${(100 * part.tokens) / prefix.tokens}%`;
  });
  say(words, parts.map((part) => `${count(part.tokens)} ${part.tiers.join(" + ") || "nowhere"}`).join(" · "));
}
