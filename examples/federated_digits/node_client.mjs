// A client in Node of the federated run that this folder is about: what burnish.federated.ProcessClient calls.
//
//     node node_client.mjs partition train round.safetensors update.safetensors
//     node node_client.mjs partition evaluate round.safetensors
//
// The folder `partition` is what write_partition.py writes. It needs burnish-runtime and onnxruntime-node.

import { readFile } from "node:fs/promises";
import { join } from "node:path";

import { loadProgram, Session } from "burnish-runtime";

const BATCH = 32;
const [folder, what, given, taken] = process.argv.slice(2);

/** The batches of a split, in the order of its samples. */
function batchesOf({ shape, x, labels }, most) {
  const size = shape.reduce((a, b) => a * b, 1);
  const batches = [];
  for (let begin = 0; begin < labels.length; begin += most) {
    const own = labels.slice(begin, begin + most);
    const pixels = Float32Array.from(x.slice(begin * size, (begin + own.length) * size));
    batches.push({ x: { data: pixels, shape: [own.length, ...shape] }, labels: own });
  }
  return batches;
}

const data = JSON.parse(await readFile(join(folder, "data.json"), "utf8"));
const session = await Session.open(await loadProgram(join(folder, "program")), { threads: 1 });
const round = await session.restore(given);
if (what === "train") {
  let samples = 0;
  let steps = 0;
  let loss = 0;
  for (let epoch = 0; epoch < round.epochs; epoch++) {
    for (const batch of batchesOf(data.train, BATCH)) {
      if (round.steps !== null && steps === round.steps) break;
      const figures = await session.step(batch, round.hyperparameters);
      loss += figures.loss * batch.labels.length;
      samples += batch.labels.length;
      steps++;
    }
  }
  await session.saveCheckpoint(taken);
  console.log(JSON.stringify({ samples, metrics: { loss: loss / samples } }));
} else {
  const [whole] = batchesOf(data.test, Infinity);
  const totals = await session.evaluateTotals(whole);
  const numbers = Object.fromEntries([...totals].map(([name, total]) => [name, Number(total.data[0])]));
  console.log(JSON.stringify({ samples: whole.labels.length, totals: numbers }));
}
