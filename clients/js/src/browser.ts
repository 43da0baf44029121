/** The client in a browser: programs come from addresses, checkpoints lie in IndexedDB. */

import { CheckpointError, ConfigurationError, EngineError, messageOf } from "./errors.js";
import { shown } from "./options.js";
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
      throw new EngineError(`backend '${backend}' needs the package onnxruntime-web, which could not be loaded (${messageOf(error)}). ${remedyOf(backend, error)}`, { cause: error });
    }
  },
});

function remedyOf(backend: string, error: unknown): string {
  if ("ServiceWorkerGlobalScope" in globalThis) {
    return `A service worker cannot load modules while it runs: import * as ort from "onnxruntime-web/${backend}" at the top of its script, and pass { ort } to Session.open`;
  }
  if (/module specifier|Cannot find/i.test(messageOf(error))) return "Run npm install onnxruntime-web and bundle the page, or import dist/page/burnish-runtime.js";
  return "Check the connection, and that the page serves every file of its bundle";
}

const DATABASE = "burnish";
const CHECKPOINTS = "checkpoints";

useStore({
  async write(name, bytes) {
    await transaction("readwrite", (checkpoints) => checkpoints.put(bytes, name));
  },
  async read(name) {
    const bytes = await transaction<unknown>("readonly", (checkpoints) => checkpoints.get(name));
    if (bytes !== undefined && !(bytes instanceof Uint8Array)) throw new CheckpointError(`'${name}' in the browser's database is ${shown(bytes)}, no checkpoint: save under another name`);
    return bytes;
  },
});

/** One request to the database, and its result once the transaction is through. */
function transaction<Result>(mode: IDBTransactionMode, request: (checkpoints: IDBObjectStore) => IDBRequest): Promise<Result> {
  return new Promise((resolve, reject) => {
    const fail = (error: unknown) =>
      reject(new CheckpointError(`The browser's database '${DATABASE}' cannot be used: ${messageOf(error)}. Free space, or allow the page to keep data`));
    const foreign = () =>
      reject(
        new CheckpointError(
          `The browser's database '${DATABASE}' of this page is another program's: rename or delete that one, or keep checkpoints ` +
            "yourself, from session.checkpoint() and for session.restore(bytes)",
        ),
      );
    let opening: IDBOpenDBRequest;
    try {
      opening = indexedDB.open(DATABASE, 1);
    } catch (error) {
      return fail(error);
    }
    opening.onupgradeneeded = () => opening.result.createObjectStore(CHECKPOINTS);
    opening.onblocked = () => fail("another page holds it");
    opening.onerror = () => (opening.error?.name === "VersionError" ? foreign() : fail(opening.error));
    opening.onsuccess = () => {
      const database = opening.result;
      const end = (settle: () => void) => (database.close(), settle());
      if (!database.objectStoreNames.contains(CHECKPOINTS)) return end(foreign);
      try {
        const running = database.transaction(CHECKPOINTS, mode);
        const asked = request(running.objectStore(CHECKPOINTS));
        running.oncomplete = () => end(() => resolve(asked.result));
        running.onabort = () => end(() => fail(running.error));
      } catch (error) {
        end(() => fail(error));
      }
    };
  });
}

/**
 * Read a program from an address: of its folder, of a `.zip` of it, or of one `.onnx` file.
 *
 * @throws CheckpointError where it is not a whole program, or a file has changed since it was written.
 */
export async function loadProgram(url: string): Promise<Program> {
  if (typeof url !== "string") throw new ConfigurationError(`A program has an address, not ${shown(url)}: Program.fromBytes takes bytes, and Program.fromFiles a Map`);
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
