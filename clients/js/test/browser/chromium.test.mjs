import assert from "node:assert/strict";
import { dirname, join } from "node:path";
import { after, before, describe, test } from "node:test";
import { fileURLToPath } from "node:url";

import { CACHED, clientPrograms, expectedOf, folderOf, HALF, NETWORKS, temporaryFolder } from "../fixtures.mjs";
import { browse, chromium, serve, WEBGPU } from "./page.mjs";

const DIST = join(dirname(fileURLToPath(import.meta.url)), "..", "..", "dist");
const TOLERANCE = 1e-4;
const missing = chromium() ? false : "Chromium is not here: apt-get install chromium, or set CHROMIUM to its path";

let server;
before(async () => {
  server = await serve({ dist: DIST, fixtures: dirname(folderOf("residual")) });
  for (const network of [...NETWORKS, CACHED]) folderOf(network);
});
after(() => server.close());

/** Put what the tests in the page share on `window`. */
async function prepare(page) {
  await page.evaluate(async () => {
    window.client = await import("/dist/page/burnish-runtime.js");
    const { readSafetensors } = await import("/dist/safetensors.js");
    const bytes = async (path) => new Uint8Array(await (await fetch(path)).arrayBuffer());
    window.bytes = bytes;
    window.batchesOf = async (network) => {
      const batches = Array.from({ length: 10 }, () => ({}));
      for (const [name, array] of readSafetensors(await bytes(`/fixtures/${network}/batches.safetensors`), network).arrays) {
        const [index, input] = name.split("/");
        batches[Number(index)][input] = array;
      }
      return batches;
    };
    window.open_ = async (network, { file = "program", ...options } = {}) =>
      client.Session.open(await client.loadProgram(`/fixtures/${network}/${file}`), { seed: 7, wasmPaths: "/dist/page/wasm/", threads: 1, ...options });
    // Two epochs from cached features: the losses, and for how many samples the backbone ran.
    window.trainCached = async (session, network) => {
      const [cache, batches, losses] = [new client.FeatureCache(session), await batchesOf(network), []];
      for (let step = 0; step < 20; step++) {
        const { x, labels } = batches[step % 10];
        const samples = Array.from({ length: labels.data.length }, (_, row) => (step % 10) * labels.data.length + row);
        losses.push((await session.step({ ...(await cache.features(samples, () => ({ x }))), labels })).loss);
      }
      return { losses, computed: cache.computed };
    };
    window.train = async (network, steps, options) => {
      const [session, batches] = [await open_(network, options), await batchesOf(network)];
      const losses = [];
      for (let step = 0; step < steps; step++) losses.push((await session.step(batches[step % 10])).loss);
      return losses;
    };
    // Errors lose their class on the way out of the page.
    window.failure = async (work) => {
      try {
        await work();
      } catch (error) {
        return `${error.name}: ${error.message}`;
      }
      return "nothing";
    };
  });
}

function assertClose(losses, network, begin = 0) {
  const expected = expectedOf(network).steps;
  const apart = losses.map((loss, index) => Math.abs(loss - expected[begin + index].loss) / Math.max(1, Math.abs(expected[begin + index].loss)));
  assert.ok(Math.max(...apart) <= TOLERANCE, `${network}: ${Math.max(...apart)} apart`);
  return Math.max(...apart);
}

