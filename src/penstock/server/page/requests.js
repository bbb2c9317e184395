// The table of running requests. A row stays the same element while its request runs.

import { h, write } from "./dom.js";
import { count, seconds } from "./format.js";

const rows = new Map();

/** requests: as many as an event lists, of `total` that run. */
export function showRequests(body, requests, total) {
  const shown = requests.map((request) => {
    if (!rows.has(request.id)) rows.set(request.id, newRow(request.id));
    const row = rows.get(request.id);
    update(row, request);
    return row;
  });
  for (const [id, row] of rows) {
    if (shown.includes(row)) continue;
    row.element.remove();
    rows.delete(id);
  }
  shown.forEach(({ element }, at) => {
    if (body.children[at] !== element) body.insertBefore(element, body.children[at] ?? null);
  });
  const others = total - requests.length;
  body.lastElementChild.hidden = requests.length > 0 && others <= 0;
  write(body.lastElementChild, others > 0 ? `and ${count(others)} more` : "Nothing is running.");
}

function newRow(id) {
  const [cached, computed] = [h("i", { class: "cached" }), h("i", { class: "computed" })];
  const row = { cached, computed, bar: h("div", { class: "bar" }, computed, cached), text: h("td"), age: h("td") };
  const name = h("th", { scope: "row", title: id }, id.slice(-8));
  row.element = h("tr", {}, name, h("td", {}, row.bar), row.text, row.age);
  return row;
}

function update(row, { phase, prompt_tokens: prompt, computed_tokens: computed, ...request }) {
  const decoding = phase === "decode";
  const share = (tokens) => `scaleX(${prompt ? Math.min(1, tokens / prompt) : 1})`;
  row.bar.dataset.phase = phase;
  row.computed.style.transform = share(decoding ? prompt : computed);
  row.cached.style.transform = share(decoding ? 0 : request.cached_tokens);
  write(row.text, decoding ? `${count(request.output_tokens)} out` : `${count(computed)} of ${count(prompt)} in`);
  write(row.age, seconds(request.age_s));
}
