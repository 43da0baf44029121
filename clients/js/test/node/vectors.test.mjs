// The rules that every client keeps: tests/clients/vectors.json, whose fields tests/clients/vectors.py describes.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { lstatSync, mkdirSync, readdirSync, readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { before, describe, test } from "node:test";

import * as burnish from "../../dist/index.js";
import { BLANK, putDigest } from "../../dist/digest.js";
import { clientPrograms, REPOSITORY, temporaryFolder } from "../fixtures.mjs";

const table = JSON.parse(readFileSync(join(REPOSITORY, "tests", "clients", "vectors.json"), "utf8"));
const ARRAYS = { float32: Float32Array, float64: Float64Array, int64: BigInt64Array, uint8: Uint8Array };
const folder = temporaryFolder();

before(() => clientPrograms("write-vectors", folder));

const open = async (name) => burnish.Session.open(await burnish.loadProgram(join(folder, name)), { threads: 1 });
const number = (value) => ({ nan: NaN, inf: Infinity })[value] ?? value;

function arrayOf({ dtype, shape, cycle }) {
  const count = shape.reduce((product, extent) => product * extent, 1);
  const data = new ARRAYS[dtype](count);
  for (let place = 0; place < count; place++) {
    const value = number(cycle[place % cycle.length]);
    data[place] = dtype === "int64" ? BigInt(value) : value;
  }
  return { dtype, shape, data };
}

function batchOf(row) {
  const described = Object.entries({ ...table.batches[row.program], ...row.batch });
  return Object.fromEntries(described.filter(([, array]) => array !== null).map(([name, array]) => [name, arrayOf(array)]));
}

async function write(session, entries = {}) {
  const state = await session.state();
  for (const [name, array] of Object.entries(entries)) state.set(name, arrayOf(array));
  await session.loadState(state);
}

async function changedCheckpoint({ program, change }) {
  const writer = await open(change.of ?? program);
  await writer.step(batchOf({ program: change.of ?? program }));
  let bytes = Buffer.from(await writer.checkpoint());
  await writer.close();
  if (change.replace) {
    const [old, changed] = change.replace;
    assert.ok(bytes.includes(old));
    bytes.write(changed, bytes.indexOf(old), "latin1");
  }
  bytes = Buffer.concat([bytes.subarray(0, change.keep ?? bytes.length - (change.drop ?? 0)), Buffer.from(change.append ?? "")]);
  if (change.flip) bytes[bytes.length + change.flip] ^= 1;
  if (change.stamp) {
    bytes.write(BLANK, bytes.indexOf("sha256:"), "latin1");
    await putDigest(bytes);
  }
  return new Uint8Array(bytes);
}

const calls = {
  step: (session, row) => session.step(batchOf(row), Object.fromEntries(Object.entries(row.hyperparameters ?? {}).map(([name, value]) => [name, number(value)]))),
  evaluate: (session, row) => session.evaluate(batchOf(row), ...(row.average ? ["average"] : [])),
  predict: (session, row) => session.predict(batchOf(row)),
  write: (session, row) => write(session, row.write),
  restore: async (session, row) => session.restore(await changedCheckpoint(row)),
  save: async (session, { at }) => {
    const place = join(temporaryFolder(), at);
    if (at === "pipe") execFileSync("mkfifo", [place]);
    else mkdirSync(place);
    const kind = () => [lstatSync(place).isFIFO(), lstatSync(place).isDirectory(), readdirSync(dirname(place))];
    const before = kind();
    await session.saveCheckpoint(place).finally(() => assert.deepEqual(kind(), before));
  },
  export: (session) => session.exportModel(),
};

describe("a refusal has the same class and words, and keeps the state:", () => {
  for (const row of table.refusals.filter((row) => !row.in || row.in.includes("javascript"))) {
    test(row.name, async () => {
      const session = await open(row.program);
      if (row.state) await write(session, row.state);
      const earlier = await session.state();
      await assert.rejects(() => calls[row.call](session, row), (error) => {
        assert.ok(error instanceof burnish[row.error], `${error.name}: ${error.message}`);
        for (const text of row.says) assert.ok(error.message.includes(text), `'${error.message}' lacks '${text}'`);
        return true;
      });
      assert.deepEqual(await session.state(), earlier);
      await session.close();
    });
  }
});

describe("a run has the same figures:", () => {
  const near = (value, expected) => assert.ok(Math.abs(value - expected) <= 1e-4 * Math.max(1, Math.abs(expected)), `${value}, not ${expected}`);
  for (const row of table.runs) {
    test(row.name, async () => {
      const session = await open(row.program);
      const batch = batchOf(row);
      for (const [step, hyperparameters] of row.steps.entries()) near((await session.step(batch, hyperparameters)).loss, row.losses[step]);
      const resumed = await open(row.program);
      await resumed.restore(await session.checkpoint());
      const state = await resumed.state();
      assert.deepEqual(state, await session.state());
      near((await resumed.evaluate(batch)).loss, row.loss);
      for (const [name, sum] of Object.entries(row.state)) near(state.get(name).data.reduce((total, value) => total + value, 0), sum);
      await Promise.all([session.close(), resumed.close()]);
    });
  }
});