describe("WebAssembly in Chromium", { skip: missing }, () => {
  let browser, page, errors;
  before(async () => {
    ({ browser, page, errors } = await browse(server.address));
    await prepare(page);
  });
  after(() => browser?.close());

  for (const network of NETWORKS) {
    test(`${network} trains as in Python`, async (context) => {
      const apart = assertClose(await page.evaluate((name) => train(name, 100), network), network);
      context.diagnostic(`${apart.toExponential(1)} from Python after 100 steps`);
    });
  }

  test("draws the bits that Python draws for dropout", async () => {
    const key = await page.evaluate(async () => {
      const [session, batches] = [await open_("dropout"), await batchesOf("dropout")];
      for (let step = 0; step < 20; step++) await session.step(batches[step % 10]);
      return [...(await session.state()).get("rng/key").data].map(String);
    });
    const { loadProgram, Session } = await import("../../dist/index.js");
    const { batchesOf } = await import("../fixtures.mjs");
    const session = await Session.open(await loadProgram(join(folderOf("dropout"), "program")), { seed: 7 });
    for (let step = 0; step < 20; step++) await session.step(batchesOf("dropout")[step % 10]);
    assert.deepEqual(key, [...(await session.state()).get("rng/key").data].map(String));
  });

  test("trains on two threads", async () => {
    assert.equal(await page.evaluate(() => crossOriginIsolated), true);
    const other = await browser.newPage();
    await other.goto(server.address);
    await prepare(other);
    assertClose(await other.evaluate(() => train("residual", 30, { threads: 2 })), "residual");
    await other.close();
  });

  test("trains a zip and one ONNX file", async () => {
    for (const file of ["program.zip", "program.onnx"]) assertClose(await page.evaluate((name) => train("dropout", 10, { file: name }), file), "dropout");
  });

  test("goes on from Python's checkpoint, and Python from its own, by way of IndexedDB", async () => {
    const { losses, checkpoint } = await page.evaluate(async (half) => {
      const [session, batches] = [await open_("residual"), await batchesOf("residual")];
      await session.restore(await bytes("/fixtures/residual/half.safetensors"));
      await session.saveCheckpoint("half", { from: "Chromium" });
      const other = await open_("residual", { seed: 1 });
      const extra = await other.restore("half");
      if (extra.from !== "Chromium" || other.stepCount !== half) throw new Error("not what was saved");
      const losses = [];
      for (let step = half; step < half + 10; step++) losses.push((await other.step(batches[step % 10])).loss);
      return { losses, checkpoint: [...(await other.checkpoint())] };
    }, HALF);
    assertClose(losses, "residual", HALF);
    const { writeFileSync } = await import("node:fs");
    const path = join(temporaryFolder(), "chromium.safetensors");
    writeFileSync(path, Uint8Array.from(checkpoint));
    const figures = JSON.parse(clientPrograms("resume", folderOf("residual"), path, String(HALF + 10), String(HALF + 20)));
    assertClose(figures.map(({ loss }) => loss), "residual", HALF + 10);
  });

  test("trains from cached features, on the page and in a worker", async () => {
    const results = await page.evaluate(async (network) => {
      const worker = new Worker("/dist/page/worker.js", { type: "module" });
      const options = { seed: 7, wasmPaths: new URL("/dist/page/wasm/", location).href, threads: 1 };
      const sessions = [await open_(network), await client.WorkerSession.open(worker, `/fixtures/${network}/program`, options)];
      const results = [];
      for (const session of sessions) results.push(await trainCached(session, network));
      for (const session of sessions) await session.close();
      return results;
    }, CACHED);
    for (const { losses, computed } of results) {
      assertClose(losses, CACHED);
      assert.equal(computed, 80);
    }
  });

  test("trains in a worker, while the page goes on", async () => {
    const { losses, frames, error, exported } = await page.evaluate(async () => {
      const worker = new Worker("/dist/page/worker.js", { type: "module" });
      const session = await client.WorkerSession.open(worker, "/fixtures/residual/program", { seed: 7, wasmPaths: new URL("/dist/page/wasm/", location).href, threads: 1 });
      const batches = await batchesOf("residual");
      const [losses, events] = [[], []];
      session.addEventListener("step", ({ detail }) => events.push(detail.step));
      let frames = 0;
      const timer = setInterval(() => frames++, 1);
      for (let step = 0; step < 20; step++) losses.push((await session.step(batches[step % 10])).loss);
      clearInterval(timer);
      if (events.at(-1) !== 20 || session.stepCount !== 20) throw new Error(`events ${events}`);
      const error = await failure(() => session.step({ x: batches[0].x }));
      const exported = (await session.exportModel()).model.length;
      await session.close();
      return { losses, frames, error, exported };
    });
    assertClose(losses, "residual");
    assert.ok(frames > 10, `${frames}`);
    assert.match(error, /^InputError: The batch lacks the input 'labels'/);
    assert.ok(exported > 1000);
  });

  test("takes in a worker what a session takes", async () => {
    const { losses, figures, expected, missing, metadata, epochs } = await page.evaluate(async () => {
      const worker = new Worker("/dist/page/worker.js", { type: "module" });
      const wasmPaths = "/dist/page/wasm/";
      const session = await client.WorkerSession.open(worker, "/fixtures/convolutional/program", { seed: 7, wasmPaths, threads: 1, sessionOptions: { logSeverityLevel: 4 } });
      const [own, batches] = [await open_("convolutional"), await batchesOf("convolutional")];
      const missing = ["train", "evaluate", "evaluateTotals", "evaluateData", "predict", "features", "gradients", "applyGradients", "state", "loadState", "checkpoint", "saveCheckpoint", "restore", "exportModel", "close"].filter((name) => typeof session[name] !== "function");
      const { x, labels } = batches[0];
      // As the module of ONNX Runtime makes them: the elements are behind a getter, which no copy has.
      class Tensor {
        type = "float32";
        dims = x.shape;
        location = "cpu";
        get data() { return x.data; }
      }
      const [losses, epochs] = [[(await session.step({ x: new Tensor(), labels })).loss], []];
      await own.step(batches[0]);
      for await (const { epoch, figures } of session.train([batches[1]], { epochs: 2 })) (epochs.push(epoch), losses.push(figures.loss));
      for (let turn = 0; turn < 2; turn++) await own.step(batches[1]);
      await own.applyGradients(await own.gradients(batches[2]));
      await session.applyGradients(await session.gradients(batches[2]));
      const [figures, expected] = [await session.evaluateData(batches), await own.evaluateData(batches)];
      session.metadata = { note: "first" };
      const bytes = await session.checkpoint();
      session.metadata = {};
      await session.restore(bytes);
      await session.close();
      return { losses, figures, expected, missing, metadata: session.metadata, epochs };
    });
    assert.equal(losses.length, 3);
    assert.deepEqual(epochs, [1, 2]);
    assert.deepEqual(missing, []);
    assert.deepEqual(figures, expected);
    assert.deepEqual(metadata, { note: "first" });
  });

  test("no call waits for ever", async () => {
    const told = await page.evaluate(async () => {
      const settled = (work) => Promise.race([failure(work), new Promise((resolve) => setTimeout(resolve, 20_000, "it waits"))]);
      const options = { wasmPaths: new URL("/dist/page/wasm/", location).href, threads: 1 };
      const worker = () => new Worker("/dist/page/worker.js", { type: "module" });
      const open = (place) => client.WorkerSession.open(place, "/fixtures/convolutional/program", options);
      const [batch] = await batchesOf("convolutional");
      const told = {};
      const closed = await open(worker());
      await Promise.all([closed.close(), closed.close()]);
      told.closed = await settled(() => closed.step(batch));
      const place = worker();
      const ended = await open(place);
      told.second = await settled(() => open(place));
      const steps = Array.from({ length: 50 }, () => settled(() => ended.step(batch)));
      place.terminate();
      told.terminated = (await Promise.all(steps)).at(-1);
      told.after = await settled(() => ended.state());
      await ended.close();
      told.unsendable = await settled(async () => (await open(worker())).step({ ...batch, x: () => 1 }));
      told.option = await settled(() => client.WorkerSession.open(worker(), "/fixtures/convolutional/program", { ort: {} }));
      told.missing = await settled(() => open(new Worker("/dist/page/nowhere.js", { type: "module" })));
      const request = (ask) => new Promise((resolve, reject) => Object.assign(ask, { onsuccess: () => resolve(ask.result), onerror: () => reject(ask.error), onblocked: () => reject(new Error("blocked")) }));
      const session = await open_("convolutional");
      await session.saveCheckpoint("kept");
      await request(indexedDB.deleteDatabase("burnish"));
      (await request(indexedDB.open("burnish", 1))).close(); // it has no store for checkpoints
      told.foreign = await settled(() => session.saveCheckpoint("kept"));
      await request(indexedDB.deleteDatabase("burnish"));
      (await request(indexedDB.open("burnish", 7))).close();
      told.newer = await settled(() => session.restore("kept"));
      await request(indexedDB.deleteDatabase("burnish"));
      await session.saveCheckpoint("kept");
      return told;
    });
    assert.match(told.closed, /^EngineError: The session is closed/);
    assert.match(told.second, /^EngineError: The worker has a session already/);
    for (const text of [told.terminated, told.after]) assert.match(text, /^EngineError: The worker was terminated/);
    assert.match(told.unsendable, /^ConfigurationError: step was given what cannot be sent to a worker/);
    assert.match(told.option, /^ConfigurationError: WorkerSession.open has no option 'ort': a module cannot be sent/);
    assert.match(told.missing, /^EngineError: The worker failed/);
    for (const text of [told.foreign, told.newer]) assert.match(text, /^CheckpointError: The browser's database 'burnish' of this page is another program's/);
  });

  test("says what to do where ONNX Runtime is not found", async () => {
    const other = await browser.newPage();
    await other.goto(server.address);
    await prepare(other);
    const of = (wasmPaths) => other.evaluate((paths) => failure(() => open_("convolutional", { wasmPaths: paths })), wasmPaths);
    assert.match(await of("/nowhere/"), /^EngineError: .*Give wasmPaths, the address where the page serves/);
    assert.match(await of("/dist/page/wasm/"), /^EngineError: .*load the page again: ONNX Runtime tries once/);
    await other.reload();
    await prepare(other);
    assert.equal(await of("/dist/page/wasm/"), "nothing");
    await other.close();
  });

  test("names what is wrong", async () => {
    const of = (text) => page.evaluate((code) => failure(() => eval(code)), text);
    assert.match(await of('client.loadProgram("/fixtures/nothing")'), /^CheckpointError: .* has no program.json/);
    assert.match(await of('open_("residual", { backend: "cpu" })'), /^ConfigurationError: backend 'cpu' is that of Node/);
    assert.match(await of('open_("residual", { backend: "webgpu" })'), /^EngineError: backend 'webgpu': there is no WebGPU|cannot be loaded/);
    assert.match(await of('open_("residual").then((session) => session.restore("none"))'), /^CheckpointError: There is no checkpoint 'none'/);
    assert.deepEqual(errors.filter((text) => !/404/.test(text)), []);
  });
});

