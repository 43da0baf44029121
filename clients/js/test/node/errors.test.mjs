import assert from "node:assert/strict";
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { before, describe, test } from "node:test";

import {
  BurnishError, CheckpointError, ConfigurationError, EngineError, FeatureCache, InputError, loadProgram, ModelError, NonFiniteLossError, Program, readCheckpoint,
  saveModel, Session,
} from "../../dist/index.js";
import { BLANK, DIGEST, putDigest } from "../../dist/digest.js";
import { readSafetensors, writeSafetensors } from "../../dist/safetensors.js";
import { batchesOf, folderOf, temporaryFolder } from "../fixtures.mjs";

let program, session, batch;
const folder = temporaryFolder();

before(async () => {
  program = await loadProgram(join(folderOf("dropout"), "program"));
  session = await Session.open(program, { threads: 1 });
  [batch] = batchesOf("dropout");
});

/** Expect an error of a class whose text has all of these. */
async function refused(work, errorClass, ...texts) {
  await assert.rejects(work, (error) => {
    assert.ok(error instanceof errorClass, `${error.name}: ${error.message}`);
    assert.ok(error instanceof BurnishError);
    assert.equal(error.name, errorClass.name);
    for (const text of texts) assert.ok(error.message.includes(text), `'${error.message}' lacks '${text}'`);
    return true;
  });
}

const endless = [];
endless.push(endless);
const sentAway = new Float32Array(96);
structuredClone(sentAway.buffer, { transfer: [sentAway.buffer] });

describe("a batch", () => {
  const wrong = {
    "has a fraction as a class index": [() => ({ ...batch, labels: [0, 1, 2, 0.5, 0, 0, 0, 0] }), "holds 0.5 at [3]"],
    "has more elements than its shape": [() => ({ ...batch, x: { data: new Float32Array(3), shape: [8, 12] } }), "has 3 elements, and shape [8, 12] has 96"],
    "has elements that fit no shape": [() => ({ ...batch, x: new Float32Array(97) }), "97 elements without a shape"],
    "has rows of different lengths": [() => ({ ...batch, x: [[1, 2], [3]] }), "rows of different lengths"],
    "holds text": [() => ({ ...batch, x: [["a"]] }), 'holds "a", which is not a number'],
    "holds what float32 cannot": [() => ({ ...batch, x: new Float64Array(96).fill(1e300) }), "holds 1e+300 at [0, 0]", "too large for float32"],
    "holds nothing where a number belongs": [() => ({ ...batch, x: [Array(12).fill(1), [1, , 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]] }), "holds undefined, which is not a number, at [1, 1]"],
    "is nested deeper in one place": [() => ({ ...batch, x: [Array(12).fill(1), [[1], ...Array(11).fill(2)]] }), "holds a list of 1, which is not a number, at [1, 0]"],
    "has a number in place of a row": [() => ({ ...batch, x: [Array(12).fill(1), 3] }), "holds 3 at [1], which is no row"],
    "has as many elements as the first rows, in others": [() => ({ ...batch, x: [[1, 2], [3], [4, 5, 6]] }), "2 at [0] and 1 at [1]"],
    "has rows of another kind": [() => ({ ...batch, x: [new Float32Array(12), new Float64Array(12)] }), "holds an object (Float64Array) at [1], which is no row of float32"],
    "has rows of pixels": [() => ({ ...batch, x: [new Uint8Array(12), new Uint8Array(12)] }), "'x' has dtype uint8, expected float32"],
    "calls its elements by another dtype": [() => ({ ...batch, x: { data: new Float64Array(96), shape: [8, 12], dtype: "float32" } }), "has elements of float64 that are called float32"],
    "has a dtype that is none": [() => ({ ...batch, x: { data: new Float32Array(96), shape: [8, 12], dtype: "float" } }), "unknown dtype float"],
    "has a shape that is none": [() => ({ ...batch, x: { data: new Float32Array(96), shape: [8, -12] } }), "the shape [8, -12]"],
    "holds itself": [() => ({ ...batch, x: endless }), "The input 'x' is nested more than 32 deep"],
    "has a buffer that was sent away": [() => ({ ...batch, x: sentAway }), "The input 'x' is empty along axis 0"],
    "is on a device": [() => ({ ...batch, x: { location: "gpu-buffer", type: "float32", dims: [8, 12], data: null } }), "elements are on a device", "tensor.getData()"],
    "is a map": [() => new Map(Object.entries(batch)), "object of arrays by input name"],
    "is no object": [() => [batch], "object of arrays by input name"],
  };
  for (const [name, [make, ...texts]] of Object.entries(wrong)) {
    test(`that ${name}`, async () => {
      const before = session.stepCount;
      await refused(() => session.step(make()), InputError, ...texts);
      assert.equal(session.stepCount, before);
    });
  }
});

