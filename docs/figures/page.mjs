// Takes the pictures of the page in docs/figures from a server that is at work:
//
//     PENSTOCK_PLAYWRIGHT=… node docs/figures/page.mjs http://127.0.0.1:8000 docs/figures
//
// PENSTOCK_PLAYWRIGHT is a folder whose node_modules has playwright-core. Keep the server busy
// meanwhile, for instance with `penstock bench serve`.

import { createRequire } from "node:module";
import { join } from "node:path";

const { chromium } = createRequire(join(process.env.PENSTOCK_PLAYWRIGHT, "x.js"))("playwright-core");
const [url, folder] = process.argv.slice(2);
const SHOTS = [
  ["page-light", { viewport: { width: 1440, height: 960 }, colorScheme: "light" }],
  ["page-dark", { viewport: { width: 1440, height: 960 }, colorScheme: "dark" }],
  ["page-phone", { viewport: { width: 390, height: 844 }, deviceScaleFactor: 2, colorScheme: "light" }],
];

const browser = await chromium.launch({
  executablePath: process.env.PENSTOCK_CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox"],
});
for (const [name, options] of SHOTS) {
  const page = await (await browser.newContext(options)).newPage();
  await page.goto(url);
  await page.waitForFunction(() => document.querySelector("#model").textContent);
  await page.waitForTimeout(6000); // so that the curves have something to show
  await page.fill("#input", "Tell me a story about a little dog and the sea.");
  await page.press("#input", "Enter");
  await page.waitForSelector("body:not(.busy) .reply:last-child .actions button", { timeout: 60_000 });
  await page.waitForTimeout(1000);
  await page.screenshot({ path: join(folder, `${name}.png`) });
}
await browser.close();
