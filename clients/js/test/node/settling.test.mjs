// Programs whose export is another graph than the one that trains: adapters, masks and quantization.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { before, test } from "node:test";

import { CheckpointError, loadProgram, saveModel, Session, UnsupportedOperatorError } from "../../dist/index.js";
import { clientPrograms, temporaryFolder } from "../fixtures.mjs";

const folder = temporaryFolder();
const open = async (name) => Session.open(await loadProgram(join(folder, name, "program")), { threads: 1 });

before(() => clientPrograms("write-settled", folder));

test("Python's checkpoints are restored and written byte for byte, and exports are Python's", async () => {
  const names = ["dora", "lora", "pruned", "quantized"];
  for (const name of names) {
    const session = await open(name);
    const path = join(folder, name, "python.safetensors");
    await session.restore(path);
    assert.ok(readFileSync(path).equals(await session.checkpoint()), `${name}: byte for byte`);
    await saveModel(session, join(folder, name, "javascript.onnx"));
    await session.close();
  }
  const compared = JSON.parse(clientPrograms("compare-settled", folder));
  assert.deepEqual(Object.keys(compared), names);
  for (const [name, { operators, kinds, apart, integers, predicted }] of Object.entries(compared)) {
    assert.deepEqual(operators[0], operators[1], name);
    assert.ok(kinds, `${name}: names, dtypes and shapes of initializers`);
    assert.equal(integers, 0, name);
    assert.ok(apart < 1e-6 && predicted < 1e-5, `${name}: ${apart} apart, ${predicted} in what they predict`);
  }
});

test("what the client does not settle is refused by name, with what to do", async () => {
  for (const [name, what] of [["int4", /integers of 4 bits/], ["ia3", /of the kind ia3/]]) {
    const session = await open(name);
    await assert.rejects(() => session.exportModel(), (error) => error instanceof UnsupportedOperatorError && what.test(error.message) && /session\.export/.test(error.message));
    await session.close();
  }
});

test("adapters of another model are refused, and the state stays", async () => {
  const session = await open("lora");
  const state = await session.state();
  const [frozen] = session.program.base;
  state.get(frozen).data[0] += 1;
  await session.loadState(state);
  const path = join(folder, "lora", "python.safetensors");
  await assert.rejects(() => session.restore(path), (error) => error instanceof CheckpointError && /holds adapters of another model/.test(error.message));
  assert.deepEqual(await session.state(), state);
  const other = await open("pruned");
  await assert.rejects(() => other.restore(path), (error) => error instanceof CheckpointError && /holds adapters alone, and the program has none/.test(error.message));
  await Promise.all([session.close(), other.close()]);
});
