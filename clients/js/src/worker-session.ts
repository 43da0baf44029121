/** A session in a worker: the page stays responsive while it trains. */

import { sendable, type Batch } from "./batch.js";
import { checkedMetadata } from "./checkpoint.js";
import { ConfigurationError, EngineError, errorOf, messageOf } from "./errors.js";
import type { ExportedModel } from "./export.js";
import { checkOptions, shown } from "./options.js";
import type { Backend } from "./runtime.js";
import type { SessionOptions } from "./session.js";
import type { Signature } from "./signature.js";
import type { Tensor } from "./tensor.js";
import type { Totals } from "./totals.js";
import { Trains, type Figures } from "./training.js";

export interface Call {
  id: number;
  method: string;
  parameters: unknown[];
  /** The session's `metadata` as it was when the call was made. */
  metadata: Record<string, string>;
}

/** What a worker answers: first that it is there, where a program is to be opened; then what came of the call. */
export type Answer =
  | { id: number; isThere: true }
  | { id: number; result?: unknown; error?: { name: string; message: string }; step: number; restored?: Readonly<Record<string, string>> };

export interface Opened {
  signature: Signature;
  backend: Backend;
  lossTerms: Record<string, number>;
}

/** Options of a session that can be sent to a worker: all but `ort`, which is a module. */
export type WorkerOptions = Omit<SessionOptions, "ort">;

const OPTIONS = ["backend", "threads", "wasmPaths", "seed", "state", "sessionOptions"];
const REMEDIES = { ort: "a module cannot be sent to a worker, which loads its own. Leave it out, or run a Session in a worker script of your own" };
/** How long a script may take to load and to say that it is there [ms]. */
const PATIENCE = 60_000;

/** Numbers of calls: each has its own, whatever session of the page makes it. */
let calls = 0;

/** The methods of a `Session`, answered by a worker. Each step dispatches the event `step`. */
export class WorkerSession extends Trains {
  stepCount = 0;
  /** Entries for the `metadata_props` of exported models; checkpoints keep them. */
  metadata: Record<string, string> = {};
  signature!: Signature;
  backend!: Backend;
  protected lossTerms: Record<string, number> = {};
  private readonly waiting = new Map<number, { resolve: (value: any) => void; reject: (error: Error) => void }>();
  private closing: Promise<void> | undefined;
  /** Why the worker answers no more. */
  private ended: string | undefined;

  private constructor(private readonly worker: Worker) {
    super();
    worker.addEventListener("message", ({ data }: MessageEvent<Answer>) => this.take(data));
    worker.addEventListener("messageerror", () => this.end("The worker sent what the page cannot read. Open another session in a new worker"));
    worker.addEventListener("error", (event) =>
      this.end(`The worker failed: ${event.message || "its script could not be loaded"}. Check the address of the worker's script`),
    );
    // No event tells of it, and what waits would wait for ever.
    const terminate = worker.terminate.bind(worker);
    worker.terminate = () => {
      terminate();
      this.end("The worker was terminated, and the state that it held is gone: open another session in a new worker, from a checkpoint");
    };
  }

  /**
   * Open a program in a worker.
   *
   * @param worker a worker of the script `burnish-runtime/worker`, without a session.
   * @param program the address of the program, or the bytes of its `.zip` or `.onnx` file.
   * @throws ConfigurationError as `Session.open`; EngineError where the worker cannot be loaded, does not answer or has a session.
   */
  static async open(worker: Worker, program: string | Uint8Array, options: WorkerOptions = {}): Promise<WorkerSession> {
    checkOptions("WorkerSession.open", options, OPTIONS, REMEDIES);
    if (typeof program !== "string" && !ArrayBuffer.isView(program)) {
      throw new ConfigurationError(`A program for a worker is an address or bytes, not ${shown(program)}: give where its folder is served`);
    }
    const base = globalThis.document?.baseURI ?? location.href;
    const source = typeof program === "string" ? new URL(program, base).href : program;
    const { wasmPaths } = options;
    const own = typeof wasmPaths === "string" ? { ...options, wasmPaths: new URL(wasmPaths, base).href } : options;
    const session = new WorkerSession(worker);
    return Object.assign(session, await session.opened(source, own));
  }

