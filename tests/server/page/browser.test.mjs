// The page in Chromium, run by `node --test` (see test_page_browser.py and docs/page.md).
//
// PENSTOCK_PLAYWRIGHT        a folder whose node_modules has playwright-core
// PENSTOCK_CHROMIUM          the browser's executable
// PENSTOCK_PAGE_URL          a server: Penstock's own, or the fake one
// PENSTOCK_PAGE_FAKE         the fake server, whose replies are scripted
// PENSTOCK_PAGE_NO_TEMPLATE  the same with a model that has no chat template
// PENSTOCK_PAGE_KEY          the same with the key "secret"
// PENSTOCK_PAGE_SEES         the same with a model that sees pictures
// PENSTOCK_PAGE_SEVERAL      the same with two models, one of which isn't loaded
// PENSTOCK_PAGE_FULL         the same with 64 requests and 100,000 blocks

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { join } from "node:path";
import { after, before, test } from "node:test";

const { chromium } = createRequire(join(process.env.PENSTOCK_PLAYWRIGHT, "x.js"))("playwright-core");
const { PENSTOCK_PAGE_URL: URL, PENSTOCK_PAGE_FAKE: FAKE } = process.env;
const { PENSTOCK_PAGE_NO_TEMPLATE: NO_TEMPLATE, PENSTOCK_PAGE_KEY: KEY, PENSTOCK_PAGE_FULL: FULL, PENSTOCK_PAGE_SEES: SEES, PENSTOCK_PAGE_SEVERAL: SEVERAL } = process.env;
const PROMPT = "Tell a long story about a river";
const WAIT = { timeout: 60_000 };

let browser;
before(async () => {
  browser = await chromium.launch({ executablePath: process.env.PENSTOCK_CHROMIUM, args: ["--no-sandbox"] });
});
after(() => browser.close());

/** Runs `act` with a fresh page, and fails on any error of the console or the content policy. */
function onPage(name, url, act, { expected = /$^/, ...options } = {}) {
  test(name, { skip: !url && "no server for this test", timeout: 120_000 }, async () => {
    const context = await browser.newContext({ viewport: { width: 1280, height: 800 }, ...options });
    await context.grantPermissions(["clipboard-read", "clipboard-write"]);
    const page = await context.newPage();
    const wrong = [];
    page.on("pageerror", (error) => wrong.push(error.stack));
    page.on("dialog", (dialog) => wrong.push(`dialog: ${dialog.message()}`) && dialog.dismiss());
    page.on("console", (line) => ["error", "warning"].includes(line.type()) && wrong.push(line.text()));
    page.on("request", (request) => {
      if (!request.url().startsWith(url) && !request.url().startsWith("data:")) wrong.push(`outside: ${request.url()}`);
    });
    await page.addInitScript(() =>
      addEventListener("securitypolicyviolation", (event) => console.error(`CSP: ${event.violatedDirective} ${event.blockedURI}`)),
    );
    await page.goto(url);
    try {
      await act(page, context);
      assert.deepEqual(wrong.filter((text) => !expected.test(text)), []);
    } finally {
      await context.close();
    }
  });
}

const send = async (page, text) => {
  await page.fill("#input", text);
  await page.press("#input", "Enter");
};
const finished = (page) => page.waitForSelector("body:not(.busy) .reply:last-child .actions button", WAIT);
const body = (page) => page.locator(".reply").last().locator(".prose, .text");
const figures = (page) => page.locator(".figures").last().textContent();

/** Sends a text in the mode that the model can do; the page itself offers the other one. */
async function begin(page, text) {
  await page.waitForFunction(() => document.querySelector("#model").textContent);
  await page.locator("#set-max_completion_tokens").evaluate((input) => {
    input.value = 300; // a server's own default may be too few to be stopped
    input.dispatchEvent(new Event("input", { bubbles: true }));
  });
  await send(page, text);
  const offer = page.getByRole("button", { name: "Complete text instead" });
  await page.waitForFunction(
    () => document.querySelector(".trouble .quiet") || document.querySelector(".reply")?.textContent.length > 10, null, WAIT);
  if (!(await offer.count())) return;
  await offer.click();
  await page.press("#input", "Enter");
}

