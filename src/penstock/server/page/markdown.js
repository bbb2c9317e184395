// Markdown to a tree of plain data: {tag, attrs, children} and strings. No HTML is ever made from
// it; prose.js builds elements. It reads what models write of CommonMark, with GFM's tables and
// strikethrough; HTML is text. With `open`, the text is still growing: what its end has begun
// (emphasis, code, a link, a table) is shown as if it were complete, so that nothing jumps.

import { inline } from "./inline.js";

const FENCE = /^( {0,3})(`{3,}(?=[^`]*$)|~{3,})[ \t]*(.*)$/;
const HEADING = /^ {0,3}(#{1,6})([ \t].*)?$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-+*]|\d{1,9}[.)])(?:( +)(.*))?$/;
const DELIMITER_ROW = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const BARE_MARKER = /^\s*(?:[-*_+~>|]+|#{1,6}|`{1,3}|\d{1,9}[.)])\s*$/;
const MAX_DEPTH = 12;

const blank = (line) => /^\s*$/.test(line);
const element = (tag, children, attrs = {}) => ({ tag, attrs, children });

/** Blocks of a text; each has `line`, the number of the line it starts at. */
export function parse(text, { open = false } = {}) {
  const lines = text.replace(/\r\n?/g, "\n").replace(/\0/g, "\uFFFD").split("\n").map(untab);
  return blocks(lines, open, 0);
}

// Tabs among indentation and markers count to the next multiple of four.
function untab(line) {
  if (!line.includes("\t")) return line;
  return line.replace(/^[ \t>*+\d.)-]+/, (start) => {
    let wide = "";
    for (const character of start) wide += character === "\t" ? " ".repeat(4 - (wide.length % 4)) : character;
    return wide;
  });
}

function blocks(lines, open, depth) {
  const readers = depth < MAX_DEPTH ? ALL : FLAT;
  const found = [];
  let at = 0;
  while (at < lines.length && !pending(lines, at, open)) {
    if (blank(lines[at])) {
      at += 1;
      continue;
    }
    for (const reader of readers) {
      const read = reader(lines, at, open, depth);
      if (!read) continue;
      read.node.line = at;
      found.push(read.node);
      at = read.end;
      break;
    }
  }
  return found;
}

// The last line is only a marker, whose content hasn't come yet.
const pending = (lines, at, open) => open && at === lines.length - 1 && BARE_MARKER.test(lines[at]);

function interrupts(line) {
  const item = ITEM.exec(line);
  const starts = item && item[4]?.trim() && (!/\d/.test(item[2]) || parseInt(item[2], 10) === 1);
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || starts;
}

function fence(lines, at, open) {
  const start = FENCE.exec(lines[at]);
  if (!start) return null;
  const [, indent, marker, info] = start;
  const closing = new RegExp(`^ {0,3}${marker[0]}{${marker.length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const code = lines.slice(at + 1, end);
  const half = new RegExp(`^ {0,3}${marker[0]}+$`);
  if (open && end === lines.length && half.test(code.at(-1))) code.pop();
  const outdent = new RegExp(`^ {0,${indent.length}}`);
  const language = /^[\w+#.-]{1,30}/.exec(info)?.[0] ?? "";
  const node = element("pre", [code.map((line) => line.replace(outdent, "")).join("\n")]);
  if (language) node.attrs.language = language;
  return { node, end: end + 1 };
}

function heading(lines, at, open) {
  const match = HEADING.exec(lines[at]);
  if (!match) return null;
  const title = (match[2] ?? "").trim().replace(/(^|[ \t])#+$/, "").trimEnd();
  const last = open && at === lines.length - 1;
  return { node: element(`h${match[1].length}`, inline(title, last)), end: at + 1 };
}

function rule(lines, at) {
  return RULE.test(lines[at]) ? { node: element("hr", []), end: at + 1 } : null;
}

function quote(lines, at, open, depth) {
  if (!QUOTE.test(lines[at])) return null;
  const inner = [];
  let end = at;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    if (QUOTE.test(line)) inner.push(line.replace(QUOTE, ""));
    else if (continuesParagraph(line, inner.at(-1))) inner.push(line);
    else break;
  }
  const last = open && end === lines.length;
  return { node: element("blockquote", blocks(inner, last, depth + 1)), end };
}

// A line without its container's marker still belongs to the paragraph before it.
function continuesParagraph(line, before) {
  if (blank(line) || interrupts(line) || before === undefined || blank(before)) return false;
  return !(FENCE.test(before) || HEADING.test(before) || RULE.test(before));
}

function list(lines, at, open, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const kind = first[2].at(-1);
  const items = [];
  let loose = false;
  let end = at;
  while (end < lines.length) {
    const match = ITEM.exec(lines[end]);
    if (!match || match[2].at(-1) !== kind || RULE.test(lines[end])) break;
    if (items.length && pending(lines, end, open)) break;
    if (items.length && blank(lines[end - 1])) loose = true;
    const item = itemLines(lines, end, match);
    const last = open && item.end >= lines.length;
    const children = blocks(item.inner, last, depth + 1);
    if (children.some((child, i) => i > 0 && blank(item.inner[child.line - 1]))) loose = true;
    items.push(children);
    end = item.end;
  }
  while (blank(lines[end - 1])) end -= 1;
  const children = items.map((blocks) => element("li", loose ? blocks : blocks.flatMap(unwrap)));
  const number = parseInt(first[2], 10);
  if (Number.isNaN(number)) return { node: element("ul", children), end };
  return { node: element("ol", children, number === 1 ? {} : { start: String(number) }), end };
}

// In a tight list a paragraph's text stands in the item itself.
const unwrap = (block) => (block.tag === "p" ? block.children : [block]);

function itemLines(lines, at, match) {
  const [, indent, marker, space = "", rest = ""] = match;
  const width = indent.length + marker.length + (rest && space.length <= 4 ? space.length : 1);
  const inner = [lines[at].slice(width)];
  let end = at + 1;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const within = line.search(/\S/) >= width;
    if (blank(line)) {
      if (end === at + 1 && !rest.trim()) break; // an empty item ends at the first blank line
      inner.push("");
    } else if (within) inner.push(line.slice(width));
    else if (!ITEM.test(line) && continuesParagraph(line, inner.at(-1))) inner.push(line.trimStart());
    else break;
  }
  return { inner, end };
}

function table(lines, at, open) {
  if (!lines[at].includes("|")) return null;
  const header = cells(lines[at]);
  const rows = lines.length - at;
  const started = open && lines[at].trim().startsWith("|") && header.length > 1;
  if (rows === 1 || (rows === 2 && /^[\s|:-]*$/.test(lines[at + 1]) && started)) {
    if (!started) return null;
    return { node: element("table", [row("th", header, [], rows === 1)]), end: lines.length };
  }
  if (!DELIMITER_ROW.test(lines[at + 1])) return null;
  const columns = cells(lines[at + 1]);
  if (columns.length !== header.length) return null;
  const sides = columns.map((cell) => {
    if (!cell.endsWith(":")) return cell.startsWith(":") ? "left" : "";
    return cell.startsWith(":") ? "center" : "right";
  });
  let end = at + 2;
  while (end < lines.length && !blank(lines[end]) && !interrupts(lines[end])) end += 1;
  const body = lines.slice(at + 2, end).map((line, i, all) => {
    const texts = cells(line);
    const last = open && end === lines.length && i === all.length - 1;
    return row("td", columns.map((_, column) => texts[column] ?? ""), sides, last);
  });
  return { node: element("table", [row("th", header, sides, false), ...body]), end };
}

function row(tag, texts, sides, open) {
  const cell = (text, i) => element(tag, inline(text, open), sides[i] ? { class: sides[i] } : {});
  return element("tr", texts.map(cell));
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function paragraph(lines, at, open) {
  let end = at + 1;
  while (end < lines.length && !blank(lines[end]) && !interrupts(lines[end])) {
    if (pending(lines, end, open) || table(lines, end, open)) break;
    end += 1;
  }
  const text = lines.slice(at, end).map((line) => line.trimStart()).join("\n");
  const last = open && end >= lines.length - 1;
  return { node: element("p", inline(text.trimEnd(), last)), end };
}

const FLAT = [fence, heading, rule, table, paragraph];
const ALL = [fence, heading, rule, quote, list, table, paragraph];