  async step(batch: Batch, hyperparameters: Readonly<Record<string, number>> = {}): Promise<Figures> {
    const figures = await this.call<Figures>("step", sendable(batch), hyperparameters);
    this.report(figures);
    return figures;
  }

  async evaluate(batch: Batch, parameters?: "average"): Promise<Figures> {
    return this.call("evaluate", sendable(batch), parameters);
  }

  async evaluateTotals(batch: Batch, parameters?: "average"): Promise<Totals> {
    return this.call("evaluateTotals", sendable(batch), parameters);
  }

  async predict(batch: Batch, parameters?: "average"): Promise<Record<string, Tensor>> {
    return this.call("predict", sendable(batch), parameters);
  }

  async features(batch: Batch): Promise<Record<string, Tensor>> {
    return this.call("features", sendable(batch));
  }

  async gradients(batch: Batch): Promise<Map<string, Tensor>> {
    return this.call("gradients", sendable(batch));
  }

  applyGradients(gradients: ReadonlyMap<string, Tensor>, hyperparameters: Readonly<Record<string, number>> = {}): Promise<Figures> {
    return this.call("applyGradients", gradients, hyperparameters);
  }

  state(): Promise<Map<string, Tensor>> {
    return this.call("state");
  }

  loadState(state: ReadonlyMap<string, Tensor>): Promise<void> {
    return this.call("loadState", state);
  }

  checkpoint(extra: Record<string, unknown> = {}): Promise<Uint8Array> {
    return this.call("checkpoint", extra);
  }

  saveCheckpoint(name: string, extra: Record<string, unknown> = {}): Promise<void> {
    return this.call("saveCheckpoint", name, extra);
  }

  restore(checkpoint: Uint8Array | string): Promise<Record<string, unknown>> {
    return this.call("restore", checkpoint);
  }

  exportModel(options: { dataName?: string; parameters?: "average"; oneFileLimit?: number } = {}): Promise<ExportedModel> {
    return this.call("exportModel", options);
  }

  /** Free what the runtime holds once the calls before are done, and end the worker. A second time does nothing. */
  close(): Promise<void> {
    return (this.closing ??= this.closed());
  }

  private async closed(): Promise<void> {
    if (this.ended !== undefined) return;
    await this.call("close");
    this.end("The session is closed: open another with WorkerSession.open, in a new worker");
  }

  private async opened(source: string | Uint8Array, options: WorkerOptions): Promise<Opened> {
    const timer = setTimeout(() => this.end("The worker does not answer: give one of the script burnish-runtime/worker, as a module"), PATIENCE);
    this.isThere = () => clearTimeout(timer);
    try {
      return await this.call<Opened>("open", source, options);
    } finally {
      this.isThere();
    }
  }

  private isThere = () => {};

  private async call<Result>(method: string, ...parameters: unknown[]): Promise<Result> {
    if (this.ended !== undefined) throw new EngineError(this.ended);
    const id = calls++;
    const metadata = checkedMetadata(this.metadata);
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      try {
        this.worker.postMessage({ id, method, parameters, metadata } satisfies Call);
      } catch (error) {
        this.waiting.delete(id);
        reject(new ConfigurationError(`${method} was given what cannot be sent to a worker (${messageOf(error)}): give plain objects and arrays`));
      }
    });
  }

  private take(answer: Answer): void {
    const waiting = this.waiting.get(answer.id);
    if (!waiting) return;
    if ("isThere" in answer) return this.isThere();
    const { result, error, step, restored } = answer;
    this.waiting.delete(answer.id);
    this.stepCount = step;
    this.metadata = { ...this.metadata, ...restored };
    if (error) waiting.reject(errorOf(error.name, error.message));
    else waiting.resolve(result);
  }

  private end(why: string): void {
    if (this.ended !== undefined) return;
    this.ended = why;
    for (const { reject } of this.waiting.values()) reject(new EngineError(why));
    this.waiting.clear();
    this.worker.terminate();
  }
}