const REFUSED = /status of 400/; // a model without a chat template, before the page offers the other mode

onPage("a reply streams, and its figures stand below", URL, async (page) => {
  await begin(page, PROMPT);
  await page.waitForSelector(".growing");
  const lengths = new Set();
  while (await page.locator(".growing").count()) {
    lengths.add((await body(page).textContent()).length);
    await page.waitForTimeout(20);
  }
  assert.ok(lengths.size >= 3, `seen at lengths ${[...lengths]}`);
  await finished(page);
  assert.match(await figures(page), /^(cut at the token limit · )?[\d,]+ tokens? · first after .* tok\/s/);
  assert.match(await page.locator("#announce").textContent(), /\S/);
}, { expected: REFUSED });

onPage("Escape stops a reply, what came stays, and another one can be asked for", URL, async (page) => {
  await begin(page, PROMPT);
  for (let tries = 0; tries < 10; tries += 1) {
    // A small model may have ended before it can be stopped.
    await page.waitForFunction(
      () => !document.body.classList.contains("busy") || document.querySelector(".growing .prose, .growing .text")?.textContent.length > 10,
      null, WAIT);
    await page.keyboard.press("Escape");
    await finished(page);
    if (/^stopped/.test(await figures(page))) break;
    await page.getByRole("button", { name: "Regenerate" }).click();
  }
  assert.match(await figures(page), /^stopped/);
  const stopped = await body(page).textContent();
  assert.ok(stopped.length > 10);
  await page.waitForTimeout(300);
  assert.equal(await body(page).textContent(), stopped);
  await page.getByRole("button", { name: "Regenerate" }).click();
  await page.waitForSelector(".growing");
  await page.locator("#send").click(); // which is Stop meanwhile
  await finished(page);
  assert.equal(await page.locator(".reply").count(), 1);
  assert.equal(await page.locator("#send").textContent(), "Send");
}, { expected: REFUSED });

onPage("the engine's panels move", URL, async (page) => {
  await page.waitForSelector("#connection[data-state=live]", WAIT);
  await begin(page, PROMPT);
  await finished(page);
  await page.waitForFunction(() => document.querySelector("#last-step").textContent.includes("decode"));
  for (const id of ["steps", "blocks"]) {
    const drawn = await page.locator(`#${id}`).evaluate((canvas) => {
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      return data.some((byte) => byte);
    });
    assert.ok(drawn, `${id} is empty`);
    assert.match(await page.locator(`#${id}`).getAttribute("aria-label"), /\d/);
  }
  assert.match(await page.locator("#blocks-size").textContent(), /^[\d,]+ blocks of \d+ tokens/);
  assert.match(await page.locator("#ttft-99").textContent(), /\d/);
  const before = await page.locator("#last-step").textContent();
  await page.click("#new"); // a long first reply may leave a small model no room for a second
  await begin(page, PROMPT);
  await page.waitForFunction((text) => document.querySelector("#last-step").textContent !== text, before, WAIT);
}, { expected: REFUSED });