test("hyperparameters", async () => {
  for (const lr of ["0.1", null, undefined, [0.1]]) await refused(() => session.step(batch, { lr }), ConfigurationError, "'lr' is ", "not negative");
  await refused(() => session.step(batch, 0.1), ConfigurationError, "Hyperparameters are an object", "not 0.1");
  await refused(async () => session.train([batch], { lr: 0.1 }), ConfigurationError, "train has no option 'lr'", "{ hyperparameters: { lr: 0.01 } }");
});

test("a loss that is not finite leaves the state as it was", async () => {
  const own = await Session.open(program, { threads: 1 });
  await own.step(batch);
  const before = await own.state();
  await refused(() => own.step({ ...batch, x: new Float32Array(96).fill(NaN) }), NonFiniteLossError, "loss at step 1 is nan", "state is kept");
  assert.deepEqual(await own.state(), before);
  await own.step(batch);
});

test("a state that does not fit leaves the one that is there, whole", async () => {
  const own = await Session.open(program, { threads: 1 });
  const before = await own.state();
  const changed = (change) => {
    const state = new Map([...before].map(([name, tensor]) => [name, { ...tensor, data: tensor.data.map((value) => value) }]));
    for (const { data } of state.values()) if (data instanceof Float32Array) data.fill(0.25);
    change(state);
    return state;
  };
  const last = [...before.keys()].at(-1);
  for (const [change, text] of [
    [(state) => state.delete(last), `missing '${last}'`],
    [(state) => state.set("param/other", state.get(last)), "unknown 'param/other'"],
    [(state) => state.set("param/first.bias", { ...before.get("param/first.bias"), data: new Float64Array(16) }), "elements of float64 that are called float32"],
    [(state) => state.set("param/first.bias", { ...before.get("param/first.bias"), data: new Float32Array(1) }), "'param/first.bias' has 1 elements"],
    [(state) => state.set(last, [1]), `'${last}' has no typed array`],
    [(state) => state.set(last, null), `'${last}' has null`],
  ]) {
    await refused(() => own.loadState(changed(change)), ConfigurationError, text, "session.state()");
    assert.deepEqual(await own.state(), before);
  }
  await refused(() => own.loadState(Object.fromEntries(before)), ConfigurationError, "no Map of arrays by name");
  const gradients = await own.gradients(batch);
  gradients.set("next:rng/key", { dtype: "uint32", shape: [2], data: new Int32Array(2) });
  await refused(() => own.applyGradients(gradients), InputError, "'next:rng/key' has elements of int32 that are called uint32");
  await refused(() => own.applyGradients(new Map()), InputError, "missing 'grad:", "session.gradients");
  assert.deepEqual(await own.state(), before);
  await own.close();
});

