// The system prompt and sampling parameters. An empty field is left out of the request, so that
// the model's own default holds.

import { keep, kept } from "./conversation.js";
import { byId, h, write } from "./dom.js";

const NAME = "penstock.settings";

// name, label, least, most, step
const FIELDS = [
  ["temperature", "Temperature", 0, 2, "any"],
  ["top_p", "Top p", 0, 1, "any"],
  ["top_k", "Top k", -1, null, 1],
  ["min_p", "Min p", 0, 1, "any"],
  ["presence_penalty", "Presence penalty", -2, 2, "any"],
  ["repetition_penalty", "Repetition penalty", 0.01, 2, "any"],
  ["max_completion_tokens", "Max tokens", 1, null, 1],
  ["seed", "Seed", 0, null, 1],
];

export class Settings {
  constructor() {
    this.panel = byId("settings");
    this.button = byId("settings-button");
    this.system = byId("system");
    this.stop = byId("stop-at");
    this.inputs = FIELDS.map(([name, label, min, max, step]) => {
      const input = h("input", { type: "number", id: `set-${name}`, name, min, max, step, placeholder: "model’s own" });
      this.stop.parentElement.before(h("label", {}, label, input));
      return input;
    });
    this.all = [...this.inputs, this.system, this.stop];
    this.#fill(kept(NAME, {}));
    this.panel.addEventListener("input", () => this.#changed());
    this.button.addEventListener("click", () => this.#show(this.panel.hidden));
    byId("reset").addEventListener("click", () => this.#fill({}));
  }

  #fill(values) {
    for (const input of this.all) input.value = values[input.name] ?? "";
    this.#changed();
  }

  #changed() {
    keep(NAME, Object.fromEntries(this.all.map((input) => [input.name, input.value])));
    const filled = this.all.filter((input) => input.value).length; // so that none is forgotten
    write(this.button, filled ? `Settings · ${filled}` : "Settings");
  }

  #show(visible) {
    this.panel.hidden = !visible;
    this.button.setAttribute("aria-expanded", String(visible));
  }

  /** Whether every field is in its range; if not, shows which one isn't. */
  valid() {
    if (this.panel.checkValidity()) return true;
    this.#show(true);
    return this.panel.reportValidity();
  }

  /** Fields of a request; only those that were filled in. */
  request(mode) {
    const filled = this.inputs.filter((input) => input.value);
    const request = Object.fromEntries(filled.map((input) => [input.name, Number(input.value)]));
    const stop = this.stop.value.split("\n").filter(Boolean);
    if (stop.length) request.stop = stop;
    const { max_completion_tokens: most, ...rest } = request;
    return mode === "complete" && most ? { ...rest, max_tokens: most } : request; // the older API's name
  }
}
