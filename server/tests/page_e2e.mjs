// The page in a real browser: it shows the model, streams an answer, moves its charts, and works by keyboard.
//
//     node page_e2e.mjs OXIDE_RUN BUNDLE SCREENSHOT_FOLDER
//
// Needs playwright-core (NODE_PATH or node_modules) and Chromium (CHROMIUM, or /usr/bin/chromium).

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { createRequire } from "node:module";
import { mkdtempSync, readFileSync, existsSync, mkdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const require = createRequire(process.env.PLAYWRIGHT_FROM || import.meta.url);
const { chromium } = require("playwright-core");
const [program, bundle, shots] = process.argv.slice(2);
const KEY = "a key";
const scratch = mkdtempSync(join(tmpdir(), "oxide-page-"));
mkdirSync(shots, { recursive: true });

async function startServer() {
  const portFile = join(scratch, "port");
  const server = spawn(program, [bundle, "serve", "--port", "0", "--port-file", portFile, "--api-key", KEY], { stdio: ["ignore", "ignore", "pipe"] });
  let log = "";
  server.stderr.on("data", text => { log += text; });
  for (let tries = 0; !existsSync(portFile); tries++) {
    assert(server.exitCode === null && tries < 1200, `the server does not start: ${log}`);
    await new Promise(done => setTimeout(done, 50));
  }
  return { server, url: `http://127.0.0.1:${readFileSync(portFile, "utf8").trim()}` };
}

const points = (page, chart, line) => page.locator("#charts figure").nth(chart).locator("polyline").nth(line).getAttribute("points");
const heights = text => (text || "").split(" ").filter(Boolean).map(point => Number(point.split(",")[1]));

async function drive(browser, url) {
  const page = await browser.newPage({ viewport: { width: 1280, height: 800 }, colorScheme: "light" });
  const outside = [], errors = [];
  page.on("request", request => { if (!request.url().startsWith(url) && !request.url().startsWith("data:")) outside.push(request.url()); });
  page.on("pageerror", error => errors.push(String(error)));
  page.setDefaultTimeout(90_000);
  await page.goto(url);

  // Without a key the page says so and opens the field for it.
  await page.getByText("needs an API key").waitFor();
  await page.getByLabel("API key").fill(KEY);
  await page.getByText("ready", { exact: true }).waitFor();
  await page.getByText("tokens", { exact: false }).first().waitFor();
  assert.match(await page.locator("#card").innerText(), /Seal[\s\S]*Context[\s\S]*Device|Seal[\s\S]*Device[\s\S]*Context/);
  assert.equal(await page.title(), "oxide-tiny · Oxide");
  await page.getByLabel("Tokens at most").fill("200");
  await page.getByLabel("Temperature").fill("0");
  await page.getByText("Options").click();

  // A question by keyboard alone: the answer grows while it streams.
  await page.keyboard.press("Escape");
  await page.locator("#log").focus();
  await page.keyboard.press("/");
  await page.keyboard.type("Count from 1 to 100");
  await page.evaluate(() => {
    window.lengths = [];
    new MutationObserver(() => window.lengths.push(document.querySelector(".assistant .said")?.textContent.length || 0))
      .observe(document.getElementById("log"), { subtree: true, childList: true, characterData: true });
  });
  await page.keyboard.press("Enter");
  await page.locator(".assistant .note", { hasText: "tokens" }).waitFor();
  const answer = await page.locator(".assistant .said").innerText();
  assert.match(answer, /^1, 2, 3, 4, 5/);
  const lengths = new Set(await page.evaluate(() => window.lengths));
  assert(lengths.size > 2, `the answer came in pieces: ${[...lengths]}`);
  assert.match(await page.locator(".assistant .note").innerText(), /\d+ tokens · first after [\d.]+ ms/);

  // The chart of tokens shows it.
  await page.waitForFunction(() => {
    const line = document.querySelector("#charts polyline");
    return line.getAttribute("points").split(" ").some(point => Number(point.split(",")[1]) < 98);
  });
  assert(heights(await points(page, 0, 0)).some(height => height < 98), "the line leaves the ground");
  assert.match(await page.locator("#charts figure").first().innerText(), /drawn \d/);

  // A second turn, with history; then light and dark.
  await page.getByLabel("Message", { exact: true }).fill("Hello\nthere");
  await page.keyboard.press("Enter");
  await page.locator(".assistant .note", { hasText: "tokens" }).nth(1).waitFor();
  await page.waitForTimeout(2500);
  await page.screenshot({ path: join(shots, "page-light.png") });
  const background = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const light = await background();
  for (let presses = 0; presses < 2; presses++) await page.locator("#theme").press("Enter");
  assert.notEqual(await background(), light, "the dark colours differ");
  await page.screenshot({ path: join(shots, "page-dark.png") });

  // What the server refuses is shown, and the page goes on.
  await page.locator("#settings summary").click();
  await page.getByLabel("Temperature").fill("9");
  await page.getByLabel("Message", { exact: true }).fill("x");
  await page.getByLabel("Message", { exact: true }).press("Enter");
  await page.locator(".note.error", { hasText: "temperature" }).waitFor();
  await page.getByLabel("Temperature").fill("");

  // Markup of a user or a model is text.
  await page.getByLabel("Message", { exact: true }).fill("<img src=x onerror=alert(1)>");
  await page.getByLabel("Message", { exact: true }).press("Enter");
  await page.locator(".user .said", { hasText: "<img src=x" }).waitFor();
  assert.equal(await page.locator("#log img").count(), 0);

  // Escape stops a stream; New starts over.
  await page.getByLabel("Tokens at most").fill("");
  await page.locator("#send", { hasText: "Send" }).waitFor();
  await page.locator("#clear").click();
  assert.equal(await page.locator(".turn").count(), 0);
  await page.setViewportSize({ width: 420, height: 800 });
  await page.screenshot({ path: join(shots, "page-narrow.png") });
  assert.equal(await page.evaluate(() => document.documentElement.scrollWidth <= window.innerWidth), true, "nothing sticks out on a narrow screen");
  assert.deepEqual({ outside, errors }, { outside: [], errors: [] });
}

const { server, url } = await startServer();
try {
  const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM || "/usr/bin/chromium",
    args: ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"],
  });
  try { await drive(browser, url); } finally { await browser.close(); }
  console.log("page: ok");
} finally {
  server.kill("SIGTERM");
  rmSync(scratch, { recursive: true, force: true });
}