test("options", async () => {
  await refused(() => Session.open(program, { backend: "cuda" }), ConfigurationError, "unknown 'cuda'", "'wasm'");
  for (const threads of [0, 1025]) await refused(() => Session.open(program, { threads }), ConfigurationError, `threads=${threads}: give a whole number from 1 to 1024`);
  await refused(() => Session.open(program, { seed: 0.5 }), ConfigurationError, "seed=0.5");
  await refused(() => Session.open(program, { state: new Map() }), ConfigurationError, "missing");
  await refused(() => Session.open(program, { thread: 1 }), ConfigurationError, "Session.open has no option 'thread'", "threads");
  await refused(() => Session.open(program, "cpu"), ConfigurationError, 'takes options as an object, not "cpu"');
  await refused(() => Session.open(program, { ort: {} }), ConfigurationError, "ort=", "import * as ort");
  await refused(() => Session.open(program, { sessionOptions: [] }), ConfigurationError, "sessionOptions=a list of 0");
  await refused(async () => session.train([batch], { epochs: 0 }), ConfigurationError, "epochs=0");
  await refused(async () => session.train(3).next(), InputError, "The batches are 3");
  await refused(() => session.evaluateData(batch), InputError, "The batches are an object");
  await refused(() => session.evaluate(batch, { parameters: "average" }), ConfigurationError, "parameters=an object");
  await refused(() => session.exportModel({ fold: true }), ConfigurationError, "exportModel has no option 'fold'");
  await refused(async () => saveModel(session, join(folder, "m.onnx"), { dataName: "m" }), ConfigurationError, "saveModel has no option 'dataName'");
  for (const path of [null, ""]) await refused(async () => saveModel(session, path), ConfigurationError, "A model is saved to a path, not");
  for (const path of ["a\0b", "x".repeat(5000)]) {
    await refused(() => saveModel(session, path), CheckpointError, "could not be written");
    await refused(() => session.saveCheckpoint(path), CheckpointError, "could not be written");
  }
  for (const extra of [{ a: "\ud800" }, { "\udfff": 1 }]) await refused(() => session.checkpoint(extra), ConfigurationError, "half of a surrogate pair");
  await refused(async () => new FeatureCache(session, { size: 3 }), ConfigurationError, "FeatureCache has no option 'size'");
  await refused(async () => new FeatureCache(session, { limit: "3" }), ConfigurationError, "limit=\"3\"");
  const plain = await Session.open(await loadProgram(join(folderOf("residual"), "program")));
  await refused(() => plain.evaluate(batchesOf("residual")[0], "average"), ConfigurationError, "keeps no average");
  await Promise.all([plain.close(), plain.close()]);
  await refused(() => plain.step(batchesOf("residual")[0]), EngineError, "The session is closed");
});

describe("a program", () => {
  const copy = (change) => {
    const path = mkdtempSync(join(folder, "program-"));
    cpSync(join(folderOf("dropout"), "program"), path, { recursive: true });
    change(path);
    return path;
  };
  const edited = (file, edit) => copy((path) => writeFileSync(join(path, file), edit(readFileSync(join(path, file)))));
  const flipped = (bytes) => (bytes[bytes.length >> 1] ^= 1, bytes);

  test("that is not there", () => refused(() => loadProgram(join(folder, "nowhere")), CheckpointError, "has no program.json", "Give the folder"));
  test("without a file", () => refused(() => loadProgram(copy((path) => rmSync(join(path, "state.safetensors")))), CheckpointError, "state.safetensors is missing"));
  test("whose weights changed", () => refused(() => loadProgram(edited("state.safetensors", flipped)), CheckpointError, "state.safetensors has changed since it was written"));
  test("whose weights are cut", () => refused(() => loadProgram(edited("state.safetensors", (bytes) => bytes.subarray(9))), CheckpointError, "bytes, and"));
  test("whose graph changed", async () => {
    const broken = await loadProgram(edited("step.onnx", flipped));
    await refused(async () => (await Session.open(broken)).step(batch), CheckpointError, "step.onnx has changed since it was written");
  });
  test("whose manifest changed", () => {
    const edit = (bytes) => bytes.toString().replace('"minimum": 0', '"minimum": 1');
    return refused(() => loadProgram(edited("program.json", edit)), CheckpointError, "program.json has changed since it was written");
  });
  test("whose manifest is no JSON", () => refused(() => loadProgram(edited("program.json", (bytes) => bytes.subarray(0, 900))), CheckpointError, "program.json cannot be read"));
  test("of a newer format", () => {
    const edit = (bytes) => bytes.toString().replace('"version": 3', '"version": 9');
    return refused(() => loadProgram(edited("program.json", edit)), CheckpointError, "format version 9", "update burnish-runtime");
  });
  test("of an older format", () => {
    const edit = (bytes) => bytes.toString().replace('"version": 3', '"version": 2');
    return refused(() => loadProgram(edited("program.json", edit)), CheckpointError, "format version 2", "burnish compile MODEL -o");
  });
  test("that names a file outside", async () => {
    const edit = (bytes) => {
      const manifest = JSON.parse(bytes);
      manifest.files["../elsewhere"] = { bytes: 1, sha256: "" };
      return JSON.stringify({ ...manifest, [DIGEST]: BLANK });
    };
    const path = edited("program.json", edit);
    const manifest = new Uint8Array(readFileSync(join(path, "program.json")));
    await putDigest(manifest);
    writeFileSync(join(path, "program.json"), manifest);
    await refused(() => loadProgram(path), CheckpointError, "'../elsewhere', which lies outside the folder");
  });
  test("with a flipped bit anywhere in its manifest", async () => {
    const path = copy(() => {});
    const bytes = readFileSync(join(path, "program.json"));
    for (let place = 0; place < bytes.length; place += 1 + Math.floor(bytes.length / 200)) {
      const broken = Uint8Array.from(bytes);
      broken[place] ^= 1 << place % 8;
      writeFileSync(join(path, "program.json"), broken);
      await assert.rejects(() => loadProgram(path), BurnishError, `byte ${place}`);
    }
  });
  test("in an ONNX file with a flipped bit", async () => {
    const bytes = new Uint8Array(readFileSync(join(folderOf("dropout"), "program.onnx")));
    for (let place = 0; place < bytes.length; place += 1 + Math.floor(bytes.length / 100)) {
      bytes[place] ^= 1 << place % 8;
      await assert.rejects(() => Program.fromBytes(bytes), BurnishError, `byte ${place}`);
      bytes[place] ^= 1 << place % 8;
    }
    await Program.fromBytes(bytes);
  });
  test("that is no path", () => refused(() => loadProgram(new Uint8Array(3)), ConfigurationError, "Program.fromBytes takes bytes"));
  test("in an ONNX file that is cut", () => {
    const bytes = readFileSync(join(folderOf("dropout"), "program.onnx"));
    return refused(() => Program.fromBytes(bytes.subarray(0, 5000)), ModelError, "not a whole ONNX file");
  });
  test("in an ONNX file that is a plain model", () => {
    return refused(() => Program.fromBytes(readFileSync(join(folderOf("dropout"), "tuned.onnx"))), CheckpointError, "holds no burnish program");
  });
  test("in a zip that is cut", () => {
    const bytes = readFileSync(join(folderOf("dropout"), "program.zip"));
    return refused(() => Program.fromBytes(bytes.subarray(0, bytes.length >> 1)), CheckpointError, "not a whole zip archive");
  });
});

