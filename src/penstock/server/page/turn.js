// One turn of a conversation on the page.

import { h, write } from "./dom.js";
import { count, digits, percent, plural, seconds } from "./format.js";
import { pictureRow } from "./pictures.js";
import { Prose, copy } from "./prose.js";

const button = (label, title, onclick) => h("button", { type: "button", class: "quiet", title, onclick }, label);
const unseen = (title) => h("h3", { class: "unseen" }, title);

/** What the user said; `edit` is called to change it. */
export function userTurn({ text, pictures, lost }, edit) {
  const said = h("article", { class: "turn user" }, unseen("You"));
  if (pictures) said.append(pictureRow(pictures));
  if (lost) said.append(h("p", { class: "dim" }, `${plural(lost, "picture")}, which this browser hasn't kept`));
  if (text) said.append(h("div", { class: "said" }, text));
  if (edit) said.append(button("Edit", "Change this message and ask again", edit));
  return said;
}

/** A reply, or a completion behind its prompt. */
export class ReplyView {
  constructor(turn, prompt) {
    const text = h("div", { class: prompt === undefined ? "prose" : "text" });
    this.turn = turn;
    this.trouble = h("div", { class: "trouble", hidden: true });
    this.figures = h("p", { class: "figures" });
    this.actions = h("div", { class: "actions" });
    const foot = h("footer", {}, this.figures, this.actions);
    this.element = h("article", { class: "turn reply" }, unseen("Reply"), text, this.trouble, foot);
    this.prose = prompt === undefined ? new Prose(text) : null;
    this.plain = h("span");
    if (!this.prose) text.append(h("span", { class: "prompt" }, prompt), this.plain);
  }

  /** The reply has grown. */
  grow() {
    this.element.classList.add("growing");
    this.element.classList.toggle("waiting", !this.turn.text);
    if (this.prose) this.prose.grow(this.turn.text);
    else write(this.plain, this.turn.text);
  }

  /** The reply is complete; `actions` are [label, title, what to do]. */
  finish(actions) {
    const { turn } = this;
    this.element.classList.remove("growing", "waiting");
    if (this.prose) this.prose.show(turn.text);
    else write(this.plain, turn.text);
    write(this.figures, describe(turn));
    this.trouble.hidden = !turn.error;
    write(this.trouble, turn.error ?? "");
    const toCopy = ["Copy", "Copy the text as it came", ({ target }) => copy(turn.text, target)];
    this.actions.replaceChildren(...(turn.text ? [toCopy, ...actions] : actions).map((each) => button(...each)));
  }

  /** A way out beside what went wrong. */
  offer(label, act) {
    this.trouble.append(" ", button(label, "", act));
  }
}

// A reply's figures in one line.
function describe({ figures = {}, state }) {
  const { tokens, prompt, cached, ttft, speed, floor, bound } = figures;
  const parts = [
    { stopped: "stopped", length: "cut at the token limit" }[state],
    tokens && plural(tokens, "token"),
    ttft && `first after ${seconds(ttft)}`,
    speed && `${digits(speed)} tok/s`,
    floor && `${percent(floor)} of the floor${bound ? ` (${bound})` : ""}`,
    cached && `${count(cached)} of ${count(prompt)} prompt tokens cached`,
  ];
  return parts.filter(Boolean).join(" · ");
}

/** Times a reply as it arrives; the server's own figures, where it gives them, are preferred. */
export class Clock {
  #start = performance.now();
  #first = null;
  #last = null;

  piece() {
    this.#last = performance.now();
    this.#first ??= this.#last;
  }

  /** usage: the API's; own: what Penstock's server adds to it. */
  figures(usage, own) {
    const tokens = usage?.completion_tokens;
    const decoding = (this.#last - this.#first) / 1e3;
    return {
      tokens,
      prompt: usage?.prompt_tokens,
      cached: usage?.prompt_tokens_details?.cached_tokens,
      ttft: own?.ttft_s ?? (this.#first && (this.#first - this.#start) / 1e3),
      speed: own?.tokens_per_s ?? (tokens > 1 && decoding > 0 ? (tokens - 1) / decoding : null),
      floor: own?.floor_ratio,
      bound: own?.bound,
    };
  }
}
