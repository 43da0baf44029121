/** The script of a worker: opens a session, and answers the calls of a `WorkerSession` of the page. */

import { loadProgram, Program, Session } from "./browser.js";
import { EngineError, messageOf } from "./errors.js";
import type { SessionOptions } from "./session.js";
import type { Answer, Call, Opened } from "./worker-session.js";

const METHODS = [
  "step", "evaluate", "evaluateTotals", "predict", "features", "gradients", "applyGradients", "state", "loadState", "checkpoint", "saveCheckpoint",
  "restore", "exportModel", "close",
] as const;

let session: Session | undefined;
let isOpening = false;

async function open(source: string | Uint8Array, options: SessionOptions): Promise<Opened> {
  if (session || isOpening) throw new EngineError("The worker has a session already: make a worker for each");
  isOpening = true;
  try {
    const program = typeof source === "string" ? await loadProgram(source) : await Program.fromBytes(source);
    session = await Session.open(program, options);
    return { signature: program.signature, backend: session.backend, lossTerms: program.options.loss_terms ?? {} };
  } finally {
    isOpening = false;
  }
}

async function answer({ method, parameters, metadata }: Call): Promise<unknown> {
  if (method === "open") return open(...(parameters as [string | Uint8Array, SessionOptions]));
  const name = METHODS.find((known) => known === method);
  if (!name || !session) throw new EngineError(`The worker has no method '${method}', or no session: give it the script of this version of burnish-runtime`);
  session.metadata = metadata;
  return (session[name] as (...parameters: unknown[]) => Promise<unknown>)(...parameters);
}

addEventListener("message", async ({ data: call }: MessageEvent<Call>) => {
  const reply = (outcome: { result?: unknown; error?: { name: string; message: string }; restored?: Readonly<Record<string, string>> }) =>
    postMessage({ id: call.id, step: session?.stepCount ?? 0, ...outcome } satisfies Answer);
  if (call.method === "open") postMessage({ id: call.id, isThere: true } satisfies Answer);
  try {
    const result = await answer(call);
    reply({ result, ...(call.method === "restore" ? { restored: session!.restored } : {}) });
  } catch (error) {
    reply({ error: { name: error instanceof Error ? error.name : "Error", message: messageOf(error) } });
  }
});
