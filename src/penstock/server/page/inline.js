// Inline Markdown: emphasis, code, links, line breaks (CommonMark, "Inlines"; strikethrough and
// bare addresses as in GFM). One pass with a stack, so that no input takes more than linear or
// nearly linear time.

const PUNCTUATION = /[\p{P}\p{S}]/u;
const SPACE = /\s/;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const AUTOLINK = /<((?:https?:\/\/|mailto:)[^\s<>]*)>/iy;
const BARE_LINK = /https?:\/\/[^\s<>`]{1,2000}/iy;
const DESTINATION = /\(\s*(?:<([^<>\n]*)>|([^\s()]*(?:\([^\s()]*\)[^\s()]*)*))(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/y;
const PROTOCOLS = new Set(["http:", "https:", "mailto:"]);

/** An address that may be linked to, or null: absolute, and http, https or mailto. */
export function safeAddress(text) {
  try {
    const address = new URL(text);
    return PROTOCOLS.has(address.protocol) ? address.href : null;
  } catch {
    return null;
  }
}

/** Nodes of a text; with `open` its end is still to come. */
export function inline(text, open = false, linked = false) {
  return new Inline(open ? text.replace(/[*_~`\\]+$/, "") : text, open, linked).read();
}

class Inline {
  constructor(text, open, linked) {
    this.text = text;
    this.open = open;
    this.linked = linked; // inside a link there is no other one
    this.at = 0;
    this.plain = "";
    this.out = []; // strings, elements, and runs of delimiters that may still open something
    this.floor = new Map(); // below this index of `out` no opener of that kind is left
    this.unclosed = new Set(); // lengths of backtick runs that nothing closes
    this.brackets = linked ? new Map() : this.#brackets();
  }

  read() {
    while (this.at < this.text.length) this.#next();
    this.#flush();
    if (this.open) this.#complete();
    return texts(this.out);
  }

  #next() {
    const { text, at } = this;
    const character = text[at];
    if (character === "\\") this.#escape();
    else if (character === "`") this.#code();
    else if (character === "*" || character === "_" || character === "~") this.#run(character);
    else if (character === "\n") this.#newline();
    else if (character === "[" || (character === "!" && text[at + 1] === "[")) this.#link();
    else if (character === "<" || character === "h" || character === "H") this.#address();
    else this.#take(1);
  }

  #take(count) {
    this.plain += this.text.slice(this.at, this.at + count);
    this.at += count;
  }

  #flush() {
    if (this.plain) this.out.push(this.plain);
    this.plain = "";
  }

  #push(tag, children, attrs = {}) {
    this.#flush();
    this.out.push({ tag, attrs, children });
  }

  #escape() {
    const next = this.text[this.at + 1] ?? "";
    if (next === "\n") {
      this.#push("br", []);
      this.at += 2;
    } else if (ESCAPABLE.test(next)) {
      this.plain += next;
      this.at += 2;
    } else this.#take(1);
  }

  #newline() {
    const spaces = this.plain.endsWith("  ");
    this.plain = this.plain.trimEnd();
    if (spaces) this.#push("br", []);
    else this.plain += "\n";
    this.at += 1;
    while (this.text[this.at] === " ") this.at += 1;
  }

  #code() {
    const length = runLength(this.text, this.at);
    const start = this.at + length;
    let end = this.unclosed.has(length) ? -1 : closingBackticks(this.text, start, length);
    if (end < 0 && this.open && start < this.text.length) end = this.text.length;
    if (end < 0) {
      this.unclosed.add(length);
      this.#take(length);
      return;
    }
    let code = this.text.slice(start, end).replaceAll("\n", " ");
    if (/^ .*[^ ].* $/.test(code) || /^ [^ ] $/.test(code)) code = code.slice(1, -1);
    this.#push("code", [code]);
    this.at = end + (end < this.text.length ? length : 0);
  }

  #run(character) {
    const { text, at } = this;
    const length = runLength(text, at);
    const before = at ? lastCharacter(text, at) : " ";
    const after = at + length < text.length ? String.fromCodePoint(text.codePointAt(at + length)) : " ";
    const left = !SPACE.test(after) && (!PUNCTUATION.test(after) || SPACE.test(before) || PUNCTUATION.test(before));
    const right = !SPACE.test(before) && (!PUNCTUATION.test(before) || SPACE.test(after) || PUNCTUATION.test(after));
    const word = character === "_";
    const run = {
      character,
      count: length,
      length,
      opens: left && (!word || !right || PUNCTUATION.test(before)),
      closes: right && (!word || !left || PUNCTUATION.test(after)),
      afterSpace: SPACE.test(before) || PUNCTUATION.test(before),
    };
    this.at += length;
    if (character === "~" && length !== 2) {
      this.plain += "~".repeat(length);
      return;
    }
    this.#flush();
    if (run.closes) this.#close(run);
    if (run.count) this.out.push(run.opens ? run : character.repeat(run.count));
  }

  // "process emphasis" of the specification, each closer as it comes.
  #close(run) {
    while (run.count) {
      const kind = `${run.character}${run.opens}${run.length % 3}`;
      const floor = this.floor.get(kind) ?? 0;
      let opener = this.out.length - 1;
      while (opener >= floor && !pairs(this.out[opener], run)) opener -= 1;
      if (opener < floor) {
        this.floor.set(kind, this.out.length);
        return;
      }
      const size = this.out[opener].count >= 2 && run.count >= 2 ? 2 : 1;
      run.count -= size;
      this.#wrap(opener, size);
    }
  }

  // Everything behind an opener becomes its content.
  #wrap(opener, size) {
    const run = this.out[opener];
    const children = texts(this.out.splice(opener + 1));
    run.count -= size;
    if (!run.count) this.out.pop();
    const tag = run.character === "~" ? "del" : size === 2 ? "strong" : "em";
    this.out.push({ tag, attrs: {}, children });
    for (const [kind, floor] of this.floor) this.floor.set(kind, Math.min(floor, opener));
  }

  // What is open at the end of a growing text will most likely be closed.
  #complete() {
    for (let at = this.out.length - 1; at >= 0; at -= 1) {
      const run = this.out[at];
      if (!run.character || !run.afterSpace || at === this.out.length - 1) continue;
      while (run.count && this.out[at] === run) this.#wrap(at, Math.min(run.count, 2));
    }
  }

  #link() {
    const image = this.text[this.at] === "!";
    const start = this.at + (image ? 1 : 0);
    const end = this.brackets.get(start);
    if (end === undefined) {
      this.#take(1 + image);
      return;
    }
    const label = this.text.slice(start + 1, end);
    DESTINATION.lastIndex = end + 1;
    const match = DESTINATION.exec(this.text);
    const href = match && safeAddress(match[1] ?? match[2]);
    const unfinished = this.open && !match && /^\([^)\n]*$/.test(this.text.slice(end + 1));
    if (href) this.#push("a", inline(label, false, true), linkTo(href));
    else if (unfinished) this.#push("span", inline(label, false, true));
    else {
      this.#take(1 + image);
      return;
    }
    this.at = unfinished ? this.text.length : DESTINATION.lastIndex;
  }

  #address() {
    if (!this.linked) {
      AUTOLINK.lastIndex = BARE_LINK.lastIndex = this.at;
      const pointed = AUTOLINK.exec(this.text);
      const startsWord = !this.at || !/\w/.test(this.text[this.at - 1]);
      const shown = pointed?.[1] ?? (startsWord ? trimAddress(BARE_LINK.exec(this.text)?.[0]) : "");
      const href = shown && safeAddress(shown);
      if (href) {
        this.#push("a", [shown], linkTo(href));
        this.at += pointed ? pointed[0].length : shown.length;
        return;
      }
    }
    this.#take(1);
  }

  // Opening bracket → its closing one, in one pass.
  #brackets() {
    const { text } = this;
    const found = new Map();
    const stack = [];
    const unclosed = new Set();
    for (let at = 0; at < text.length; at += 1) {
      if (text[at] === "\\") at += 1;
      else if (text[at] === "[") stack.push(at);
      else if (text[at] === "]" && stack.length) found.set(stack.pop(), at);
      else if (text[at] === "`") {
        const length = runLength(text, at);
        const end = unclosed.has(length) ? -1 : closingBackticks(text, at + length, length);
        if (end < 0) unclosed.add(length);
        at = (end < 0 ? at : end) + length - 1;
      }
    }
    return found;
  }
}

