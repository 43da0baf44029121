// Every bit of every file that the client reads, flipped once: none is read as if nothing had happened.
import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { before, test } from "node:test";

import { BurnishError, Program, readCheckpoint } from "../../dist/index.js";
import { clientPrograms, temporaryFolder } from "../fixtures.mjs";

const folder = temporaryFolder();
const read = (...names) => new Uint8Array(readFileSync(join(folder, ...names)));

before(() => clientPrograms("write-small", folder));

async function everyBit(context, name, bytes, open) {
  await open();
  for (let place = 0; place < bytes.length; place++) {
    for (let bit = 0; bit < 8; bit++) {
      bytes[place] ^= 1 << bit;
      await assert.rejects(open, BurnishError, `${name}: bit ${bit} of byte ${place}`);
      bytes[place] ^= 1 << bit;
    }
  }
  await open();
  context.diagnostic(`${name}: ${8 * bytes.length} bits`);
}

test("a program folder", async (context) => {
  const files = new Map(readdirSync(join(folder, "program")).map((file) => [file, read("program", file)]));
  const graphs = [...files.keys()].map((file) => /^(\w+)\.onnx$/.exec(file)?.[1]).filter((graph) => graph && graph !== "source");
  const opened = await Program.fromFiles(files);
  for (const [file, bytes] of files) {
    const graph = graphs.find((name) => file === `${name}.onnx`);
    if (graph) await everyBit(context, file, bytes, () => opened.graph(graph));
    else if (["program.json", "state.safetensors"].includes(file)) await everyBit(context, file, bytes, () => Program.fromFiles(files));
    else context.diagnostic(`${file} is not read by this client`);
  }
});

test("a program in one file", async (context) => {
  const bytes = read("program.onnx");
  await everyBit(context, "program.onnx", bytes, () => Program.fromBytes(bytes));
});

for (const name of ["checkpoint", "adapters"]) {
  test(`a checkpoint: ${name}`, async (context) => {
    const bytes = read(`${name}.safetensors`);
    await everyBit(context, `${name}.safetensors`, bytes, async () => readCheckpoint(bytes));
  });
}