describe("a checkpoint", () => {
  const half = () => readFileSync(join(folderOf("dropout"), "half.safetensors"));

  test("that is not there", () => refused(() => session.restore(join(folder, "none.safetensors")), CheckpointError, "no checkpoint", "check the name"));
  test("that is damaged", async () => {
    const bytes = half();
    bytes[bytes.length - 1] ^= 1;
    await refused(() => session.restore(bytes), CheckpointError, "is damaged", "has changed since it was written", "Use an earlier checkpoint");
  });
  test("with a flipped bit anywhere", async () => {
    const bytes = half();
    const before = await session.state();
    for (let place = 0; place < bytes.length; place += 1 + Math.floor(bytes.length / 400)) {
      bytes[place] ^= 1 << place % 8;
      assert.throws(() => readCheckpoint(bytes), CheckpointError, `byte ${place}`);
      if (place % 5 === 0) await assert.rejects(() => session.restore(bytes), CheckpointError, `byte ${place}`);
      bytes[place] ^= 1 << place % 8;
    }
    assert.deepEqual(await session.state(), before);
    readCheckpoint(bytes);
  });
  test("with a journal", async () => {
    const bytes = await writeSafetensors(new Map(), { format: "burnish checkpoint", version: "3", journal: "{}" });
    return refused(async () => readCheckpoint(bytes), CheckpointError, "folder 'journal'", "restore it in Python");
  });
  test("that is no file", async () => {
    await refused(() => session.restore(folder), CheckpointError, "it is no file");
    await refused(() => session.saveCheckpoint(folder), CheckpointError, "is a folder, a device or a pipe: give the name of a file");
  });
  test("without a name", async () => {
    await refused(() => session.restore(7), ConfigurationError, "has a name, not 7");
    await refused(() => session.saveCheckpoint(""), ConfigurationError, 'has a name, not ""');
  });
  test("with what JSON cannot hold", () => refused(() => session.checkpoint({ position: { at: undefined } }), ConfigurationError, "extra.position.at is undefined"));
  test("with metadata that are no texts", async () => {
    session.metadata = { epoch: 3 };
    await refused(() => session.checkpoint(), ConfigurationError, "metadata 'epoch' is 3", "give texts");
    session.metadata = {};
  });
  test("of a state with infinite values", async () => {
    const own = await Session.open(program);
    const state = await own.state();
    state.get("param/first.bias").data[0] = Infinity;
    await own.loadState(state);
    await refused(() => own.checkpoint(), CheckpointError, "'param/first.bias' holds NaN or infinite values");
  });
});
