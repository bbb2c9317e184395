// Inline Markdown: emphasis, code, links, line breaks (CommonMark, "Inlines"; strikethrough and
// bare addresses as in GFM). One pass with a stack; every search is bounded, so that no input
// takes long.

const TOKEN = new RegExp(
  [
    String.raw`\\(?<escaped>[!-/:-@[-\x60{-~])`,
    String.raw`(?<br>(?:\\|(?<! ) {2,})\n)`,
    String.raw`(?<ticks>\x60+)`,
    String.raw`(?<run>\*+|_+|~~)`,
    String.raw`<(?<pointed>(?:https?://|mailto:)[^\s<>]*)>`,
    String.raw`(?<bare>(?<!\w)https?://[^\s<>\x60]{1,2000})`,
    String.raw`!?\[(?<label>(?:[^[\]\\]|\\.|\[[^[\]]*\]){0,500})\](?:` +
      String.raw`\(\s*(?:<(?<angled>[^<>\n]*)>|(?<address>(?:[^\s()<]|\([^\s()]*\))*))(?:\s+"[^"]*")?\s*\)|(?<part>\([^)\n]*$))`,
  ].join("|"),
  "gi",
);
const PUNCTUATION = /[\p{P}\p{S}]/u;
const PROTOCOLS = ["http:", "https:", "mailto:"];
const LOOK_BACK = 300; // nodes between the two ends of an emphasis

const node = (tag, children, attrs = {}) => ({ tag, attrs, children });

/** An address that may be linked to, or null: absolute, and http, https or mailto. */
export function safeAddress(text) {
  const address = URL.canParse(text) ? new URL(text) : null;
  return PROTOCOLS.includes(address?.protocol) ? address.href : null;
}

/** Nodes of a text; with `open` its end is still to come. */
export function inline(text, open = false, linked = false) {
  if (open) text = text.replace(/[*_~`\\]+$/, "");
  const out = []; // strings, nodes, and runs of delimiters that may still open something
  const unclosed = new Set(); // lengths of backtick runs that nothing closes
  let at = 0;
  for (;;) {
    TOKEN.lastIndex = at;
    const match = TOKEN.exec(text);
    if (!match) break;
    const { escaped, br, ticks, run } = match.groups;
    out.push(text.slice(at, match.index));
    at = match.index + match[0].length;
    if (escaped) out.push(escaped);
    else if (br) out.push(node("br", []), "\n");
    else if (run) delimit(out, run, text[match.index - 1] ?? " ", text[at] ?? " ");
    else if (ticks) at = code(out, text, at, ticks.length, open, unclosed);
    else at = match.index + link(out, match, open, linked);
  }
  out.push(text.slice(at));
  if (open) complete(out);
  return texts(out);
}

// Appends a span of code, or the backticks alone; returns where the text goes on.
function code(out, text, start, length, open, unclosed) {
  const closing = new RegExp(`(?<!\`)\`{${length}}(?!\`)`, "g");
  closing.lastIndex = start;
  let end = unclosed.has(length) ? undefined : closing.exec(text)?.index;
  if (open && start < text.length) end ??= text.length;
  if (end === undefined) {
    unclosed.add(length);
    out.push("`".repeat(length));
    return start;
  }
  const content = text.slice(start, end).replaceAll("\n", " ");
  out.push(node("code", [/^ .*[^ ].* $/.test(content) ? content.slice(1, -1) : content]));
  return Math.min(end + length, text.length);
}

// Appends a link, or a bracket alone; returns how many characters it took.
function link(out, { 0: all, groups }, open, linked) {
  const { pointed, label, angled, address, part } = groups;
  const bare = groups.bare && trim(groups.bare);
  const href = linked ? null : safeAddress(pointed ?? bare ?? angled ?? address ?? "");
  const to = { href, rel: "noopener noreferrer", target: "_blank" };
  if (href) {
    out.push(node("a", label === undefined ? [pointed ?? bare] : inline(label, false, true), to));
    return bare ? bare.length : all.length;
  }
  if (part && open && !linked) out.push(node("span", inline(label, false, true)));
  else out.push(all.slice(0, 1));
  return part && open && !linked ? all.length : 1;
}

// A sentence's punctuation behind an address isn't part of it, nor a bracket opened before it.
function trim(address) {
  for (;;) {
    const shorter = address.replace(/[?!.,:;*_~'"]+$/, "");
    const extra = shorter.endsWith(")") && shorter.split(")").length > shorter.split("(").length;
    if (shorter === address && !extra) return address;
    address = extra ? shorter.slice(0, -1) : shorter;
  }
}

// A run closes what it can, as in "process emphasis" of the specification; its rest may open.
function delimit(out, text, before, after) {
  const [spaceBefore, spaceAfter] = [/\s/.test(before), /\s/.test(after)];
  const [markBefore, markAfter] = [PUNCTUATION.test(before), PUNCTUATION.test(after)];
  const left = !spaceAfter && (!markAfter || spaceBefore || markBefore);
  const right = !spaceBefore && (!markBefore || spaceAfter || markAfter);
  const word = text[0] === "_"; // which doesn't work inside words
  const run = { character: text[0], length: text.length, count: text.length, atWord: spaceBefore || markBefore };
  run.opens = left && (!word || !right || markBefore);
  run.closes = right && (!word || !left || markAfter);
  while (run.closes && run.count) {
    let opener = out.length - 1;
    const last = Math.max(0, opener - LOOK_BACK);
    while (opener >= last && !pairs(out[opener], run)) opener -= 1;
    if (opener < last) break;
    const size = Math.min(2, out[opener].count, run.count);
    run.count -= size;
    wrap(out, opener, size);
  }
  if (run.count) out.push(run.opens ? run : run.character.repeat(run.count));
}

function pairs(opener, closer) {
  if (opener.character !== closer.character) return false;
  if (closer.character === "~" || (!opener.closes && !closer.opens)) return true;
  return (opener.length + closer.length) % 3 !== 0 || opener.length % 3 === 0;
}

// Everything behind an opener becomes its content.
function wrap(out, opener, size) {
  const run = out[opener];
  const children = texts(out.splice(opener + 1));
  run.count -= size;
  if (!run.count) out.pop();
  out.push(node(run.character === "~" ? "del" : size === 2 ? "strong" : "em", children));
}

// What is open at the end of a growing text will most likely be closed.
function complete(out) {
  for (let at = out.length - 1; at >= 0; at -= 1) {
    const run = out[at];
    if (!run.atWord || out.slice(at + 1).join("") === "") continue;
    while (run.count) wrap(out, at, Math.min(2, run.count));
  }
}

// Delimiters that found no partner are text; neighbouring texts are one.
function texts(nodes) {
  const found = [];
  for (const item of nodes) {
    const plain = item.character ? item.character.repeat(item.count) : item;
    if (typeof plain !== "string") found.push(plain);
    else if (typeof found.at(-1) === "string") found[found.length - 1] += plain;
    else if (plain) found.push(plain);
  }
  return found;
}
