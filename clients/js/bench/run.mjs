// Times a step of the same networks, from the same weights, in this client, in TensorFlow.js and in Python's session.
//
//   cd clients/js/bench && npm ci --ignore-scripts && cd .. && PYTHON=../../.venv/bin/python node bench/run.mjs
//
// Contenders take turns for some rounds; each one's best round counts. One thread everywhere.
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

import { loadProgram, Session } from "../dist/index.js";
import { browse, chromium, serve } from "../test/browser/page.mjs";
import { arraysOf, python, temporaryFolder } from "../test/fixtures.mjs";
import { timeSession } from "./session.mjs";

const HERE = dirname(fileURLToPath(import.meta.url));
const ROUNDS = Number(process.env.ROUNDS ?? 3);
const STEPS = { perceptron: 60, convolutional: 20 };
const SLOW = { perceptron: 15, convolutional: 2 };
const TENSORFLOW_WASM = join(HERE, "node_modules", "@tensorflow", "tfjs-backend-wasm", "dist");

const folder = temporaryFolder();
python(join(HERE, "programs.py"), "write", folder, ...Object.keys(STEPS));
// TensorFlow.js asks for a bundler in Node too.
const banner = { js: 'import { createRequire } from "node:module"; import { dirname } from "node:path"; import { fileURLToPath } from "node:url"; const require = createRequire(import.meta.url), __filename = fileURLToPath(import.meta.url), __dirname = dirname(__filename);' };
await build({ entryPoints: [join(HERE, "tensorflow.mjs")], outfile: join(folder, "tensorflow.mjs"), bundle: true, format: "esm", platform: "node", mainFields: ["module", "main"], banner, logLevel: "error" });
const { timeTensorFlow } = await import(join(folder, "tensorflow.mjs"));
await build({ entryPoints: [join(HERE, "page.mjs")], outfile: join(folder, "page.js"), bundle: true, format: "esm", logLevel: "error" });
const server = await serve({ dist: join(HERE, "..", "dist"), bench: folder, tensorflow: TENSORFLOW_WASM });
const { browser, page } = chromium() ? await browse(server.address) : {};
await page?.evaluate(async () => Object.assign(window, await import("/bench/page.js"), { client: await import("/dist/page/burnish-runtime.js"), files: await import("/dist/safetensors.js") }));

/** Run a contender in the page. */
const inPage = (what, network, steps, backend) =>
  page.evaluate(
    async (what, network, steps, backend) => {
      const batch = Object.fromEntries(files.readSafetensors(new Uint8Array(await (await fetch(`/bench/${network}/batch.safetensors`)).arrayBuffer()), "batch").arrays);
      const program = await client.loadProgram(`/bench/${network}/program`);
      if (what === "session") return timeSession(client.Session, program, batch, steps, { backend, threads: 1, wasmPaths: "/dist/page/wasm/" });
      const weights = Object.fromEntries([...program.weights].map(([name, tensor]) => [name.slice(6), tensor]));
      return timeTensorFlow(backend, network, weights, batch, steps, "/tensorflow/");
    },
    what, network, steps, backend,
  );

for (const network of Object.keys(STEPS)) {
  const [steps, slow] = [STEPS[network], SLOW[network]];
  const batch = Object.fromEntries(arraysOf(join(folder, network, "batch.safetensors")));
  const program = await loadProgram(join(folder, network, "program"));
  const weights = Object.fromEntries([...program.weights].map(([name, tensor]) => [name.slice(6), tensor]));
  const contenders = {
    "Python session": async () => JSON.parse(python(join(HERE, "programs.py"), "time", join(folder, network), String(steps))),
    "Node": () => timeSession(Session, program, batch, steps, { threads: 1 }),
    "Node, TensorFlow.js cpu": () => timeTensorFlow("cpu", network, weights, batch, slow),
    "Node, TensorFlow.js wasm": () => timeTensorFlow("wasm", network, weights, batch, steps, `${TENSORFLOW_WASM}/`),
    ...(page && {
      "Chromium wasm": () => inPage("session", network, steps, "wasm"),
      "Chromium, TensorFlow.js cpu": () => inPage("tensorflow", network, slow, "cpu"),
      "Chromium, TensorFlow.js wasm": () => inPage("tensorflow", network, steps, "wasm"),
    }),
  };
  const best = new Map();
  const failed = new Map();
  let expected;
  for (let round = 0; round < ROUNDS; round++) {
    for (const [name, run] of Object.entries(contenders)) {
      if (failed.has(name)) continue;
      try {
        const { losses, milliseconds } = await run();
        expected ??= losses;
        losses.forEach((loss, step) => {
          if (Math.abs(loss - expected[step]) > 1e-3) throw new Error(`its loss at step ${step} is ${loss}, and Python's ${expected[step]}`);
        });
        best.set(name, Math.min(milliseconds, best.get(name) ?? Infinity));
      } catch (error) {
        failed.set(name, error.message.split("\n")[0].slice(0, 160));
      }
    }
  }
  console.log(`\n${network}, batch 32: milliseconds of a step, best of ${ROUNDS} rounds\n`);
  console.log("| Contender | ms |\n|---|---|");
  for (const name of Object.keys(contenders)) console.log(`| ${name} | ${failed.has(name) ? failed.get(name) : best.get(name).toFixed(2)} |`);
}
await browser?.close();
server.close();
