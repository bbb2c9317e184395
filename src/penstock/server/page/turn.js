// One turn of a conversation on the page.

import { h, write } from "./dom.js";
import { count, digits, percent, plural, seconds } from "./format.js";
import { Prose, copy } from "./prose.js";

const button = (label, onclick, title) => h("button", { type: "button", class: "quiet", title, onclick }, label);

export function userTurn(turn, edit) {
  const actions = h("div", { class: "actions" });
  if (edit) actions.append(button("Edit", edit, "Change this message and ask again"));
  const title = h("h3", { class: "hidden-visually" }, "You");
  return h("article", { class: "turn user" }, title, h("div", { class: "said" }, turn.text), actions);
}

/** A reply, or a completion behind its prompt. */
export class ReplyView {
  constructor(turn, prompt) {
    this.turn = turn;
    this.body = h("div", { class: prompt === undefined ? "prose" : "text" });
    this.trouble = h("div", { class: "trouble", hidden: true });
    this.figures = h("p", { class: "figures" });
    this.actions = h("div", { class: "actions" });
    const title = h("h3", { class: "hidden-visually" }, prompt === undefined ? "Reply" : "Completion");
    const foot = h("footer", {}, this.figures, this.actions);
    this.element = h("article", { class: "turn reply" }, title, this.body, this.trouble, foot);
    if (prompt === undefined) this.prose = new Prose(this.body);
    else {
      this.continuation = h("span", {});
      this.body.append(h("span", { class: "prompt" }, prompt), this.continuation);
    }
  }

  /** The reply has grown. */
  grow() {
    this.element.classList.toggle("waiting", !this.turn.text);
    this.element.classList.add("growing");
    if (this.prose) this.prose.grow(this.turn.text);
    else write(this.continuation, this.turn.text);
  }

  /** The reply is complete; `actions` are [label, title, what to do]. */
  finish(actions) {
    const { turn } = this;
    this.element.classList.remove("growing", "waiting");
    if (this.prose) this.prose.show(turn.text);
    else write(this.continuation, turn.text);
    write(this.figures, describe(turn));
    this.trouble.hidden = !turn.error;
    write(this.trouble, turn.error ?? "");
    const buttons = actions.map(([label, title, act]) => button(label, act, title));
    if (turn.text) buttons.unshift(this.#copyButton());
    this.actions.replaceChildren(...buttons);
  }

  #copyButton() {
    return button("Copy", ({ target }) => copy(this.turn.text, target), "Copy the text as it came");
  }

  /** A way out beside what went wrong. */
  offer(label, act) {
    this.trouble.append(" ", button(label, act));
  }
}

/** A reply's figures in one line: tokens, latency, speed, share of the floor, cached tokens. */
export function describe({ figures, state }) {
  const parts = [];
  if (state === "stopped") parts.push("stopped");
  if (state === "length") parts.push("cut at the token limit");
  if (!figures) return parts.join(" · ");
  const { tokens, cached, prompt, ttft, speed, floor, bound } = figures;
  if (Number.isFinite(tokens)) parts.push(plural(tokens, "token"));
  if (Number.isFinite(ttft)) parts.push(`first after ${seconds(ttft)}`);
  if (Number.isFinite(speed)) parts.push(`${digits(speed)} tok/s`);
  if (Number.isFinite(floor)) parts.push(`${percent(floor)} of the floor${bound ? ` (${bound})` : ""}`);
  if (cached && prompt) parts.push(`${count(cached)} of ${count(prompt)} prompt tokens cached`);
  return parts.join(" · ");
}

/** Times a reply as it arrives; the server's own figures, where it gives them, are preferred. */
export class Clock {
  constructor() {
    this.start = performance.now();
    this.first = null;
    this.pieces = 0;
  }

  piece() {
    this.last = performance.now();
    this.first ??= this.last;
    this.pieces += 1;
  }

  figures(usage, own) {
    const tokens = usage?.completion_tokens;
    const decoding = (this.last - this.first) / 1e3;
    const measured = tokens > 1 && decoding > 0 ? (tokens - 1) / decoding : null;
    return {
      tokens,
      prompt: usage?.prompt_tokens,
      cached: usage?.prompt_tokens_details?.cached_tokens ?? 0,
      ttft: own?.ttft_s ?? (this.first === null ? null : (this.first - this.start) / 1e3),
      speed: own?.tokens_per_s ?? measured,
      floor: own?.floor_ratio ?? null,
      bound: own?.bound ?? null,
    };
  }
}
