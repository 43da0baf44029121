import assert from "node:assert/strict";
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { before, describe, test } from "node:test";

import {
  BurnishError, CheckpointError, ConfigurationError, EngineError, InputError, loadProgram, ModelError, NonFiniteLossError, Program, readCheckpoint, Session,
} from "../../dist/index.js";
import { writeSafetensors } from "../../dist/safetensors.js";
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

describe("a batch", () => {
  const wrong = {
    "lacks an input": [() => ({ x: batch.x }), "lacks the input 'labels'", "int64", "add it to the batch"],
    "has another name": [() => ({ ...batch, y: batch.x }), "unexpected input 'y'", "leave it out"],
    "has another rank": [() => ({ ...batch, x: { ...batch.x, shape: [8, 3, 4] } }), "'x' has 3 dimensions", "expected shape [batch, 12]"],
    "has another extent": [() => ({ ...batch, x: { ...batch.x, shape: [12, 8] } }), "'x' has extent 8 along axis 1", "takes 12"],
    "disagrees about the samples": [() => ({ ...batch, labels: [0, 1] }), "disagree about 'batch': 8 and 2"],
    "is empty": [() => ({ x: { data: new Float32Array(0), shape: [0, 12] }, labels: [] }), "empty along axis 0"],
    "has integers for values": [() => ({ ...batch, x: { data: new Uint8Array(96), shape: [8, 12] } }), "'x' has dtype uint8, expected float32", "divide by 255"],
    "has values for class indices": [() => ({ ...batch, labels: new Float32Array(8) }), "'labels' has dtype float32, expected int64", "class indices are integers"],
    "has a fraction as a class index": [() => ({ ...batch, labels: [0, 1, 2, 0.5, 0, 0, 0, 0] }), "holds 0.5 at [3]"],
    "has a label out of range": [() => ({ ...batch, labels: [0, 1, 2, 5, 0, 0, 0, 0] }), "'labels' holds 5 at [3]", "valid are 0..4", "Number the classes from 0"],
    "has a negative label": [() => ({ ...batch, labels: [0, 1, 2, -1, 0, 0, 0, 0] }), "holds -1 at [3]"],
    "has more elements than its shape": [() => ({ ...batch, x: { data: new Float32Array(3), shape: [8, 12] } }), "has 3 elements, and shape [8, 12] has 96"],
    "has elements that fit no shape": [() => ({ ...batch, x: new Float32Array(97) }), "97 elements without a shape"],
    "has rows of different lengths": [() => ({ ...batch, x: [[1, 2], [3]] }), "rows of different lengths"],
    "holds text": [() => ({ ...batch, x: [["a"]] }), 'holds "a", which is not a number'],
    "holds what float32 cannot": [() => ({ ...batch, x: new Float64Array(96).fill(1e300) }), "holds 1e+300 at [0, 0]", "too large for float32"],
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

test("a label between two signs", async () => {
  const signs = await loadProgram(join(folderOf("dropout"), "program"));
  const label = signs.signature.step.inputs.find((entry) => entry.name === "labels");
  Object.assign(label, { minimum: -1, maximum: 1, two_values: true });
  const own = await Session.open(signs, { threads: 1 });
  const labels = [1, -1, 1, 0, 1, 1, 1, 1];
  await refused(() => own.step({ ...batch, labels }), InputError, "holds 0 at [3]", "valid are -1 and 1", "Write -1 for no", "1 for yes");
  await own.close();
});

test("hyperparameters", async () => {
  await refused(() => session.step(batch, { momentum: 1 }), ConfigurationError, "no hyperparameter 'momentum'", "takes lr");
  await refused(() => session.step(batch, { lr: -1 }), ConfigurationError, "'lr' is -1", "not negative");
  const scheduled = await Session.open(await loadProgram(join(folderOf("residual"), "program")));
  await refused(() => scheduled.step(batchesOf("residual")[0], { lr: 0.1 }), ConfigurationError, "computes 'lr' from the step");
});

test("the end of a schedule", async () => {
  const scheduled = await Session.open(await loadProgram(join(folderOf("residual"), "program")), { threads: 1 });
  const state = await scheduled.state();
  const { end } = scheduled.program.signature.step;
  assert.equal(end, 130);
  state.get("step").data[0] = BigInt(end);
  await scheduled.loadState(state);
  await refused(() => scheduled.step(batchesOf("residual")[0]), ConfigurationError, "ends after 130 steps");
});

test("a loss that is not finite leaves the state as it was", async () => {
  const own = await Session.open(program, { threads: 1 });
  await own.step(batch);
  const before = await own.state();
  await refused(() => own.step({ ...batch, x: new Float32Array(96).fill(NaN) }), NonFiniteLossError, "loss at step 1 is nan", "state is kept");
  assert.deepEqual(await own.state(), before);
  await own.step(batch);
});

test("options", async () => {
  await refused(() => Session.open(program, { backend: "cuda" }), ConfigurationError, "unknown 'cuda'", "'wasm'");
  await refused(() => Session.open(program, { threads: 0 }), ConfigurationError, "threads=0");
  await refused(() => Session.open(program, { seed: 0.5 }), ConfigurationError, "seed=0.5");
  await refused(() => Session.open(program, { state: new Map() }), ConfigurationError, "missing");
  const plain = await Session.open(await loadProgram(join(folderOf("residual"), "program")));
  await refused(() => plain.evaluate(batchesOf("residual")[0], "average"), ConfigurationError, "keeps no average");
  await plain.close();
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
    const edit = (bytes) => bytes.toString().replace('"version": 1', '"version": 9');
    return refused(() => loadProgram(edited("program.json", edit)), CheckpointError, "format version 9", "update burnish-runtime");
  });
  test("that names a file outside", () => {
    const edit = (bytes) => {
      const manifest = JSON.parse(bytes);
      manifest.files["../elsewhere"] = { bytes: 1, sha256: "" };
      delete manifest.sha256;
      return JSON.stringify(manifest);
    };
    return refused(() => loadProgram(edited("program.json", edit)), CheckpointError, "'../elsewhere', which lies outside the folder");
  });
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
  test("that is cut", () => refused(() => session.restore(half().subarray(0, 400)), CheckpointError, "truncated"));
  test("that is damaged", async () => {
    const bytes = half();
    bytes[bytes.length - 1] ^= 1;
    await refused(() => session.restore(bytes), CheckpointError, "is damaged", "Use an earlier checkpoint");
  });
  test("of another program", async () => {
    const path = join(folderOf("residual"), "half.safetensors");
    await refused(() => session.restore(path), CheckpointError, "made with another program", "missing");
  });
  test("that is another file", () => refused(() => session.restore(writeSafetensors(new Map(), {})), CheckpointError, "not a burnish checkpoint"));
  test("with a journal", () => {
    const bytes = writeSafetensors(new Map(), { format: "burnish checkpoint", version: "2" });
    return refused(async () => readCheckpoint(bytes), CheckpointError, "folder 'journal'", "restore it in Python");
  });
  test("of a newer format", () => {
    const bytes = writeSafetensors(new Map(), { format: "burnish checkpoint", version: "3" });
    return refused(async () => readCheckpoint(bytes), CheckpointError, "format 3", "update");
  });
  test("of a state with infinite values", async () => {
    const own = await Session.open(program);
    const state = await own.state();
    state.get("param/first.bias").data[0] = Infinity;
    await own.loadState(state);
    await refused(() => own.checkpoint(), CheckpointError, "'param/first.bias' holds NaN or infinite values");
  });
});
