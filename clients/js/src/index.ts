/** The client in Node: programs, checkpoints and models are files. */

import { createHash } from "node:crypto";
import { mkdir, open, readdir, readFile, rename, rm, stat } from "node:fs/promises";
import { basename, dirname, join } from "node:path";

import { CheckpointError, ConfigurationError, EngineError, messageOf } from "./errors.js";
import { sha256Now, useHash } from "./hashes.js";
import { checkOptions, shown } from "./options.js";
import { Program } from "./program.js";
import { usePlatform, type OrtModule } from "./runtime.js";
import type { Session } from "./session.js";
import { useStore } from "./store.js";

export * from "./common.js";

usePlatform({
  defaultBackend: "cpu",
  async load(backend) {
    const name = backend === "cpu" ? "onnxruntime-node" : "onnxruntime-web";
    try {
      return moduleOf(await import(name));
    } catch (error) {
      const isThere = (error as NodeJS.ErrnoException).code !== "ERR_MODULE_NOT_FOUND";
      const what = isThere ? `the package ${name}, which is there and cannot be loaded on this machine: install it again` : `the package ${name}: npm install ${name}`;
      throw new EngineError(`backend '${backend}' needs ${what} (${messageOf(error)})`, { cause: error });
    }
  },
});
useStore({ read: readIfThere, write: writeWhole });
useHash(() => {
  const hash = createHash("sha256");
  return { update: (part) => hash.update(part), digest: () => hash.digest("hex") };
});

function moduleOf(loaded: any): OrtModule {
  return loaded.InferenceSession ? loaded : loaded.default;
}

async function readIfThere(path: string): Promise<Uint8Array | undefined> {
  try {
    // A pipe without a writer would be waited for without end.
    if (!(await stat(path)).isFile()) throw new Error("it is no file");
    return await readFile(path);
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === "ENOENT" || (error as NodeJS.ErrnoException).code === "ENOTDIR") return undefined;
    throw new CheckpointError(`'${path}' cannot be read: ${messageOf(error)}`, { cause: error });
  }
}

let partialFiles = 0;

/** Write a file, whole or not at all: an earlier one is replaced in one step, or stays as it was. */
async function writeWhole(path: string, bytes: Uint8Array): Promise<void> {
  const partial = `${path}.partial-${process.pid}-${partialFiles++}`;
  const there = await stat(path).catch(() => undefined);
  if (there && !there.isFile()) { // an administrator could replace a device by a file
    throw new CheckpointError(`'${path}' is a folder, a device or a pipe: give the name of a file`);
  }
  try {
    await mkdir(dirname(path), { recursive: true });
    const file = await open(partial, "wx");
    try {
      await file.writeFile(bytes);
      await file.sync();
    } finally {
      await file.close();
    }
    await rename(partial, path);
  } catch (error) {
    await rm(partial, { force: true }).catch(() => undefined);
    throw new CheckpointError(
      `'${path}' could not be written: ${messageOf(error)}. An earlier file there is untouched. Free space, or choose a folder you can write to`,
      { cause: error },
    );
  }
}

/**
 * Read a program: a folder that `program.save` wrote, a `.zip` of it, or one `.onnx` file; by path or address.
 *
 * @throws CheckpointError where it is not a whole program, or a file has changed since it was written.
 */
export async function loadProgram(path: string): Promise<Program> {
  if (typeof path !== "string") throw new ConfigurationError(`A program has a path or an address, not ${shown(path)}: Program.fromBytes takes bytes, and Program.fromFiles a Map`);
  if (/^https?:/.test(path)) return Program.fromUrl(path);
  if (!/\.(zip|onnx)$/.test(path)) {
    return Program.fromSource({ name: path, read: (file) => readIfThere(join(path, file)), path: (file) => join(path, file) });
  }
  const bytes = await readIfThere(path);
  if (bytes === undefined) throw new CheckpointError(`There is no program '${path}': check the path`);
  return Program.fromBytes(bytes, path);
}

/** Models are written in the order of the calls: the last one stays. */
let saving: Promise<void> = Promise.resolve();

/**
 * Write an inference model of a session's state into an `.onnx` file. Weights of more than 1 GiB go into `<path>-<their hash>.data`:
 * the model that is there keeps its own until it is replaced.
 */
export async function saveModel(session: Pick<Session, "exportModel">, path: string, options: { parameters?: "average" } = {}): Promise<void> {
  checkOptions("saveModel", options, ["parameters"]);
  if (typeof path !== "string" || path === "") throw new ConfigurationError(`A model is saved to a path, not ${shown(path)}: give a text`);
  const [folder, file] = [dirname(path), basename(path)];
  const exported = session.exportModel({ ...options, dataName: (bytes) => `${file}-${sha256Now(bytes).slice(0, 16)}.data` });
  const earlier = saving;
  const saved = exported.then(async ({ model, data }) => {
    await earlier;
    if (data) await writeWhole(join(folder, data.name), data.bytes);
    await writeWhole(path, model);
    for (const other of await readdir(folder)) {
      const isEarlier = other.startsWith(`${file}-`) && /^[0-9a-f]{16}\.data$/.test(other.slice(file.length + 1));
      if (isEarlier && other !== data?.name) await rm(join(folder, other), { force: true });
    }
  });
  saving = saved.catch(() => undefined);
  return saved;
}
