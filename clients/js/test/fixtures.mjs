// What Python computes of small networks, made once per run by tests/clients/client_programs.py.
import { spawnSync } from "node:child_process";
import { existsSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { delimiter, dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

import { readSafetensors } from "../dist/safetensors.js";

export const REPOSITORY = join(dirname(fileURLToPath(import.meta.url)), "..", "..", "..");
const SCRIPT = join(REPOSITORY, "tests", "clients", "client_programs.py");
export const NETWORKS = ["residual", "mobile", "text", "recurrent", "dropout", "convolutional"];
/** The network of a frozen backbone whose features are cached. */
export const CACHED = "cached";
export const STEPS = 100;
export const HALF = 50;

/** Run a Python of the repository, which PYTHON names, and return what it prints. */
export function python(...parameters) {
  const paths = [process.env.PYTHONPATH, join(REPOSITORY, "src"), join(REPOSITORY, "tests")].filter(Boolean);
  const environment = { ...process.env, PYTHONPATH: paths.join(delimiter), OMP_NUM_THREADS: "1" };
  const result = spawnSync(process.env.PYTHON ?? "python3", parameters, { env: environment, encoding: "utf8", maxBuffer: 2 ** 28 });
  if (result.status !== 0) throw new Error(`Python failed (set PYTHON to one with burnish's test extras):\n${result.stderr ?? result.error}`);
  return result.stdout;
}

export const clientPrograms = (...parameters) => python(SCRIPT, ...parameters);

/** A folder for temporary files, which goes when the process ends. */
export function temporaryFolder() {
  const path = mkdtempSync(join(tmpdir(), "burnish-js-"));
  process.on("exit", () => rmSync(path, { recursive: true, force: true }));
  return path;
}

let folder = process.env.BURNISH_CLIENT_FIXTURES;

/** The folder of a network: its program, batches, and what Python computed. */
export function folderOf(network) {
  folder ??= temporaryFolder();
  const path = join(folder, network);
  if (!existsSync(join(path, "expected.json"))) clientPrograms("write", folder, network);
  return path;
}

export function arraysOf(path) {
  return readSafetensors(new Uint8Array(readFileSync(path)), `'${path}'`).arrays;
}

/** Ten batches, each an object of arrays by input name; or what else a file holds of each batch. */
export function batchesOf(network, file = "batches.safetensors") {
  const batches = Array.from({ length: 10 }, () => ({}));
  for (const [name, array] of arraysOf(join(folderOf(network), file))) {
    const [index, input] = name.split("/");
    batches[Number(index)][input] = array;
  }
  return batches;
}

export function expectedOf(network) {
  return JSON.parse(readFileSync(join(folderOf(network), "expected.json"), "utf8"));
}