const linkTo = (href) => ({ href, rel: "noopener noreferrer", target: "_blank" });

function runLength(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

function closingBackticks(text, from, length) {
  for (let at = text.indexOf("`", from); at >= 0; at = text.indexOf("`", at)) {
    const found = runLength(text, at);
    if (found === length) return at;
    at += found;
  }
  return -1;
}

// A character outside the basic plane is two units of a JavaScript string.
function lastCharacter(text, at) {
  const unit = text.charCodeAt(at - 1);
  const pair = unit >= 0xdc00 && unit <= 0xdfff && at > 1;
  return pair ? text.slice(at - 2, at) : text[at - 1];
}

// Rule of three: https://spec.commonmark.org/0.31.2/#emphasis-and-strong-emphasis, 9 and 10.
function pairs(opener, closer) {
  if (opener.character !== closer.character) return false;
  if (closer.character === "~") return true;
  if (!opener.closes && !closer.opens) return true;
  return (opener.length + closer.length) % 3 !== 0 || (opener.length % 3 === 0 && closer.length % 3 === 0);
}

// A sentence's punctuation behind an address isn't part of it, nor a bracket opened before it.
function trimAddress(address = "") {
  for (;;) {
    const shorter = address.replace(/[?!.,:;*_~'"]+$/, "");
    const unbalanced = shorter.endsWith(")") && shorter.split(")").length > shorter.split("(").length;
    if (shorter === address && !unbalanced) return address;
    address = unbalanced ? shorter.slice(0, -1) : shorter;
  }
}

// Delimiters that found no partner are text; neighbouring texts are one.
function texts(nodes) {
  const found = [];
  for (const node of nodes) {
    const plain = node.character ? node.character.repeat(node.count) : node;
    if (typeof plain === "string" && typeof found.at(-1) === "string") found[found.length - 1] += plain;
    else found.push(plain);
  }
  return found;
}