onPage("everything works from the keyboard", URL, async (page) => {
  await page.waitForFunction(() => document.querySelector("#model").textContent);
  assert.equal(await page.evaluate(() => document.activeElement.id), "input");
  await page.evaluate(() => document.activeElement.blur());
  const reached = new Set();
  for (let i = 0; i < 16; i += 1) {
    await page.keyboard.press("Tab");
    const { id, ring } = await page.evaluate(() => {
      const at = document.activeElement;
      const seen = at.name === "mode" ? at.nextElementSibling : at.id === "input" ? at.parentElement : at;
      const style = getComputedStyle(seen);
      return { id: at.id, ring: style.outlineStyle !== "none" || style.boxShadow !== "none" };
    });
    if (id) assert.ok(ring, `${id} shows no focus`);
    reached.add(id);
  }
  for (const id of ["settings-button", "new", "theme", "log", "input", "send"]) assert.ok(reached.has(id), `${id} isn't reached`);
  await page.focus("#settings-button");
  await page.keyboard.press("Enter");
  await page.focus("#set-temperature");
  await page.keyboard.type("0.5");
  await page.focus("#set-max_completion_tokens");
  await page.keyboard.type("12");
  await page.focus("#mode-chat");
  await page.keyboard.press("ArrowRight");
  assert.equal(await page.evaluate(() => document.body.dataset.mode), "complete");
  await page.focus("#input");
  await page.keyboard.type("One");
  await page.keyboard.press("Shift+Enter");
  await page.keyboard.type("upon a time");
  const request = page.waitForRequest((each) => each.method() === "POST");
  await page.keyboard.press("Enter");
  const asked = (await request).postDataJSON();
  assert.equal(asked.prompt, "One\nupon a time");
  assert.equal(asked.temperature, 0.5);
  assert.equal(asked.max_tokens, 12);
  assert.ok(!("top_p" in asked) && !("seed" in asked) && asked.stream && asked.stream_options.include_usage);
  await finished(page);
});

onPage("what was said is there after a reload, and New clears it", URL, async (page) => {
  await begin(page, PROMPT);
  await finished(page);
  const text = await body(page).textContent();
  await page.reload();
  assert.equal(await body(page).textContent(), text);
  await page.click("#new");
  await page.waitForSelector(".greeting");
  await page.reload();
  await page.waitForSelector(".greeting");
}, { expected: REFUSED });

/** Texts whose contrast with what lies behind them is below 4.5 (WCAG 2.2, 1.4.3). */
const faint = (page) =>
  page.evaluate(() => {
    const channel = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    const parse = (colour) => {
      const found = colour.match(/[\d.]+/g).map(Number);
      const scale = colour.startsWith("color(") ? 1 : 255;
      return { light: [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => sum + weight * channel(found[i] / scale), 0), alpha: found[3] ?? 1 };
    };
    const ground = (element) => {
      for (let at = element; at; at = at.parentElement) {
        const colour = parse(getComputedStyle(at).backgroundColor);
        if (colour.alpha > 0) return colour.light;
      }
      return 1;
    };
    const found = [];
    for (const element of document.querySelectorAll("body *")) {
      const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
      if (!own || !element.checkVisibility()) continue;
      const [a, b] = [parse(getComputedStyle(element).color).light, ground(element)];
      const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      if (contrast < 4.5) found.push(`${element.textContent.slice(0, 30)}: ${contrast.toFixed(2)}`);
    }
    return found;
  });

for (const colorScheme of ["light", "dark"]) {
  onPage(`${colorScheme}: every text has contrast, and the switch turns it round`, URL, async (page) => {
    await page.click("#settings-button");
    await begin(page, FAKE ? "markdown" : PROMPT);
    await finished(page);
    await page.waitForSelector("#connection[data-state=live]", WAIT);
    const ground = () => page.evaluate(() => getComputedStyle(document.documentElement).backgroundColor);
    const first = await ground();
    assert.deepEqual(await faint(page), []);
    await page.selectOption("#theme", colorScheme === "dark" ? "light" : "dark");
    assert.notEqual(await ground(), first);
    assert.deepEqual(await faint(page), []);
    await page.reload();
    assert.notEqual(await ground(), first);
  }, { colorScheme, expected: REFUSED });
}

for (const width of [360, 768]) {
  onPage(`${width} pixels wide: nothing is cut off or pushed aside`, URL, async (page) => {
    await begin(page, FAKE ? "markdown" : PROMPT);
    await finished(page);
    await page.click("#settings-button");
    await page.waitForSelector("#connection[data-state=live]", WAIT);
    const wide = await page.evaluate(() => ({ page: document.documentElement.scrollWidth, window: innerWidth }));
    assert.ok(wide.page <= wide.window, JSON.stringify(wide));
    await page.click("#glance");
    await page.waitForFunction(() => document.querySelector("#engine").getBoundingClientRect().top < 200);
    for (const id of ["input", "send", "settings-button", "new", "theme"]) {
      const box = await page.locator(`#${id}`).boundingBox();
      assert.ok(box.x >= 0 && box.x + box.width <= width, `${id}: ${JSON.stringify(box)}`);
    }
  }, { viewport: { width, height: 740 }, hasTouch: true, expected: REFUSED });
}

