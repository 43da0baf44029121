/** The client in a browser: programs come from addresses, checkpoints lie in IndexedDB. */

import { CheckpointError, ConfigurationError, EngineError, messageOf } from "./errors.js";
import { Program } from "./program.js";
import { usePlatform, type OrtModule } from "./runtime.js";
import type { Session } from "./session.js";
import { useStore } from "./store.js";

export * from "./common.js";
export { WorkerSession, type WorkerOptions } from "./worker-session.js";

usePlatform({
  defaultBackend: "wasm",
  async load(backend): Promise<OrtModule> {
    if (backend === "cpu") throw new ConfigurationError("backend 'cpu' is that of Node; a browser has 'wasm' and 'webgpu'");
    try {
      return backend === "webgpu" ? await import("onnxruntime-web/webgpu") : await import("onnxruntime-web/wasm");
    } catch (error) {
      throw new EngineError(`backend '${backend}' needs the package onnxruntime-web: npm install onnxruntime-web (${messageOf(error)})`, { cause: error });
    }
  },
});

const DATABASE = "burnish";
const CHECKPOINTS = "checkpoints";

useStore({
  async write(name, bytes) {
    await transaction("readwrite", (checkpoints) => checkpoints.put(bytes, name));
  },
  read: (name) => transaction<Uint8Array | undefined>("readonly", (checkpoints) => checkpoints.get(name)),
});

/** One request to the database, and its result once the transaction is through. */
function transaction<Result>(mode: IDBTransactionMode, request: (checkpoints: IDBObjectStore) => IDBRequest): Promise<Result> {
  return new Promise((resolve, reject) => {
    const fail = (error: unknown) =>
      reject(new CheckpointError(`The browser's database '${DATABASE}' cannot be used: ${messageOf(error)}. Free space, or allow the page to keep data`));
    const opening = indexedDB.open(DATABASE, 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore(CHECKPOINTS);
    opening.onerror = () => fail(opening.error);
    opening.onsuccess = () => {
      const database = opening.result;
      const running = database.transaction(CHECKPOINTS, mode);
      const asked = request(running.objectStore(CHECKPOINTS));
      running.oncomplete = () => (database.close(), resolve(asked.result));
      running.onabort = () => (database.close(), fail(running.error));
    };
  });
}

/**
 * Read a program from an address: of its folder, of a `.zip` of it, or of one `.onnx` file.
 *
 * @throws CheckpointError where it is not a whole program, or a file has changed since it was written.
 */
export function loadProgram(url: string): Promise<Program> {
  return Program.fromUrl(url);
}

/** Let the browser save an inference model of a session's state as a file; weights of more than 1 GiB as a second one. */
export async function downloadModel(session: Pick<Session, "exportModel">, name = "tuned.onnx"): Promise<void> {
  const { model, data } = await session.exportModel({ dataName: `${name}.data` });
  for (const [file, bytes] of [[name, model], ...(data ? [[data.name, data.bytes] as const] : [])] as [string, Uint8Array][]) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([bytes as BlobPart], { type: "application/octet-stream" }));
    link.download = file;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  }
}
