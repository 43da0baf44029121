// MobileNetV2 at 224 x 224 with a frozen backbone, whole and with cached features, in Node and in Chromium, beside Python.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { after, before, describe, test } from "node:test";
import { fileURLToPath } from "node:url";

import { FeatureCache, loadProgram, Session } from "../../dist/index.js";
import { browse, chromium, serve } from "../browser/page.mjs";
import { arraysOf, expectedOf, folderOf } from "../fixtures.mjs";

const VERSION = createRequire(import.meta.url)("onnxruntime-node/package.json").version;
const DIST = join(dirname(fileURLToPath(import.meta.url)), "..", "..", "dist");
const [WHOLE, CACHED] = ["mobilenet-frozen", "mobilenet-cached"];
const BATCHES = 2;
const TOLERANCE = 1e-4;

/** Train two epochs of the batches, from cached features where the program has them; for how many samples the backbone ran. */
async function train(session, batches, steps, cache) {
  const losses = [];
  for (let step = 0; step < steps; step++) {
    const index = step % batches.length;
    const { x, labels } = batches[index];
    const samples = Array.from({ length: labels.data.length }, (_, row) => index * labels.data.length + row);
    const data = cache ? await cache.features(samples, () => ({ x })) : { x };
    losses.push((await session.step({ ...data, labels })).loss);
  }
  return { losses, computed: cache?.computed };
}

for (const network of [WHOLE, CACHED]) {
  describe(network, () => {
    let expected, batches;
    before(() => {
      expected = expectedOf(network);
      batches = Array.from({ length: BATCHES }, () => ({}));
      for (const [name, array] of arraysOf(join(folderOf(network), "batches.safetensors"))) {
        const [index, input] = name.split("/");
        batches[Number(index)][input] = array;
      }
    });

    const compare = (context, { losses, computed }, exact) => {
      const apart = losses.map((loss, step) => Math.abs(loss - expected.losses[step]) / Math.max(1, Math.abs(expected.losses[step])));
      context.diagnostic(`${Math.max(...apart).toExponential(1)} from Python after ${losses.length} steps`);
      assert.ok(Math.max(...apart) <= (exact ? 0 : TOLERANCE), `${losses}, and ${expected.losses} in Python`);
      assert.equal(computed, network === CACHED ? BATCHES * batches[0].labels.data.length : undefined);
    };

    test("trains in Node as in Python", async (context) => {
      const session = await Session.open(await loadProgram(join(folderOf(network), "program")), { threads: 1 });
      const cache = network === CACHED ? new FeatureCache(session) : undefined;
      const results = await train(session, batches, expected.losses.length, cache);
      compare(context, results, expected.onnxruntime === VERSION);
      await session.close();
    });

    test("trains in Chromium as in Python", { skip: chromium() ? false : "Chromium is not here" }, async (context) => {
      const server = await serve({ dist: DIST, fixtures: folderOf(network) });
      const { browser, page } = await browse(server.address);
      after(async () => {
        await browser.close();
        server.close();
      });
      const results = await page.evaluate(
        async (source, steps, count, isCached) => {
          const { FeatureCache, loadProgram, Session } = await import("/dist/page/burnish-runtime.js");
          const { readSafetensors } = await import("/dist/safetensors.js");
          const bytes = new Uint8Array(await (await fetch("/fixtures/batches.safetensors")).arrayBuffer());
          const batches = Array.from({ length: count }, () => ({}));
          for (const [name, array] of readSafetensors(bytes, "batches").arrays) batches[Number(name.split("/")[0])][name.split("/")[1]] = array;
          const session = await Session.open(await loadProgram("/fixtures/program"), { threads: 1, wasmPaths: "/dist/page/wasm/" });
          return (0, eval)(`(${source})`)(session, batches, steps, isCached ? new FeatureCache(session) : undefined);
        },
        train.toString(), expected.losses.length, BATCHES, network === CACHED,
      );
      compare(context, results, false);
    });
  });
}