onPage("Markdown becomes elements, code can be copied", FAKE, async (page) => {
  await send(page, "markdown");
  await finished(page);
  for (const tag of ["h2", "strong", "em", "ol > li", "code", "table th.right", "figure.code pre", "blockquote"]) {
    assert.ok(await page.locator(`.prose ${tag}`).count(), `no ${tag}`);
  }
  const link = page.locator(".prose a");
  assert.equal(await link.getAttribute("rel"), "noopener noreferrer");
  await page.click(".copy-code");
  assert.match(await page.evaluate(() => navigator.clipboard.readText()), /^def floor_s/);
  assert.equal(await page.locator(".copy-code").textContent(), "Copied");
  assert.match(await figures(page), /78% of the floor \(memory\) · 96 of 128 prompt tokens cached$/);
});

onPage("elements that are complete aren't built again while a text grows", FAKE, async (page) => {
  await send(page, "markdown");
  await page.waitForSelector(".growing .prose ol > li");
  await page.evaluate(() => (document.querySelector(".prose h2").marked = document.querySelector(".prose ol").marked = true));
  await finished(page);
  assert.ok(await page.evaluate(() => document.querySelector(".prose h2").marked && document.querySelector(".prose ol").marked));
});

onPage("a hostile reply is text", FAKE, async (page) => {
  await send(page, "hostile");
  await finished(page);
  assert.equal(await page.locator("#log :is(img, script, svg)").count(), 0);
  assert.match(await body(page).textContent(), /<img src=x onerror=alert\(1\)>/);
  assert.deepEqual(await page.locator(".prose a").evaluateAll((links) => links.map((link) => link.href)), ["https://example.org/ok"]);
});

onPage("the last message can be edited", FAKE, async (page) => {
  await send(page, "first");
  await finished(page);
  await send(page, "secnd");
  await finished(page);
  await page.getByRole("button", { name: "Edit" }).click();
  assert.equal(await page.inputValue("#input"), "secnd");
  const request = page.waitForRequest((each) => each.method() === "POST");
  await send(page, "second");
  const { messages } = (await request).postDataJSON();
  assert.deepEqual(messages.map(({ content }) => content), ["first", "You said: first", "second"]);
  await finished(page);
  assert.deepEqual(await page.locator(".said").allTextContents(), ["first", "second"]);
});

const PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";
const file = (name, mimeType = "image/png") => ({ name, mimeType, buffer: Buffer.from(PNG, "base64") });

