// The page of examples/browser, used as a visitor uses it. Screenshots go to the folder that BURNISH_SCREENSHOTS names.
import assert from "node:assert/strict";
import { existsSync, readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";

import * as ort from "onnxruntime-node";

import { python, REPOSITORY, temporaryFolder } from "../fixtures.mjs";
import { browse, chromium, serve } from "./page.mjs";

const missing = chromium() ? false : "Chromium is not here: apt-get install chromium, or set CHROMIUM to its path";

describe("the page that trains digits", { skip: missing }, () => {
  const folder = temporaryFolder();
  let server, browser, page, errors;

  const text = (id) => page.$eval(`#${id}`, (element) => element.textContent);
  const until = (condition, ...parameters) => page.waitForFunction(condition, { timeout: 120_000 }, ...parameters);
  const click = (id) => page.click(`#${id}`);
  const screenshot = async (name) => process.env.BURNISH_SCREENSHOTS && (await page.screenshot({ path: join(process.env.BURNISH_SCREENSHOTS, `${name}.png`), fullPage: true }));

  /** Draw lines through points between 0 and 1. */
  async function draw(...points) {
    const pad = await page.$("#pad");
    await pad.scrollIntoView();
    const { x, y, width, height } = await pad.boundingBox();
    const at = ([right, down]) => [x + right * width, y + down * height];
    await page.mouse.move(...at(points[0]));
    await page.mouse.down();
    for (const point of points.slice(1)) await page.mouse.move(...at(point), { steps: 6 });
    await page.mouse.up();
  }

  before(async () => {
    python(join(REPOSITORY, "examples", "browser", "prepare.py"), "--output", join(folder, "page"));
    server = await serve({ page: join(folder, "page") });
    ({ browser, page, errors } = await browse(`${server.address}/page/index.html`));
    const outside = [];
    page.on("request", (request) => !request.url().startsWith(server.address) && !/^(data|blob):/.test(request.url()) && outside.push(request.url()));
    page.outside = outside;
    const devtools = await browser.target().createCDPSession();
    await devtools.send("Browser.setDownloadBehavior", { behavior: "allow", downloadPath: folder });
  });
  after(async () => {
    await browser?.close();
    server?.close();
  });

  test("learns all ten digits", async () => {
    await page.setViewport({ width: 1200, height: 860, deviceScaleFactor: 1 });
    await until(() => document.querySelector("#status").textContent.startsWith("Ready"));
    const first = parseFloat(await text("accuracy"));
    await click("train");
    await until(() => Number(document.querySelector("#steps").textContent) >= 200);
    await draw([0.5, 0.15], [0.5, 0.85]);
    await page.waitForSelector("#bars .most");
    await screenshot("training");
    assert.equal(await page.$eval("#bars .most span", (element) => element.textContent), "1");
    await click("train");
    await until(() => document.querySelector("#status").textContent === "Paused");
    const trained = parseFloat(await text("accuracy"));
    assert.ok(first < 55 && trained > 90, `${first} %, then ${trained} %`);
    assert.match(await text("cached"), /^1437 images have been through the frozen layers, each once/);
  });

  test("keeps the state in the browser, and starts over", async () => {
    await click("save");
    await until(() => document.querySelector("#status").textContent.startsWith("Saved"));
    const [steps, accuracy] = [await text("steps"), await text("accuracy")];
    await click("reset");
    await until(() => document.querySelector("#status").textContent === "Started over");
    assert.equal(await text("steps"), "0");
    assert.ok(parseFloat(await text("accuracy")) < 55);
    await click("restore");
    await until(() => document.querySelector("#status").textContent.startsWith("Restored"));
    assert.deepEqual([await text("steps"), await text("accuracy")], [steps, accuracy]);
  });

  test("takes drawings among the training images", async () => {
    await click("clear");
    await draw([0.3, 0.2], [0.7, 0.2], [0.45, 0.85]);
    await page.waitForSelector("#bars .most");
    await page.click("#digits button:nth-child(8)");
    await until(() => document.querySelector("#own").textContent.startsWith("1 of your drawings is"));
    assert.equal(await page.$("#bars .most"), null);
  });

  test("exports a model that ONNX Runtime loads", async () => {
    await click("export");
    const path = join(folder, "digits.onnx");
    for (let tries = 0; tries < 100 && !existsSync(path); tries++) await new Promise((resolve) => setTimeout(resolve, 100));
    assert.ok(existsSync(path), readdirSync(folder).join());
    const session = await ort.InferenceSession.create(path);
    const bytes = readFileSync(join(folder, "page", "digits.bin"));
    const sizes = JSON.parse(readFileSync(join(folder, "page", "digits.json"), "utf8"));
    const begin = sizes.train * 65;
    const images = Float32Array.from(bytes.subarray(begin, begin + sizes.test * 64), (value) => value / 16);
    const { logits } = await session.run({ x: new ort.Tensor("float32", images, [sizes.test, 1, 8, 8]) });
    let right = 0;
    for (let sample = 0; sample < sizes.test; sample++) {
      const scores = logits.data.slice(sample * 10, sample * 10 + 10);
      if (scores.indexOf(Math.max(...scores)) === bytes[begin + sizes.test * 64 + sample]) right++;
    }
    assert.equal(`${((100 * right) / sizes.test).toFixed(1)} %`, await text("accuracy"));
  });

  test("fits a phone, loads nothing from elsewhere, and logs no error", async () => {
    await page.setViewport({ width: 390, height: 844, deviceScaleFactor: 2 });
    await draw([0.3, 0.2], [0.7, 0.2], [0.45, 0.85]);
    await page.waitForSelector("#bars .most");
    await screenshot("phone");
    assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth));
    assert.deepEqual(page.outside, []);
    assert.deepEqual(errors, []);
  });
});
