// Takes steps of a network of tests/clients/client_programs.py from a checkpoint, and saves another:
//
//   node test/steps.mjs FOLDER CHECKPOINT BEGIN END OUTPUT
//
// It prints the version of ONNX Runtime and the losses, as JSON.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

import { loadProgram, Session } from "../dist/index.js";
import { readSafetensors } from "../dist/safetensors.js";

const [folder, checkpoint, begin, end, output] = process.argv.slice(2);
const session = await Session.open(await loadProgram(join(folder, "program")), { threads: 1 });
await session.restore(checkpoint);
const { arrays } = readSafetensors(new Uint8Array(readFileSync(join(folder, "batches.safetensors"))), "batches");
const losses = [];
for (let step = Number(begin); step < Number(end); step++) {
  const index = `${step % 10}/`;
  const batch = Object.fromEntries([...arrays].flatMap(([name, array]) => (name.startsWith(index) ? [[name.slice(index.length), array]] : [])));
  losses.push((await session.step(batch)).loss);
}
await session.saveCheckpoint(output);
const { version } = createRequire(import.meta.url)("onnxruntime-node/package.json");
console.log(JSON.stringify({ version, losses }));
