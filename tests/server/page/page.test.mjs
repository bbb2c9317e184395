// Modules that need no browser, run by `node --test` (see test_page_modules.py).

import assert from "node:assert/strict";
import { test } from "node:test";

import { layOut } from "./charts.js";
import { Conversation } from "./conversation.js";
import { digits, percentile, seconds } from "./format.js";
import { inline, safeAddress } from "./inline.js";
import { parse } from "./markdown.js";
import { EventParser, events } from "./sse.js";

const nodes = (tree) => tree.flatMap((node) => (typeof node === "string" ? [] : [node, ...nodes(node.children)]));
const plain = (tree) => tree.map((node) => (typeof node === "string" ? node : plain(node.children))).join("");

const STREAM = 'data: {"a": "é😀"}\r\n\r\n: keep-alive\n\ndata: one\r\ndata:two\n\nevent: end\rdata\r\rdata: [DONE]\n\n';
const EVENTS = [
  { type: "message", data: '{"a": "é😀"}' },
  { type: "message", data: "one\ntwo" },
  { type: "end", data: "" },
  { type: "message", data: "[DONE]" },
];

const streamOf = (...chunks) =>
  new ReadableStream({
    start(controller) {
      chunks.forEach((chunk) => controller.enqueue(chunk));
      controller.close();
    },
  });

async function all(iterator) {
  const found = [];
  for await (const item of iterator) found.push(item);
  return found;
}

test("events are the same wherever the bytes are cut", async () => {
  const bytes = new TextEncoder().encode(STREAM);
  for (let at = 0; at <= bytes.length; at += 1) {
    assert.deepEqual(await all(events(streamOf(bytes.slice(0, at), bytes.slice(at)))), EVENTS, `cut at ${at}`);
  }
  assert.deepEqual(await all(events(streamOf(...[...bytes].map((byte) => Uint8Array.of(byte))))), EVENTS);
});

test("an unfinished event isn't given, a byte order mark isn't part of one", async () => {
  const parser = new EventParser();
  assert.deepEqual(parser.push("data: a\n\ndata: b\n"), [{ type: "message", data: "a" }]);
  assert.deepEqual(parser.push("\n"), [{ type: "message", data: "b" }]);
  const marked = new TextEncoder().encode("\uFEFFdata: a\n\n");
  assert.deepEqual(await all(events(streamOf(marked.slice(0, 2), marked.slice(2)))), [{ type: "message", data: "a" }]);
});

const TAGS = new Set(
  "p h1 h2 h3 h4 h5 h6 ul ol li blockquote pre hr table tr th td strong em del code br a span".split(" "),
);
const HOSTILE = [
  "<script>alert(1)</script>",
  "<img src=x onerror=alert(1)>",
  "[a](javascript:alert(1))",
  "[a](JaVaScRiPt:alert(1))",
  "[a](java\tscript:alert(1))",
  "[a](&#106;avascript:alert(1))",
  "[a](data:text/html,<script>alert(1)</script>)",
  "[a](vbscript:x) [b](file:///etc/passwd) [c](//evil.example) [d](/local) [e](blob:x)",
  "![a](javascript:alert(1))",
  "<javascript:alert(1)>",
  "<https://a.example/\"onmouseover=alert(1)>",
  "[a](https://a.example/\"onclick=alert(1))",
  '[a](https://a.example "x\\" onclick=alert(1)")',
  "```\"><img src=x onerror=alert(1)>\ncode\n```",
  "| <b onclick=x> | b |\n|---|---|\n| <i> | [x](javascript:1) |",
  "**<a href=javascript:alert(1)>**",
  "[[a](javascript:1)](https://a.example)",
];

