// The system prompt and sampling parameters. An empty field is left out of the request, so that
// the model's own default holds.

import { byId, h } from "./dom.js";
import { keep, kept } from "./conversation.js";

const NAME = "penstock.settings";

const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: "any" },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: "any" },
  { name: "top_k", label: "Top k", min: -1, step: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: "any" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: "any" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, max: 2, step: "any" },
  { name: "max_completion_tokens", label: "Max tokens", min: 1, step: 1 },
  { name: "seed", label: "Seed", min: 0, step: 1, placeholder: "random" },
];

export class Settings {
  constructor() {
    this.panel = byId("settings");
    this.button = byId("settings-button");
    this.system = byId("system");
    this.stop = byId("stop-at");
    this.inputs = FIELDS.map(({ name, label, placeholder = "model’s own", ...limits }) => {
      const input = h("input", { type: "number", id: `set-${name}`, name, placeholder, inputmode: "decimal", ...limits });
      byId("sampling").append(h("label", { for: input.id }, label, input));
      return input;
    });
    this.all = [...this.inputs, this.system, this.stop];
    const values = kept(NAME, {});
    for (const input of this.all) input.value = values[input.name] ?? "";
    this.panel.addEventListener("input", () => this.#changed());
    this.panel.addEventListener("submit", (event) => event.preventDefault());
    this.button.addEventListener("click", () => this.show(this.panel.hidden));
    byId("reset").addEventListener("click", () => this.#reset());
    this.#count();
  }

  show(visible) {
    this.panel.hidden = !visible;
    this.button.setAttribute("aria-expanded", String(visible));
  }

  #reset() {
    for (const input of this.all) input.value = "";
    this.#changed();
  }

  #changed() {
    keep(NAME, Object.fromEntries(this.all.map((input) => [input.name, input.value])));
    this.#count();
  }

  // How many fields differ from the model's own, so that a forgotten one is seen.
  #count() {
    const number = this.all.filter((input) => input.value).length;
    this.button.querySelector("span").textContent = number ? ` · ${number}` : "";
  }

  /** Whether every field is in its range; if not, shows which one isn't. */
  valid() {
    if (this.panel.checkValidity()) return true;
    this.show(true);
    this.panel.reportValidity();
    return false;
  }

  /** Fields of a request; only those that were filled in. */
  request(mode) {
    const filled = this.inputs.filter((input) => input.value !== "");
    const request = Object.fromEntries(filled.map((input) => [input.name, Number(input.value)]));
    const stop = this.stop.value.split("\n").filter(Boolean);
    if (stop.length) request.stop = stop;
    if (mode === "complete" && "max_completion_tokens" in request) {
      request.max_tokens = request.max_completion_tokens; // its name in the older API
      delete request.max_completion_tokens;
    }
    return request;
  }
}
