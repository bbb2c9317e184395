// Markdown texts, a JSON list on stdin, to HTML as an independent renderer writes it.

import { parse } from "./markdown.js";

const escape = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");
const VOID = new Set(["br", "hr"]);

function html(node) {
  if (typeof node === "string") return escape(node);
  const children = node.children.map(html).join("");
  if (VOID.has(node.tag)) return `<${node.tag}>`;
  if (node.tag === "pre") return `<pre><code${node.attrs.language ? ` class="language-${node.attrs.language}"` : ""}>${children}</code></pre>`;
  if (node.tag === "table") {
    const [head, ...rows] = node.children.map(html);
    return `<table><thead>${head}</thead>${rows.length ? `<tbody>${rows.join("")}</tbody>` : ""}</table>`;
  }
  const side = node.attrs.class ? ` style="text-align:${node.attrs.class}"` : "";
  const href = node.attrs.href ? ` href="${escape(node.attrs.href)}"` : "";
  const start = node.attrs.start ? ` start="${node.attrs.start}"` : "";
  return `<${node.tag}${side}${href}${start}>${children}</${node.tag}>`;
}

let input = "";
for await (const chunk of process.stdin) input += chunk;
console.log(JSON.stringify(JSON.parse(input).map((text) => parse(text).map(html).join(""))));
