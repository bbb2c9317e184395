// Markdown on the page. A growing text is read again only from its last block on.

import { patch } from "./dom.js";
import { parse } from "./markdown.js";

export class Prose {
  #settled = 0; // elements that no further text can change
  #line = 0; // the line behind them

  constructor(element) {
    this.element = element;
  }

  /** Shows a text of which more will come: the same as before, perhaps longer. */
  grow(text) {
    const rest = text.split("\n").slice(this.#line).join("\n");
    const blocks = parse(rest, { open: true });
    patch(this.element, blocks.map(decorate), this.#settled);
    if (blocks.length < 2) return;
    this.#settled += blocks.length - 1;
    this.#line += blocks.at(-1).line;
  }

  /** Shows a complete text. */
  show(text) {
    this.#settled = 0;
    this.#line = 0;
    patch(this.element, parse(text).map(decorate));
  }
}

const node = (tag, attrs, ...children) => ({ tag, attrs, children });

// Code gets a head with its language and a button, tables scroll sideways by themselves.
function decorate(block) {
  if (typeof block === "string") return block;
  const children = block.children.map(decorate);
  if (block.tag === "pre") {
    const language = block.attrs.language ?? "";
    const copy = node("button", { type: "button", class: "quiet copy-code", "aria-label": "Copy code" }, "Copy");
    const head = node("figcaption", {}, node("span", {}, language), copy);
    return node("figure", { class: "code" }, head, node("pre", { tabindex: "0" }, node("code", {}, ...children)));
  }
  if (block.tag === "table") {
    const [header, ...rows] = children;
    const table = node("table", {}, node("thead", {}, header), node("tbody", {}, ...rows));
    return node("div", { class: "table", tabindex: "0" }, table);
  }
  return { tag: block.tag, attrs: block.attrs, children };
}

/** One listener for all copy buttons of code below an element. */
export function copyCode(root) {
  root.addEventListener("click", async ({ target }) => {
    if (!target.matches?.(".copy-code")) return;
    await copy(target.closest("figure").querySelector("code").textContent, target);
  });
}

/** Puts text on the clipboard and says so on the button for a moment. */
export async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed"; // browsers give the clipboard to https and localhost only
  }
  setTimeout(() => (button.textContent = label), 1500);
}