test("hostile text becomes text, and links only lead where they may", () => {
  for (const text of HOSTILE) {
    for (let end = 0; end <= text.length; end += 1) {
      for (const open of [false, true]) {
        for (const { tag, attrs } of nodes(parse(text.slice(0, end), { open }))) {
          assert.ok(TAGS.has(tag), `${tag} from ${text}`);
          for (const [name, value] of Object.entries(attrs)) {
            if (name === "href") assert.match(value, /^https:\/\/a/);
            else if (name === "language") assert.match(value, /^[\w+#.-]+$/);
            else if (name === "class") assert.match(value, /^(left|center|right)$/);
            else assert.ok(["rel", "target", "start"].includes(name), name);
          }
        }
      }
    }
  }
});

test("links say noopener, and mail may be written to", () => {
  const [{ attrs }] = inline("[a](https://example.org/b)");
  assert.equal(attrs.href, "https://example.org/b");
  assert.equal(attrs.rel, "noopener noreferrer");
  assert.equal(safeAddress("mailto:a@example.org"), "mailto:a@example.org");
  assert.equal(safeAddress("ftp://example.org"), null);
});

test("a growing text never shows a marker that its end may turn into something", () => {
  const shown = (text) => plain(parse(text, { open: true }));
  const tags = (text) => nodes(parse(text, { open: true })).map((node) => node.tag);
  assert.deepEqual([shown("some **bo"), tags("some **bo")], ["some bo", ["p", "strong"]]);
  assert.deepEqual([shown("some **bold*"), tags("some **bold*")], ["some bold", ["p", "strong"]]);
  assert.deepEqual([shown("a `co"), tags("a `co")], ["a co", ["p", "code"]]);
  assert.deepEqual([shown("***a"), tags("***a")], ["a", ["p", "em", "strong"]]);
  assert.equal(shown("see [there](https://exam"), "see there");
  assert.equal(shown("text\n-"), "text");
  assert.equal(shown("text\n\n##"), "text");
  assert.equal(shown("```py\nx = 1\n``"), "x = 1");
  assert.deepEqual(tags("| a | b |\n|--"), ["table", "tr", "th", "th"]);
  assert.equal(shown("2 * 3 and 2*3"), "2 * 3 and 2*3");
  assert.equal(shown("snake_case_na"), "snake_case_na");
});

test("a growing text ends where the whole one is", () => {
  const text = "# T\n\nA **b** `c`\n\n- x\n- y\n\n|a|b|\n|-|-|\n|1|2|\n\n```js\n1\n```\n\nend.\n";
  assert.deepEqual(parse(text, { open: true }), parse(text));
});

test("no text takes long", () => {
  const many = 20_000;
  const texts = ["[", "![", "*a ", "**a* ", "_", "`", "` `` ``` ", "<", "https://", "((", ")", "~~a", "\\", " ", "| "]
    .map((piece) => piece.repeat(many))
    .concat([">".repeat(many), "- ".repeat(many), "1. ".repeat(many), "# " + " ".repeat(many) + "x", "a\n".repeat(many)])
    .concat(["|a|\n|-|\n" + "|b|\n".repeat(many), `https://a.example/${"(".repeat(many)}`, "a" + " ".repeat(many) + "\nb"])
    .concat([Array.from({ length: 300 }, (_, i) => "`".repeat(i + 1)).join(" "), `[${"a".repeat(many)}`.repeat(3)]);
  for (const text of texts) {
    const start = performance.now();
    parse(text);
    parse(text, { open: true });
    assert.ok(performance.now() - start < 3000, `${text.slice(0, 12)}… took ${performance.now() - start} ms`);
  }
});

test("percentiles are those of the nearest rank", () => {
  const values = Array.from({ length: 100 }, (_, i) => 100 - i);
  assert.deepEqual([0, 0.5, 0.99, 1].map((p) => percentile(values, p)), [1, 50, 99, 100]);
  assert.equal(percentile([7], 0.5), 7);
  assert.ok(Number.isNaN(percentile([], 0.5)));
});

test("seconds are written in the unit that reads best", () => {
  const written = { 0.00087: "870 µs", 0.0124: "12.4 ms", 0.9: "900 ms", 3.05: "3.05 s", 61: "61.0 s" };
  for (const [value, text] of Object.entries(written)) assert.equal(seconds(Number(value)), text);
  assert.equal(seconds(125), "2 min 5 s");
  assert.equal(seconds(7500), "2 h 5 min");
  assert.equal(seconds(NaN), "–");
  assert.deepEqual([0, 0.5, 12.34, 99.96, 1234].map(digits), ["0", "0.50", "12.3", "100", "1,234"]);
});

test("every block has a place on the map, within its bounds", () => {
  for (const total of [1, 7, 160, 1024, 4097, 59_999, 100_000, 1_000_000]) {
    for (const [width, height] of [[300, 160], [373, 160], [746, 320]]) {
      const { pitch, columns, rows, each } = layOut(total, width, height, 12);
      const told = `${total} blocks on ${width} × ${height}`;
      assert.ok(columns * rows * each >= total, told);
      assert.ok(columns * pitch <= width && rows * pitch <= height, told);
    }
  }
});

test("a conversation keeps its latest turns within its bound", () => {
  const stored = new Map();
  globalThis.localStorage = { getItem: (name) => stored.get(name) ?? null, setItem: (name, text) => stored.set(name, text) };
  const conversation = new Conversation("c", 100);
  for (let i = 0; i < 10; i += 1) {
    conversation.turns.push({ role: "user", text: `question ${i}` }, { role: "assistant", text: "x".repeat(20) });
  }
  conversation.save();
  assert.equal(conversation.turns.length, 20);
  const again = new Conversation("c", 100);
  assert.equal(again.turns.length, 6);
  assert.deepEqual(again.turns[0], { role: "user", text: "question 7" });
  again.turns = [{ role: "user", text: "a", pictures: ["data:,a", "data:,b"] }, { role: "assistant", text: "x" }];
  again.save();
  assert.equal(again.turns[0].pictures.length, 2);
  const later = new Conversation("c", 100);
  assert.deepEqual(later.turns[0], { role: "user", text: "a", lost: 2 });
  later.save();
  assert.equal(new Conversation("c", 100).turns[0].lost, 2);
  stored.set("c", "not JSON");
  assert.deepEqual(new Conversation("c").turns, []);
});

test("pictures come before what is said of them", () => {
  const conversation = new Conversation("e");
  conversation.turns = [
    { role: "user", text: "What?", pictures: ["data:,a"] },
    { role: "assistant", text: "A cat." },
    { role: "user", text: "", pictures: ["data:,b"] },
  ];
  const seen = (url) => ({ type: "image_url", image_url: { url } });
  assert.deepEqual(conversation.messages(""), [
    { role: "user", content: [seen("data:,a"), { type: "text", text: "What?" }] },
    { role: "assistant", content: "A cat." },
    { role: "user", content: [seen("data:,b")] },
  ]);
});

test("a reply that came to nothing isn't sent, a system prompt comes first", () => {
  const conversation = new Conversation("d");
  conversation.turns = [
    { role: "user", text: "a" },
    { role: "assistant", text: "" },
  ];
  assert.deepEqual(conversation.messages("be brief"), [
    { role: "system", content: "be brief" },
    { role: "user", content: "a" },
  ]);
});
