// Measures what a program weighs: bytes to load, time to the first step, and resident memory at the peak.
//
//   PYTHON=../../.venv/bin/python node bench/sizes.mjs
import { spawnSync } from "node:child_process";
import { readdirSync, readFileSync, statSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

import { loadProgram, Session } from "../dist/index.js";
import { browse, chromium, serve } from "../test/browser/page.mjs";
import { arraysOf, python, temporaryFolder } from "../test/fixtures.mjs";

const HERE = dirname(fileURLToPath(import.meta.url));
const NETWORKS = ["digits", "mobilenet-frozen", "text"];
const STEPS = 5;

/** In a process of its own: seconds to the first step, milliseconds of a later one, and MiB at the peak. */
async function measure(path) {
  const batch = Object.fromEntries(arraysOf(join(path, "batch.safetensors")));
  const started = performance.now();
  const session = await Session.open(await loadProgram(join(path, "program")), { threads: 1 });
  await session.step(batch);
  const first = (performance.now() - started) / 1000;
  const later = performance.now();
  for (let step = 0; step < STEPS; step++) await session.step(batch);
  return { first, step: (performance.now() - later) / STEPS, peak: process.resourceUsage().maxRSS / 1024 };
}

/** The same in a page; memory is that of its renderer process. */
async function measureInChromium(address, network) {
  const { browser, page } = await browse(address);
  const result = await page.evaluate(
    async (network, steps) => {
      const { loadProgram, Session } = await import("/dist/page/burnish-runtime.js");
      const { readSafetensors } = await import("/dist/safetensors.js");
      const bytes = new Uint8Array(await (await fetch(`/programs/${network}/batch.safetensors`)).arrayBuffer());
      const batch = Object.fromEntries(readSafetensors(bytes, "batch").arrays);
      const started = performance.now();
      const session = await Session.open(await loadProgram(`/programs/${network}/program`), { threads: 1, wasmPaths: "/dist/page/wasm/" });
      await session.step(batch);
      const first = (performance.now() - started) / 1000;
      const later = performance.now();
      for (let step = 0; step < steps; step++) await session.step(batch);
      return { first, step: (performance.now() - later) / steps };
    },
    network, STEPS,
  );
  const renderers = readdirSync("/proc").filter((name) => /^\d+$/.test(name)).flatMap((process) => {
    try {
      const ours = readFileSync(`/proc/${process}/cmdline`, "utf8").includes("--type=renderer");
      return ours ? [Number(/VmHWM:\s+(\d+)/.exec(readFileSync(`/proc/${process}/status`, "utf8"))[1]) / 1024] : [];
    } catch {
      return []; // it has ended
    }
  });
  await browser.close();
  return { ...result, peak: Math.max(...renderers) };
}

if (process.argv[2]) {
  console.log(JSON.stringify(await measure(process.argv[2])));
} else {
  const folder = temporaryFolder();
  python(join(HERE, "programs.py"), "write", folder, ...NETWORKS);
  const server = await serve({ dist: join(HERE, "..", "dist"), programs: folder });
  const kib = (bytes) => `${Math.round(bytes / 1024).toLocaleString("en")} KiB`;
  console.log("| Network | Graphs and signature | Weights | Node: first step | a step | peak | Chromium: first step | a step | peak |");
  console.log("|---|---|---|---|---|---|---|---|---|");
  for (const network of NETWORKS) {
    const program = join(folder, network, "program");
    const size = (names) => names.reduce((total, name) => total + statSync(join(program, name)).size, 0);
    const graphs = readdirSync(program).filter((name) => !name.includes("semantic") && name !== "state.safetensors");
    const columns = [network, kib(size(graphs)), kib(size(["state.safetensors"]))];
    const own = spawnSync(process.execPath, [fileURLToPath(import.meta.url), join(folder, network)], { encoding: "utf8" });
    if (own.status !== 0) throw new Error(own.stderr);
    const results = [JSON.parse(own.stdout)];
    if (chromium()) results.push(await measureInChromium(server.address, network));
    for (const { first, step, peak } of results) columns.push(`${first.toFixed(2)} s`, `${step.toFixed(1)} ms`, `${Math.round(peak)} MiB`);
    console.log(`| ${columns.join(" | ")} |`);
  }
  server.close();
}
