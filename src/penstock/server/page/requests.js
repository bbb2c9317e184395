// The table of running requests. A row stays the same element while its request runs.

import { h, write } from "./dom.js";
import { count, seconds } from "./format.js";

export class RequestTable {
  #rows = new Map();

  constructor(table) {
    this.body = table.tBodies[0];
    this.none = h("tr", {}, h("td", { colspan: "4", class: "dim" }, "Nothing is running."));
    this.body.append(this.none);
  }

  /** requests: as many as the event lists, of `total` that run. */
  show(requests, total) {
    const gone = new Set(this.#rows.keys());
    requests.forEach((request, at) => {
      gone.delete(request.id);
      if (!this.#rows.has(request.id)) this.#rows.set(request.id, newRow(request.id));
      const row = this.#rows.get(request.id);
      if (this.body.children[at] !== row.element) this.body.insertBefore(row.element, this.body.children[at] ?? null);
      update(row, request);
    });
    for (const id of gone) {
      this.#rows.get(id).element.remove();
      this.#rows.delete(id);
    }
    this.none.hidden = requests.length > 0;
    this.body.append(this.none);
    this.#more(total - requests.length);
  }

  #more(others) {
    const cell = this.none.firstElementChild;
    write(cell, others > 0 ? `and ${count(others)} more` : "Nothing is running.");
    if (others > 0) this.none.hidden = false;
  }
}

function newRow(id) {
  const cached = h("span", { class: "cached" });
  const computed = h("span", { class: "computed" });
  const row = { cached, computed, bar: h("div", { class: "bar" }, computed, cached), text: h("td"), age: h("td") };
  const name = h("th", { scope: "row", title: id }, id);
  row.element = h("tr", {}, name, h("td", {}, row.bar), row.text, row.age);
  return row;
}

function update(row, request) {
  const { phase, prompt_tokens: prompt, computed_tokens: computed, cached_tokens: cached } = request;
  const share = (tokens) => (prompt ? Math.min(1, tokens / prompt) : 1);
  const decoding = phase === "decode";
  if (row.bar.dataset.phase !== phase) row.bar.dataset.phase = phase;
  row.computed.style.transform = `scaleX(${decoding ? 1 : share(computed)})`;
  row.cached.style.transform = `scaleX(${decoding ? 0 : share(cached)})`;
  write(row.text, decoding ? `${count(request.output_tokens)} out` : `${count(Math.min(computed, prompt))} of ${count(prompt)} in`);
  write(row.age, seconds(request.age_s));
}
