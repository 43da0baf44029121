/** The script of a worker: opens a session, and answers the calls of a `WorkerSession` of the page. */

import { loadProgram, Program, Session } from "./browser.js";
import { messageOf } from "./errors.js";
import type { Answer, Call } from "./worker-session.js";

const METHODS = ["step", "evaluate", "predict", "features", "state", "loadState", "checkpoint", "saveCheckpoint", "restore", "exportModel", "close"] as const;

let session: Session | undefined;

async function answer({ method, parameters }: Call): Promise<unknown> {
  if (method === "open") {
    const [source, options] = parameters as [string | Uint8Array, any];
    const program = typeof source === "string" ? await loadProgram(source) : await Program.fromBytes(source);
    session = await Session.open(program, options);
    return { signature: program.signature, backend: session.backend };
  }
  const name = METHODS.find((known) => known === method);
  if (!name || !session) throw new Error(`no method '${method}'`);
  return (session[name] as (...parameters: unknown[]) => Promise<unknown>)(...parameters);
}

addEventListener("message", async ({ data: call }: MessageEvent<Call>) => {
  let reply: Answer;
  try {
    reply = { id: call.id, result: await answer(call), step: session?.stepCount ?? 0 };
  } catch (error) {
    reply = { id: call.id, error: { name: error instanceof Error ? error.name : "Error", message: messageOf(error) }, step: session?.stepCount ?? 0 };
  }
  postMessage(reply);
});