describe("WebGPU in Chromium, by SwiftShader", { skip: missing }, () => {
  let browser, page;
  before(async () => {
    ({ browser, page } = await browse(server.address, WEBGPU));
    await prepare(page);
  });
  after(() => browser?.close());

  test("has a device", async () => {
    assert.equal(await page.evaluate(async () => Boolean(await navigator.gpu?.requestAdapter())), true);
  });

  for (const network of NETWORKS) {
    test(`${network}, compiled for WebGPU, trains as in Python`, async (context) => {
      const losses = await page.evaluate((name) => train(name, 30, { backend: "webgpu", file: "webgpu" }), network);
      context.diagnostic(`${assertClose(losses, network).toExponential(1)} from Python after 30 steps`);
    });
  }

  test("computes and caches features, which come back from the device", async () => {
    const { losses, computed } = await page.evaluate(async (network) => trainCached(await open_(network, { backend: "webgpu", file: "webgpu" }), network), CACHED);
    assertClose(losses, CACHED);
    assert.equal(computed, 80);
  });

  test("keeps the state on the device, and gives it back", async () => {
    const { same, predicted } = await page.evaluate(async () => {
      const [session, batches] = [await open_("convolutional", { backend: "webgpu", file: "webgpu" }), await batchesOf("convolutional")];
      for (let step = 0; step < 5; step++) await session.step(batches[step]);
      const checkpoint = await session.checkpoint();
      const other = await open_("convolutional", { backend: "wasm", file: "webgpu" });
      await other.restore(checkpoint);
      const [one, two] = [await session.evaluate(batches[0]), await other.evaluate(batches[0])];
      const { logits } = await session.predict({ x: batches[0].x });
      await session.loadState(await other.state());
      const again = await session.evaluate(batches[0]);
      await session.close();
      return { same: [one.loss, two.loss, again.loss], predicted: logits.shape };
    });
    assert.ok(Math.abs(same[0] - same[1]) < 1e-5 && same[0] === same[2], `${same}`);
    assert.deepEqual(predicted, [8, 5]);
  });

  test("refuses by name what was not compiled for it", async () => {
    for (const network of ["residual", "mobile"]) {
      const error = await page.evaluate((name) => failure(() => train(name, 1, { backend: "webgpu" })), network);
      assert.match(error, /^(Engine|UnsupportedOperator)Error: The step graph cannot be (loaded|run) by ONNX Runtime \(backend 'webgpu'\)/);
      assert.match(error, /burnish compile --target webgpu/);
    }
  });

  test("trains what needs nothing else", async () => {
    assertClose(await page.evaluate(() => train("convolutional", 30, { backend: "webgpu" })), "convolutional");
  });
});