onPage("pictures are picked, taken back and sent, and come back with an edit", SEES, async (page) => {
  await page.waitForSelector("#attach");
  await page.setInputFiles("#files", [file("a.png"), file("b.png"), file("notes.txt", "text/plain")]);
  await page.waitForSelector("#tray .picked");
  assert.equal(await page.locator("#tray-trouble").textContent(), "notes.txt isn't a picture.");
  await page.getByRole("button", { name: "Remove picture 2" }).click();
  assert.equal(await page.locator("#tray .picked").count(), 1);
  assert.ok(await page.locator("#tray-trouble").isHidden());
  const url = `data:image/png;base64,${PNG}`;
  const seen = { type: "image_url", image_url: { url } };
  let request = page.waitForRequest((each) => each.method() === "POST");
  await send(page, "What is it?");
  assert.deepEqual((await request).postDataJSON().messages, [
    { role: "user", content: [seen, { type: "text", text: "What is it?" }] },
  ]);
  await finished(page);
  assert.equal(await page.locator("#tray .picked").count(), 0);
  assert.equal(await page.locator(".user img").getAttribute("src"), url);
  assert.ok(await page.locator(".user img").evaluate((image) => image.naturalWidth === 1));
  await page.getByRole("button", { name: "Edit" }).click();
  assert.equal(await page.locator("#tray .picked").count(), 1);
  await page.evaluate((data) => { // pasted
    const [bytes, given] = [Uint8Array.from(atob(data), (c) => c.charCodeAt(0)), new DataTransfer()];
    given.items.add(new File([bytes], "c.png", { type: "image/png" }));
    document.querySelector("#input").dispatchEvent(new ClipboardEvent("paste", { clipboardData: given, bubbles: true }));
  }, PNG);
  await page.waitForFunction(() => document.querySelectorAll("#tray .picked").length === 2);
  request = page.waitForRequest((each) => each.method() === "POST");
  await send(page, ""); // pictures alone are a message
  assert.deepEqual((await request).postDataJSON().messages, [{ role: "user", content: [seen, seen] }]);
  await finished(page);
  assert.equal(await body(page).textContent(), "You said: image_url image_url");
  await page.reload();
  await page.waitForSelector(".user");
  assert.match(await page.locator(".user").textContent(), /2 pictures, which this browser hasn't kept/);
  await page.click("label:has(#mode-complete)");
  assert.ok(await page.locator("#attach").isHidden());
});

onPage("a model that sees nothing is shown nothing", FAKE, async (page) => {
  await page.waitForFunction(() => document.querySelector("#model").textContent);
  assert.ok(await page.locator("#attach").isHidden());
  await page.setInputFiles("#files", [file("a.png")]);
  assert.equal(await page.locator("#tray .picked").count(), 0);
});

onPage("settings are sent where they are filled in, and a wrong one is pointed at", FAKE, async (page) => {
  await page.click("#settings-button");
  await page.fill("#system", "Be brief.");
  await page.fill("#set-top_p", "0.9");
  await page.fill("#set-seed", "7");
  await page.fill("#stop-at", "END\n###");
  await page.fill("#set-temperature", "9");
  await send(page, "hello");
  assert.equal(await page.locator(".turn").count(), 0);
  assert.equal(await page.evaluate(() => document.activeElement.id), "set-temperature");
  await page.fill("#set-temperature", "");
  const request = page.waitForRequest((each) => each.method() === "POST");
  await page.press("#input", "Enter");
  const { messages, model, stream, stream_options, ...rest } = (await request).postDataJSON();
  assert.deepEqual(rest, { top_p: 0.9, seed: 7, stop: ["END", "###"] });
  assert.deepEqual(messages[0], { role: "system", content: "Be brief." });
  await finished(page);
  await page.reload();
  assert.equal(await page.inputValue("#set-top_p"), "0.9");
});

onPage("errors are shown where the reply would stand", FAKE, async (page) => {
  await send(page, "refuse");
  await finished(page);
  assert.equal(await page.locator(".trouble:visible").textContent(), "The prompt has 600 tokens, and the model reads 512.");
  await send(page, "break here");
  await finished(page);
  assert.equal(await page.locator(".trouble:visible").last().textContent(), "The engine has stopped.");
  assert.equal(await body(page).textContent(), "You said");
}, { expected: REFUSED });

onPage("one model is named, several are offered", SEVERAL, async (page) => {
  await page.waitForSelector("#models:visible");
  assert.deepEqual(await page.locator("#models option").allTextContents(), ["stories-8m", "other <b>"]);
  assert.equal(await page.locator("#model:visible").count(), 0);
  const asked = page.waitForRequest((each) => each.url().includes("/page/events"));
  await page.selectOption("#models", "other <b>");
  assert.match((await asked).url(), /\?model=other%20%3Cb%3E$/);
  assert.equal(await page.title(), "other <b> – Penstock");
  const sent = page.waitForRequest((each) => each.method() === "POST");
  await send(page, "Hello");
  assert.equal((await sent).postDataJSON().model, "other <b>");
  await finished(page);
  await page.reload();
  await page.waitForFunction(() => document.title.startsWith("other"));
  assert.equal(await page.inputValue("#models"), "other <b>");
});

onPage("while the page is hidden it asks for nothing", FAKE, async (page) => {
  const hide = (hidden) =>
    page.evaluate((value) => {
      Object.defineProperty(document, "hidden", { configurable: true, get: () => value });
      document.dispatchEvent(new Event("visibilitychange"));
    }, hidden);
  const label = () => page.locator("#steps").getAttribute("aria-label");
  await page.waitForSelector("#connection[data-state=live]");
  const ended = page.waitForEvent("requestfailed", (request) => request.url().includes("/page/events"));
  const later = page.waitForRequest("**/page/events*", { timeout: 500 }).catch(() => null);
  await hide(true);
  await ended;
  assert.equal(await later, null);
  const still = await label();
  await page.waitForTimeout(700);
  assert.equal(await label(), still);
  await hide(false);
  await page.waitForFunction((text) => document.querySelector("#steps").getAttribute("aria-label") !== text, still);
});

onPage("a connection that broke is made again", FAKE, async (page) => {
  let failures = 2;
  await page.route("**/page/events*", (route) => {
    failures -= 1;
    return failures < 0 ? route.continue() : route.abort();
  });
  await page.reload();
  await page.waitForSelector("#connection[data-state=lost]");
  await page.waitForSelector("#connection[data-state=live]", WAIT);
  assert.equal(failures, -1);
}, { expected: /ERR_FAILED/ });

onPage("without a chat template the page offers completion, and remembers it", NO_TEMPLATE, async (page) => {
  await send(page, "Once upon a time");
  await page.getByRole("button", { name: "Complete text instead" }).click();
  assert.equal(await page.inputValue("#input"), "Once upon a time");
  await page.press("#input", "Enter");
  await finished(page);
  assert.match(await body(page).textContent(), /^Once upon a time there was a little boat\./);
  const request = page.waitForRequest((each) => each.method() === "POST");
  await page.getByRole("button", { name: "Continue" }).click();
  assert.match((await request).postDataJSON().prompt, /^Once upon a time there was .* sang to it\.$/);
  await finished(page);
  assert.match(await body(page).textContent(), /sang to it\. there was/);
  await page.reload();
  assert.equal(await page.evaluate(() => document.body.dataset.mode), "complete");
}, { expected: REFUSED });

onPage("a key is asked for, tried, and forgotten with the tab", KEY, async (page, context) => {
  await page.waitForSelector("#key-dialog[open]");
  await page.keyboard.type("wrong");
  await page.keyboard.press("Enter");
  await page.waitForSelector("#key-note:visible");
  await page.fill("#key", "secret");
  await page.keyboard.press("Enter");
  await page.waitForSelector("#connection[data-state=live]", WAIT);
  await send(page, "hello");
  await finished(page);
  assert.equal(await body(page).textContent(), "You said: hello");
  assert.ok(!(await page.evaluate(() => JSON.stringify({ ...localStorage }))).includes("secret"));
  const other = await context.newPage();
  await other.goto(page.url());
  await other.waitForSelector("#key-dialog[open]");
  await other.keyboard.press("Escape");
  await send(other, "and now"); // for which a key is needed, after all
  await other.waitForSelector("#key-dialog[open]");
  await other.fill("#key", "secret");
  await other.keyboard.press("Enter");
  await finished(other);
  assert.equal(await body(other).textContent(), "You said: and now");
  await other.waitForSelector("#connection[data-state=live]", WAIT);
}, { expected: /status of 401/ });

onPage("64 requests and 100,000 blocks are shown", FULL, async (page) => {
  await page.waitForSelector("#connection[data-state=live]", WAIT);
  assert.equal(await page.locator("#requests tr:visible").count(), 64);
  assert.match(await page.locator("#blocks").getAttribute("aria-label"), /^Map of 100,000 blocks: [\d,]+ free/);
  const marked = await page.evaluate(async () => {
    const rows = [...document.querySelectorAll("#requests tr:not([hidden])")];
    const long = [];
    new PerformanceObserver((list) => long.push(...list.getEntries().map((entry) => entry.duration))).observe({ type: "longtask" });
    await new Promise((go) => setTimeout(go, 2000));
    return { kept: rows.filter((row) => row.isConnected).length, long };
  });
  assert.ok(marked.kept > 32, "rows are built anew");
  console.log(`# tasks of over 50 ms within 2 s: ${JSON.stringify(marked.long)}`);
});
