import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";

import { ConfigurationError, FeatureCache, InputError, loadProgram, saveModel, Session } from "../../dist/index.js";
import { arraysOf, batchesOf, CACHED, clientPrograms, expectedOf, folderOf, temporaryFolder } from "../fixtures.mjs";

const VERSION = createRequire(import.meta.url)("onnxruntime-node/package.json").version;
const SIZE = 8;

describe("cached features of a frozen backbone", () => {
  let batches, features, expected, isExact, open;

  /** Bitwise where Python has the same ONNX Runtime. */
  const assertSame = (actual, value, what) =>
    isExact ? assert.equal(actual, value, what) : assert.ok(Math.abs(actual - value) <= 1e-4 * Math.max(1, Math.abs(value)), `${what}: ${actual}, and ${value} in Python`);
  const assertSameArrays = (actual, arrays, what) => {
    assert.deepEqual(Object.keys(actual), Object.keys(arrays));
    for (const [name, { dtype, shape, data }] of Object.entries(arrays)) {
      assert.deepEqual([actual[name].dtype, [...actual[name].shape]], [dtype, [...shape]]);
      data.forEach((value, place) => assertSame(actual[name].data[place], value, `${what}, ${name}`));
    }
  };
  const samplesOf = (batch) => Array.from({ length: SIZE }, (_, row) => batch * SIZE + row);
  /** The inputs of samples of any batches. */
  const inputsOf = (samples) => {
    const { shape } = batches[0].x;
    const size = shape.slice(1).reduce((product, extent) => product * extent);
    const x = new Float32Array(samples.length * size);
    samples.forEach((sample, row) => {
      const begin = (sample % SIZE) * size;
      x.set(batches[Math.floor(sample / SIZE)].x.data.subarray(begin, begin + size), row * size);
    });
    return { x: { data: x, shape: [samples.length, ...shape.slice(1)] } };
  };

  before(async () => {
    [batches, features, expected] = [batchesOf(CACHED), batchesOf(CACHED, "features.safetensors"), expectedOf(CACHED)];
    isExact = expected.onnxruntime === VERSION;
    const program = await loadProgram(join(folderOf(CACHED), "program"));
    open = () => Session.open(program, { seed: 7, threads: 1 });
  });

  test("are Python's, and so are the steps that begin there; the second epoch does not run the backbone", async () => {
    const session = await open();
    const cache = new FeatureCache(session);
    const folder = temporaryFolder();
    for (let step = 0; step < 20; step++) {
      const [batch, asked] = [step % 10, []];
      const own = await cache.features(samplesOf(batch), (samples) => (asked.push(...samples), inputsOf(samples)));
      assert.deepEqual(asked, step < 10 ? samplesOf(batch) : []);
      assertSameArrays(own, features[batch], `features of batch ${batch}`);
      if (step === 10) await session.saveCheckpoint(join(folder, "half.safetensors"), { position: step });
      const figures = await session.step({ ...own, labels: batches[batch].labels });
      for (const [name, value] of Object.entries(expected.steps[step])) assertSame(figures[name], value, `step ${step}, ${name}`);
    }
    assert.deepEqual([cache.computed, cache.size, cache.has(79), cache.has(80)], [80, 80, true, false]);
    assert.ok(expected.steps[19].loss < 0.9 * expected.steps[0].loss, "it learns");
    if (isExact) assert.ok(readFileSync(join(folder, "half.safetensors")).equals(readFileSync(join(folderOf(CACHED), "half.safetensors"))), "a checkpoint byte for byte");
    assertSameArrays(await session.predict(batches[0]), Object.fromEntries(arraysOf(join(folderOf(CACHED), "predicted.safetensors"))), "predict");
    await saveModel(session, join(folder, "tuned.onnx"));
    const [own, python] = [join(folder, "tuned.onnx"), join(folderOf(CACHED), "tuned.onnx")].map((path) => clientPrograms("predict", folderOf(CACHED), path));
    if (isExact) assert.deepEqual(JSON.parse(own), JSON.parse(python));
    await session.close();
  });

  test("goes on from Python's checkpoint", async () => {
    const session = await open();
    assert.deepEqual(await session.restore(join(folderOf(CACHED), "half.safetensors")), { position: 10 });
    for (let step = 10; step < 14; step++) assertSame((await session.step({ ...(await session.features(batches[step - 10])), labels: batches[step - 10].labels })).loss, expected.steps[step].loss, `step ${step}`);
    await session.close();
  });

  test("are kept up to a limit, and put together in any order", async () => {
    const session = await open();
    const bytes = Object.values(features[0]).reduce((total, { data }) => total + data.byteLength, 0) / SIZE;
    const cache = new FeatureCache(session, { limit: 10 * bytes });
    const asked = [];
    const load = (samples) => (asked.push(samples), inputsOf(samples));
    await cache.features(samplesOf(0), load);
    await cache.features(samplesOf(1), load);
    assert.deepEqual([cache.size, cache.bytes, cache.computed], [10, 10 * bytes, 16]);
    const mixed = await cache.features([12, 3, 9, 3, 40, 12], load);
    assert.deepEqual(asked[2], [12, 40]); // 3 and 9 are kept, and a sample is computed once for a batch
    for (const [name, { shape, data }] of Object.entries(mixed)) {
      const width = shape.slice(1).reduce((product, extent) => product * extent, 1);
      assert.equal(shape[0], 6);
      [12, 3, 9, 3, 40, 12].forEach((sample, row) => {
        const expectedRow = features[Math.floor(sample / SIZE)][name].data.subarray((sample % SIZE) * width, (sample % SIZE + 1) * width);
        expectedRow.forEach((value, place) => assert.ok(Math.abs(data[row * width + place] - value) <= 1e-5 * Math.max(1, Math.abs(value)), `${name} of sample ${sample}`));
      });
    }
    cache.clear();
    assert.deepEqual([cache.size, cache.bytes, cache.has(3)], [0, 0, false]);
    await session.close();
  });

  test("are refused by name where there are none, or what is given is wrong", async () => {
    const session = await open();
    const cache = new FeatureCache(session);
    const refused = (work, errorClass, pattern) => assert.rejects(work, (error) => error instanceof errorClass && pattern.test(error.message));
    const other = await Session.open(await loadProgram(join(folderOf("convolutional"), "program")), { threads: 1 });
    await refused(() => other.features(batchesOf("convolutional")[0]), ConfigurationError, /no features that are computed once: compile it with cached_features='auto'/);
    await refused(() => cache.features([0, -1], inputsOf), InputError, /samples: -1; give the number of each sample/);
    await refused(() => cache.features([], inputsOf), InputError, /samples: none/);
    await refused(() => cache.features([0, 1], () => inputsOf([0, 1, 2])), InputError, /for 2 samples: give the inputs of exactly the samples/);
    await refused(() => session.features({ y: batches[0].x }), InputError, /lacks the input 'x'.*instead it has 'y'/);
    await refused(() => session.step(batches[0]), InputError, /lacks the input '.*' .*; instead it has 'x': give what session.features, or a FeatureCache, returns/);
    assert.throws(() => new FeatureCache(session, { limit: -1 }), (error) => error instanceof ConfigurationError && /limit=-1/.test(error.message));
    for (const [axis, what] of [[1, "its samples along axis 1"], [null, "no samples"]]) {
      const elsewhere = { signature: { features: { outputs: [{ name: "steps", sample_axis: axis }] } } };
      assert.throws(() => new FeatureCache(elsewhere), (error) => error instanceof ConfigurationError && error.message.startsWith(`The feature 'steps' has ${what}, and a cache keeps samples of the first: call session.features`));
    }
    assert.equal(cache.computed, 0);
    await Promise.all([session.close(), other.close()]);
  });
});
