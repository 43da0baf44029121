/** A session in a worker: the page stays responsive while it trains. */

import type { Batch } from "./batch.js";
import { EngineError, errorOf } from "./errors.js";
import type { ExportedModel } from "./export.js";
import type { Backend } from "./runtime.js";
import type { Figures, StepReport } from "./session.js";
import type { Signature } from "./signature.js";
import type { Tensor } from "./tensor.js";

export interface Call {
  id: number;
  method: string;
  parameters: unknown[];
}

export interface Answer {
  id: number;
  result?: unknown;
  error?: { name: string; message: string };
  step: number;
}

/** Options of a session that can be sent to a worker. */
export interface WorkerOptions {
  backend?: Backend;
  threads?: number;
  wasmPaths?: string;
  seed?: number;
  state?: ReadonlyMap<string, Tensor>;
}

/** The methods of a `Session`, answered by a worker. Each step dispatches the event `step`. */
export class WorkerSession extends EventTarget {
  /** How many steps the state has taken. */
  stepCount = 0;
  signature!: Signature;
  backend!: Backend;
  private readonly waiting = new Map<number, { resolve: (value: any) => void; reject: (error: Error) => void }>();
  private calls = 0;

  private constructor(private readonly worker: Worker) {
    super();
    worker.addEventListener("message", ({ data }: MessageEvent<Answer>) => this.take(data));
    worker.addEventListener("error", (event) => {
      const error = new EngineError(`The worker failed: ${event.message || "its script could not be loaded"}. Check the address of the worker's script`);
      for (const { reject } of this.waiting.values()) reject(error);
      this.waiting.clear();
    });
  }

  /**
   * Open a program in a worker.
   *
   * @param worker a worker of the script `burnish-runtime/worker`.
   * @param program the address of the program, or the bytes of its `.zip` or `.onnx` file.
   */
  static async open(worker: Worker, program: string | Uint8Array, options: WorkerOptions = {}): Promise<WorkerSession> {
    const session = new WorkerSession(worker);
    const source = typeof program === "string" ? new URL(program, document.baseURI).href : program;
    const { signature, backend } = await session.call<{ signature: Signature; backend: Backend }>("open", source, options);
    return Object.assign(session, { signature, backend });
  }

  override addEventListener(type: "step", listener: (event: CustomEvent<StepReport>) => void, options?: AddEventListenerOptions | boolean): void;
  override addEventListener(type: string, listener: EventListenerOrEventListenerObject | null, options?: AddEventListenerOptions | boolean): void;
  override addEventListener(type: string, listener: any, options?: AddEventListenerOptions | boolean): void {
    super.addEventListener(type, listener, options);
  }

  async step(batch: Batch, hyperparameters: Readonly<Record<string, number>> = {}): Promise<Figures> {
    const figures = await this.call<Figures>("step", batch, hyperparameters);
    this.dispatchEvent(new CustomEvent<StepReport>("step", { detail: { epoch: 1, step: this.stepCount, figures } }));
    return figures;
  }

  evaluate(batch: Batch, parameters?: "average"): Promise<Figures> {
    return this.call("evaluate", batch, parameters);
  }

  predict(batch: Batch, parameters?: "average"): Promise<Record<string, Tensor>> {
    return this.call("predict", batch, parameters);
  }

  features(batch: Batch): Promise<Record<string, Tensor>> {
    return this.call("features", batch);
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

  exportModel(options: { dataName?: string; parameters?: "average" } = {}): Promise<ExportedModel> {
    return this.call("exportModel", options);
  }

  /** Free what the runtime holds, and end the worker. */
  async close(): Promise<void> {
    await this.call("close");
    this.worker.terminate();
  }

  private call<Result>(method: string, ...parameters: unknown[]): Promise<Result> {
    const id = this.calls++;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      this.worker.postMessage({ id, method, parameters } satisfies Call);
    });
  }

  private take({ id, result, error, step }: Answer): void {
    const waiting = this.waiting.get(id);
    this.waiting.delete(id);
    this.stepCount = step;
    if (error) waiting?.reject(errorOf(error.name, error.message));
    else waiting?.resolve(result);
  }
}
