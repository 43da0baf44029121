import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { cpSync, existsSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { describe, test } from "node:test";
import vm from "node:vm";

import * as ort from "onnxruntime-node";

import { loadProgram, readCheckpoint, saveModel, Session } from "../../dist/index.js";
import { arraysOf, batchesOf, clientPrograms, expectedOf, folderOf, HALF, NETWORKS, REPOSITORY, STEPS, temporaryFolder } from "../fixtures.mjs";

const VERSION = createRequire(import.meta.url)("onnxruntime-node/package.json").version;
const folder = temporaryFolder();

/** Bitwise where Python has the same ONNX Runtime; other versions of it round differently. */
function assertSame(actual, expected, version, what) {
  if (version === VERSION) return assert.equal(actual, expected, what);
  assert.ok(Math.abs(actual - expected) <= 1e-4 * Math.max(1, Math.abs(expected)), `${what}: ${actual}, and ${expected} in Python`);
}

function assertSameFigures(actual, expected, version, what) {
  assert.deepEqual(Object.keys(actual).sort(), Object.keys(expected).sort());
  for (const [name, value] of Object.entries(expected)) assertSame(actual[name], value, version, `${what}, ${name}`);
}

function assertSameArrays(actual, expected, isExact, what) {
  assert.deepEqual([...actual.keys()].sort(), [...expected.keys()].sort());
  for (const [name, array] of expected) {
    const other = actual.get(name);
    assert.equal(other.dtype, array.dtype, `${what}, ${name}`);
    assert.deepEqual([...other.shape], [...array.shape], `${what}, ${name}`);
    if (isExact || name === "rng/key" || name === "step") assert.deepEqual(other.data, array.data, `${what}, ${name}`);
  }
}

for (const network of NETWORKS) {
  describe(network, () => {
    const open = async (options = {}) => Session.open(await loadProgram(join(folderOf(network), "program")), { seed: 7, threads: 1, ...options });

    test("trains bit for bit as Python, and its checkpoint is Python's", async () => {
      const [expected, batches, session] = [expectedOf(network), batchesOf(network), await open()];
      const isExact = expected.onnxruntime === VERSION;
      assertSameArrays(await session.state(), arraysOf(join(folderOf(network), "initial.safetensors")), true, "initial state");
      const losses = [];
      for (let step = 0; step < STEPS; step++) {
        if (step === HALF) await session.saveCheckpoint(join(folder, `${network}.safetensors`), { position: step });
        const figures = await session.step(batches[step % 10]);
        assertSameFigures(figures, expected.steps[step], expected.onnxruntime, `step ${step}`);
        losses.push(figures.loss);
      }
      const mean = (values) => values.reduce((sum, value) => sum + value) / values.length;
      assert.ok(mean(losses.slice(-10)) < 0.9 * mean(losses.slice(0, 10)), "it learns");
      assert.equal(session.stepCount, STEPS);
      assertSameArrays(await session.state(), arraysOf(join(folderOf(network), "final.safetensors")), isExact, "final state");
      const [own, python] = [`${folder}/${network}.safetensors`, join(folderOf(network), "half.safetensors")].map((path) => readCheckpoint(readFileSync(path)));
      assertSameArrays(own.state, python.state, isExact, "checkpoint");
      for (const key of ["step", "identity", "engine", "extra"]) assert.deepEqual(own[key], python[key]);
      if (isExact) assert.ok(readFileSync(`${folder}/${network}.safetensors`).equals(readFileSync(join(folderOf(network), "half.safetensors"))), "byte for byte");

      assertSameFigures(await session.evaluate(batches[0]), expected.evaluated, expected.onnxruntime, "evaluate");
      assertSameFigures(await session.evaluateData(batches), expected.evaluated_data, expected.onnxruntime, "evaluateData");
      if (expected.averaged) assertSameFigures(await session.evaluate(batches[0], "average"), expected.averaged, expected.onnxruntime, "average");
      const predicted = new Map(Object.entries(await session.predict(batches[0])));
      assertSameArrays(predicted, arraysOf(join(folderOf(network), "predicted.safetensors")), isExact, "predict");
      await session.close();
    });

    test("goes on from Python's checkpoint as if never interrupted", async () => {
      const [expected, batches, session] = [expectedOf(network), batchesOf(network), await open({ seed: 3 })];
      assert.deepEqual(await session.restore(join(folderOf(network), "half.safetensors")), { position: HALF });
      assert.equal(session.stepCount, HALF);
      for (let step = HALF; step < HALF + 20; step++) {
        assertSameFigures(await session.step(batches[step % 10]), expected.steps[step], expected.onnxruntime, `step ${step}`);
      }
      await session.close();
    });

    test("exports the model that Python exports", async () => {
      const [session, batch] = [await open(), batchesOf(network)[0]];
      await session.loadState(arraysOf(join(folderOf(network), "final.safetensors")));
      const path = join(folder, `${network}.onnx`);
      await saveModel(session, path);
      const run = async (file) => {
        const opened = await ort.InferenceSession.create(file, { intraOpNumThreads: 1 });
        return opened.run(Object.fromEntries(opened.inputNames.map((name) => [name, new ort.Tensor(batch[name].dtype, batch[name].data, batch[name].shape)])));
      };
      const [own, python] = [await run(path), await run(join(folderOf(network), "tuned.onnx"))];
      const predicted = await session.predict(batch);
      assert.deepEqual(Object.keys(own), Object.keys(python));
      for (const [name, { data }] of Object.entries(own)) {
        assert.deepEqual(data, python[name].data);
        data.forEach((value, place) => assert.ok(Math.abs(value - predicted[name].data[place]) <= 1e-5 * Math.max(1, Math.abs(value)), name));
      }
      await session.close();
    });
  });
}

for (const network of ["residual", "dropout"]) {
  test(`Python goes on from the client's checkpoint of ${network}`, async () => {
    const [expected, batches] = [expectedOf(network), batchesOf(network)];
    const session = await Session.open(await loadProgram(join(folderOf(network), "program")), { seed: 7, threads: 1 });
    for (let step = 0; step < 30; step++) await session.step(batches[step % 10]);
    await session.saveCheckpoint(join(folder, "early.safetensors"));
    const figures = JSON.parse(clientPrograms("resume", folderOf(network), join(folder, "early.safetensors"), "30", "50"));
    figures.forEach((step, index) => assertSameFigures(step, expected.steps[30 + index], expected.onnxruntime, `step ${30 + index}`));
    await session.close();
  });
}

test("a zip and one ONNX file train as the folder does, and take its checkpoints", async () => {
  const [expected, batches] = [expectedOf("dropout"), batchesOf("dropout")];
  for (const file of ["program.zip", "program.onnx"]) {
    const program = await loadProgram(join(folderOf("dropout"), file));
    const session = await Session.open(program, { seed: 7, threads: 1 });
    for (let step = 0; step < 20; step++) assertSameFigures(await session.step(batches[step % 10]), expected.steps[step], expected.onnxruntime, `${file}, step ${step}`);
    await session.restore(join(folderOf("dropout"), "half.safetensors"));
    assertSameFigures(await session.step(batches[0]), expected.steps[HALF], expected.onnxruntime, file);
    await session.exportModel();
    await session.close();
  }
});

for (const network of ["residual", "dropout"]) {
  test(`gradients of ${network} and an update by them are a step`, async () => {
    const batches = batchesOf(network);
    const program = await loadProgram(join(folderOf(network), "program"));
    const [whole, halves] = [await Session.open(program, { threads: 1 }), await Session.open(program, { threads: 1 })];
    for (let step = 0; step < 5; step++) {
      const figures = await whole.step(batches[step]);
      const gradients = await halves.gradients(batches[step]);
      assert.equal(gradients.get("loss").data[0], figures.loss);
      await halves.applyGradients(gradients);
    }
    assertSameArrays(await halves.state(), await whole.state(), false, "state");
    const [state, other] = [await whole.state(), await halves.state()];
    for (const [name, { data }] of state) {
      data.forEach((value, place) => assert.ok(Math.abs(Number(value) - Number(other.get(name).data[place])) < 1e-6, name));
    }
  });
}

test("steps are reported, one after the other, as events and by an iterator", async () => {
  const batches = batchesOf("convolutional");
  const session = await Session.open(await loadProgram(join(folderOf("convolutional"), "program")));
  const seen = [];
  session.addEventListener("step", ({ detail }) => seen.push(detail));
  const given = [];
  for await (const report of session.train(() => batches.slice(0, 3), { epochs: 2 })) given.push(report);
  assert.deepEqual(seen, given);
  assert.deepEqual(given.map(({ epoch, step }) => [epoch, step]), [[1, 1], [1, 2], [1, 3], [2, 4], [2, 5], [2, 6]]);
  const together = await Promise.all(batches.map((batch) => session.step(batch)));
  assert.equal(together.length, 10);
  assert.equal(session.stepCount, 16);
});

test("the first program of the documentation runs", () => {
  const page = readFileSync(join(REPOSITORY, "docs", "browser.md"), "utf8");
  const [, snippet] = /```js\n(.*?)```/s.exec(page);
  const scripts = join(REPOSITORY, "clients", "js", "test", ".fixtures"); // in the package, which may import itself by name
  mkdirSync(scripts, { recursive: true });
  const path = join(scripts, "first-program.mjs");
  writeFileSync(path, snippet);
  const place = temporaryFolder();
  cpSync(join(folderOf("residual"), "program"), join(place, "program"), { recursive: true });
  const { status, stdout, stderr } = spawnSync(process.execPath, [path], { cwd: place, encoding: "utf8" });
  assert.equal(status, 0, stderr);
  const losses = stdout.trim().split("\n").map((line) => Number(line.split(" ")[1]));
  assert.equal(losses.length, 10);
  assert.ok(losses[9] < losses[0] && existsSync(join(place, "last.safetensors")) && existsSync(join(place, "tuned.onnx")));
});

test("plain numbers and typed arrays are taken as batches", async () => {
  const [batch] = batchesOf("dropout");
  const program = await loadProgram(join(folderOf("dropout"), "program"));
  const figures = [];
  for (const given of [
    batch,
    { x: batch.x.data, labels: batch.labels.data },
    { x: Float64Array.from(batch.x.data), labels: Int32Array.from(batch.labels.data, Number) },
    { x: Array.from({ length: 8 }, (_, row) => [...batch.x.data.slice(12 * row, 12 * row + 12)]), labels: [...batch.labels.data].map(Number) },
  ]) {
    const session = await Session.open(program, { threads: 1 });
    figures.push(await session.step(given));
  }
  for (const other of figures) assert.deepEqual(other, figures[0]);
});

test("calls run in the order in which they were made, on the data as it was then", async () => {
  const [batch, other] = batchesOf("convolutional");
  const program = await loadProgram(join(folderOf("convolutional"), "program"));
  const open = () => Session.open(program, { threads: 1 });
  const path = join(folder, "order.safetensors");
  const [waiting, together] = [await open(), await open()];
  const expected = [await waiting.step(batch), await waiting.step(other), await waiting.evaluate(batch)];
  waiting.metadata = { saved: "first" };
  await waiting.saveCheckpoint(path, { count: 1 });

  const mutable = { x: { ...batch.x, data: batch.x.data.slice() }, labels: [...batch.labels.data].map(Number) };
  const extra = { count: 1 };
  const calls = [together.step(mutable)];
  mutable.x.data.fill(NaN);
  mutable.labels.fill(0);
  calls.push(together.step(other), together.evaluate(batch));
  together.metadata = { saved: "first" };
  calls.push(together.saveCheckpoint(`${path}-2`, extra));
  extra.count = 2;
  together.metadata.saved = "second";
  assert.deepEqual((await Promise.all(calls)).slice(0, 3), expected);
  assert.ok(readFileSync(path).equals(readFileSync(`${path}-2`)));

  const state = await waiting.state();
  const bytes = readFileSync(path);
  const mixed = [together.step(batch), together.restore(bytes), together.step(batch), together.saveCheckpoint(`${path}-3`), together.loadState(state), together.step(other)];
  bytes.fill(0);
  for (const { data } of state.values()) data.fill(data instanceof BigInt64Array ? 0n : 0);
  const results = await Promise.all(mixed);
  assert.deepEqual(results[5], await waiting.step(other));
  const saved = readCheckpoint(readFileSync(`${path}-3`));
  assert.deepEqual([saved.step, saved.metadata], [3, { saved: "first" }]);
  await Promise.all([waiting.close(), together.close()]);
});

test("arrays of other realms, of rows and of tensors of ONNX Runtime are taken", async () => {
  const [batch] = batchesOf("dropout");
  const program = await loadProgram(join(folderOf("dropout"), "program"));
  const x = vm.runInNewContext("Float32Array.from(numbers)", { numbers: [...batch.x.data] });
  assert.ok(!(x instanceof Float32Array));
  const rows = Array.from({ length: 8 }, (_, row) => batch.x.data.slice(12 * row, 12 * row + 12));
  const figures = [];
  for (const given of [batch.x, x, { data: x, shape: [8, 12] }, rows, new ort.Tensor("float32", batch.x.data, [8, 12])]) {
    const session = await Session.open(program, { threads: 1 });
    figures.push(await session.step({ x: given, labels: batch.labels }));
    await session.close();
  }
  for (const other of figures) assert.deepEqual(other, figures[0]);
});
