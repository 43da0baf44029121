/** The session: a program opened on ONNX Runtime, with its state. */

import type { InferenceSession, Tensor as OrtTensor } from "onnxruntime-common";

import { checkBatch, checkHyperparameters, type Batch } from "./batch.js";
import { checkCheckpoint, readCheckpoint, writeCheckpoint } from "./checkpoint.js";
import { CheckpointError, ConfigurationError, EngineError, InputError, NonFiniteLossError } from "./errors.js";
import { exportModel, type ExportedModel } from "./export.js";
import type { Program } from "./program.js";
import { Runtime, type Backend, type RuntimeOptions } from "./runtime.js";
import { entriesOf, FEATURES, isState, type Entry, type GraphName, type GraphSignature } from "./signature.js";
import { checkState } from "./state.js";
import { store } from "./store.js";
import { copyOf, isFinite, numberAt, scalar, type Tensor } from "./tensor.js";
import { combined, exactSum, totalOf, type Totals } from "./totals.js";

export interface SessionOptions extends RuntimeOptions {
  /** Where to start, as `state()` returns it; else the weights of the program and what its init graph computes. */
  state?: ReadonlyMap<string, Tensor>;
  /** Of the random key, where `state` is not given. */
  seed?: number;
}

/** The loss, the metrics and, where the program computes it, the learning rate of a step; by name. */
export type Figures = Record<string, number>;

/** What `train` gives after each step, and what the event `step` has as its `detail`. */
export interface StepReport {
  epoch: number;
  /** The number of steps that the state has taken. */
  step: number;
  figures: Figures;
}

export type Batches = Iterable<Batch> | AsyncIterable<Batch>;

const REMEDY = "Give what session.state() of this program returns";

/**
 * A program opened on ONNX Runtime, holding the state there: runs steps, evaluates, predicts, saves and restores.
 *
 * A session takes one call at a time: calls wait for each other, in their order. Each step dispatches the event `step`.
 */
export class Session extends EventTarget {
  /** Entries for the `metadata_props` of exported models; checkpoints keep them. */
  metadata: Record<string, string> = {};
  private current = new Map<string, OrtTensor>();
  private readonly graphs = new Map<GraphName, Promise<InferenceSession>>();
  private readonly updates: ReadonlyMap<string, string>;
  private readonly featureNames: readonly string[];
  private turn: Promise<unknown> = Promise.resolve();
  private isClosed = false;
  private epoch = 1;

  private constructor(
    readonly program: Program,
    private readonly runtime: Runtime,
  ) {
    super();
    this.featureNames = (program.signature[FEATURES]?.outputs ?? []).map(({ name }) => name);
    this.updates = new Map(program.signature.step.outputs.flatMap(({ updates, name }) => (updates === undefined ? [] : [[updates, name]])));
  }

  /**
   * Open a program.
   *
   * @throws ConfigurationError where the state does not fit or an option is none; EngineError where the runtime is not there.
   */
  static async open(program: Program, options: SessionOptions = {}): Promise<Session> {
    const { seed = 0 } = options;
    if (!Number.isSafeInteger(seed)) throw new ConfigurationError(`seed=${String(seed)}: give a whole number`);
    if (options.state) checkState(program.state.values(), options.state, ConfigurationError, "The state", REMEDY);
    const session = new Session(program, await Runtime.load(options));
    await session.place(options.state ?? (await session.initialState(seed)));
    return session;
  }

  override addEventListener(type: "step", listener: (event: CustomEvent<StepReport>) => void, options?: AddEventListenerOptions | boolean): void;
  override addEventListener(type: string, listener: EventListenerOrEventListenerObject | null, options?: AddEventListenerOptions | boolean): void;
  override addEventListener(type: string, listener: any, options?: AddEventListenerOptions | boolean): void {
    super.addEventListener(type, listener, options);
  }

  get backend(): Backend {
    return this.runtime.backend;
  }

  /** How many steps the state has taken. */
  get stepCount(): number {
    const entry = [...this.program.state.values()].find(({ role }) => role === "step");
    const value = entry && this.current.get(entry.name);
    return value ? Number((value.data as BigInt64Array)[0]) : 0;
  }

  /**
   * Run one training step.
   *
   * @param batch the model's inputs and the labels, by name.
   * @param hyperparameters such as `{lr: 0.01}`: for this step, in place of the program's.
   * @returns the loss and the metrics of this batch, from before the update.
   * @throws InputError, ConfigurationError: nothing has run. NonFiniteLossError: the state is the one from before the step.
   */
  step(batch: Batch, hyperparameters: Readonly<Record<string, number>> = {}): Promise<Figures> {
    return this.alone(async () => {
      const signature = this.program.signature.step;
      const feeds = this.feeds("step", [...checkBatch(signature, batch, [], this.featureNames), ...checkHyperparameters(signature, hyperparameters)]);
      if (signature.end !== null && this.stepCount >= signature.end) {
        throw new ConfigurationError(
          `The learning-rate schedule of this program ends after ${signature.end} steps, and the state has taken ${this.stepCount}: ` +
            "compile with a schedule of more steps, or with past_end='hold' to go on at its last rate",
        );
      }
      const outputs = await this.run("step", feeds);
      const results = await this.results(signature.outputs.filter(({ updates }) => updates === undefined), outputs);
      await this.checkLoss(results, outputs);
      this.moveOn(outputs);
      const figures = reported(signature.outputs, results);
      this.dispatchEvent(new CustomEvent<StepReport>("step", { detail: { epoch: this.epoch, step: this.stepCount, figures } }));
      return figures;
    });
  }

  /**
   * Train on batches, epoch after epoch, and give a report after each step.
   *
   * @param batches the batches of an epoch, or a function that gives those of an epoch by its number, from 1.
   */
  async *train(
    batches: Batches | ((epoch: number) => Batches), { epochs = 1, hyperparameters = {} as Record<string, number> } = {},
  ): AsyncGenerator<StepReport> {
    for (let epoch = 1; epoch <= epochs; epoch++) {
      let count = 0;
      for await (const batch of typeof batches === "function" ? batches(epoch) : batches) {
        this.epoch = epoch;
        const figures = await this.step(batch, hyperparameters);
        count++;
        yield { epoch, step: this.stepCount, figures };
      }
      if (count === 0) throw new InputError(`There is no batch to train on in epoch ${epoch}: the data set is empty, or its iterator was already used up`);
    }
  }

  /**
   * The loss and the metrics of one batch, in inference mode; the state stays.
   *
   * @param parameters `average` evaluates the average that the optimizer keeps.
   */
  async evaluate(batch: Batch, parameters?: "average"): Promise<Figures> {
    const outputs = await this.inference("evaluate", batch, [], parameters);
    return Object.fromEntries([...outputs].flatMap(([name, tensor]) => (totalOf(name) ? [] : [[name, numberAt(tensor, 0)]])));
  }

  /** The totals of one batch. Added over batches or clients, they tell the figures of all of them. */
  async evaluateTotals(batch: Batch, parameters?: "average"): Promise<Totals> {
    const outputs = await this.inference("evaluate", batch, [], parameters);
    return new Map([...outputs].filter(([name]) => totalOf(name)));
  }

  /** The loss and the metrics over many batches, of any sizes, from totals over all their samples. */
  async evaluateData(batches: Batches, parameters?: "average"): Promise<Figures> {
    const totals: Totals[] = [];
    for await (const batch of batches) totals.push(await this.evaluateTotals(batch, parameters));
    if (!totals.length) throw new InputError("There is no batch to evaluate: the data set is empty, or its iterator was already used up");
    return combined(exactSum(totals), this.program.options.loss_terms ?? {});
  }

  /** The model's outputs by name, in inference mode; labels in the batch are not used. */
  async predict(batch: Batch, parameters?: "average"): Promise<Record<string, Tensor>> {
    const labels = entriesOf(this.program.signature.step.inputs, "label").map(({ name }) => name);
    return Object.fromEntries(await this.inference("predict", batch, labels, parameters));
  }

  /**
   * What the frozen part of the model computes of one batch, by name: what `step` and `evaluate` take in place of its inputs.
   *
   * A `FeatureCache` keeps it for each sample.
   *
   * @param batch the model's inputs; labels in it are not used.
   * @throws ConfigurationError where the program has no cached features; InputError as `step`.
   */
  features(batch: Batch): Promise<Record<string, Tensor>> {
    return this.alone(async () => {
      const { step, predict, [FEATURES]: signature } = this.program.signature;
      if (!signature) {
        throw new ConfigurationError(
          "The program has no features that are computed once: compile it with cached_features='auto', or with the name of the value that they are",
        );
      }
      const ignored = [step, predict].flatMap(({ inputs }) => entriesOf(inputs, "data", "label")).map(({ name }) => name);
      const outputs = await this.run(FEATURES, this.feeds(FEATURES, checkBatch(signature, batch, ignored)));
      return Object.fromEntries(await this.results(signature.outputs, outputs));
    });
  }

  /**
   * The gradients of one batch, and the next values of what they change besides parameters: `grad:*`, `next:stat/*`, `next:rng/key`,
   * the loss and the metrics. The state stays.
   */
  gradients(batch: Batch): Promise<Map<string, Tensor>> {
    return this.alone(async () => {
      const signature = this.program.signature.grad;
      return this.results(signature.outputs, await this.run("grad", this.feeds("grad", checkBatch(signature, batch, [], this.featureNames))));
    });
  }

  /**
   * Update the parameters by gradients, such as those added up over several batches or clients.
   *
   * @param gradients `grad:<initializer>` for each parameter that trains; beside them `next:*` of `gradients`, which are taken over.
   */
  applyGradients(gradients: ReadonlyMap<string, Tensor>, hyperparameters: Readonly<Record<string, number>> = {}): Promise<Figures> {
    return this.alone(async () => {
      const signature = this.program.signature.apply;
      const given = entriesOf(signature.inputs, "gradient", "indices", "rows", "weight");
      const absent = given.find(({ name }) => !gradients.has(name));
      if (absent) throw new InputError(`The gradients lack '${absent.name}': give all that session.gradients returns`);
      const feeds = this.feeds("apply", [...given.map(({ name }) => [name, gradients.get(name)!] as const), ...checkHyperparameters(signature, hyperparameters)]);
      const outputs = await this.run("apply", feeds);
      const results = await this.results(signature.outputs.filter(({ updates }) => updates === undefined), outputs);
      for (const { name, updates } of signature.outputs) if (updates !== undefined) this.replace(updates, outputs[name]!);
      for (const { name, updates } of this.program.signature.grad.outputs) {
        const next = gradients.get(name);
        if (updates !== undefined && next) this.replace(updates, this.runtime.toOrt(copyOf(next)));
      }
      return reported(signature.outputs, results);
    });
  }

  /** Copies of the state, by state name. */
  state(): Promise<Map<string, Tensor>> {
    return this.alone(() => this.copies());
  }

  /**
   * Replace the whole state by copies of these arrays.
   *
   * @throws ConfigurationError where a name is missing or unknown, or a shape or dtype differs; the state is as it was.
   */
  loadState(state: ReadonlyMap<string, Tensor>): Promise<void> {
    checkState(this.program.state.values(), state, ConfigurationError, "The state", REMEDY);
    return this.alone(() => this.place(state));
  }

  /**
   * The whole state as the bytes of a checkpoint, which Python's `session.restore` reads too.
   *
   * @param extra JSON-compatible values to keep with it, which `restore` returns.
   */
  checkpoint(extra: Record<string, unknown> = {}): Promise<Uint8Array> {
    return this.alone(async () => {
      const { metadata, stepCount: step } = this;
      return writeCheckpoint(this.program, { state: await this.copies(), step, engine: "onnxruntime", extra, metadata });
    });
  }

  /** Write a checkpoint, whole or not at all: into a file, or, in a browser, into IndexedDB under this name. */
  async saveCheckpoint(name: string, extra: Record<string, unknown> = {}): Promise<void> {
    await store().write(name, await this.checkpoint(extra));
  }

  /**
   * Take over the state of a checkpoint, made by this client or any other.
   *
   * @param checkpoint its bytes, or the name that it was saved under.
   * @returns the `extra` that it was saved with.
   * @throws CheckpointError where it is missing, damaged, or of another program. The state is as it was.
   */
  async restore(checkpoint: Uint8Array | string): Promise<Record<string, unknown>> {
    const name = typeof checkpoint === "string" ? checkpoint : "checkpoint";
    const bytes = typeof checkpoint === "string" ? await store().read(checkpoint) : checkpoint;
    if (bytes === undefined) throw new CheckpointError(`There is no checkpoint '${name}': check the name, or start without it`);
    const opened = readCheckpoint(bytes, name);
    checkCheckpoint(opened, this.program, name);
    await this.alone(() => this.place(opened.state));
    this.metadata = { ...this.metadata, ...opened.metadata };
    return opened.extra;
  }

  /**
   * An inference model in this state that any ONNX runtime loads, under the source's own names. Batch normalization stays as it is.
   *
   * @param options.dataName name of the file of weights, where they are too many for one file.
   * @param options.parameters `average` exports the average that the optimizer keeps.
   */
  exportModel(options: { dataName?: string; parameters?: "average"; oneFileLimit?: number } = {}): Promise<ExportedModel> {
    const instead = this.averages(options.parameters);
    return this.alone(async () => {
      const state = await this.copies();
      for (const [name, other] of instead) state.set(name, state.get(other)!);
      return exportModel(this.program, state, this.metadata, options.dataName, options.oneFileLimit);
    });
  }

  /** Free what the runtime holds. */
  close(): Promise<void> {
    return this.alone(async () => {
      this.isClosed = true;
      for (const graph of this.graphs.values()) await (await graph).release();
      for (const tensor of this.current.values()) dispose(tensor);
    });
  }

  private alone<Result>(work: () => Promise<Result>): Promise<Result> {
    const result = this.turn.then(() => {
      if (this.isClosed) throw new EngineError("The session is closed: open another with Session.open(program)");
      return work();
    });
    this.turn = result.catch(() => undefined);
    return result;
  }

  private async initialState(seed: number): Promise<Map<string, Tensor>> {
    const { weights, signature } = this.program;
    const inputs = signature.init.inputs.map((entry): [string, Tensor] => [
      entry.name, entry.role === "seed" ? scalar(entry.dtype, seed) : weights.get(entry.name)!,
    ]);
    const feeds = Object.fromEntries(inputs.map(([name, tensor]) => [name, this.runtime.toOrt(tensor)]));
    const outputs = await this.run("init", feeds);
    const state = new Map(weights);
    for (const { name, updates } of signature.init.outputs) if (updates !== undefined) state.set(updates, await this.runtime.fromOrt(outputs[name]!));
    await (await this.graphs.get("init")!).release();
    this.graphs.delete("init");
    return state;
  }

  /** Take over copies of a state. */
  private async place(state: ReadonlyMap<string, Tensor>): Promise<void> {
    for (const tensor of this.current.values()) dispose(tensor);
    if (this.backend === "webgpu") await this.graph("step"); // its device is there once a graph is open
    for (const name of this.program.state.keys()) {
      this.current.set(name, this.runtime.toDevice(copyOf(state.get(name)!)));
    }
  }

  private async copies(): Promise<Map<string, Tensor>> {
    const state = new Map<string, Tensor>();
    for (const [name, tensor] of this.current) state.set(name, copyOf(await this.runtime.fromOrt(tensor)));
    return state;
  }

  private signatureOf(name: GraphName): GraphSignature {
    return this.program.signature[name]!;
  }

  private graph(name: GraphName): Promise<InferenceSession> {
    let opened = this.graphs.get(name);
    if (!opened) {
      const staying = this.signatureOf(name).outputs.filter((entry) => entry.updates !== undefined && this.runtime.staysOnDevice(entry.dtype));
      opened = this.program.graph(name).then((file) => this.runtime.open(name, file, name === "step" ? staying.map((entry) => entry.name) : []));
      this.graphs.set(name, opened);
      opened.catch(() => this.graphs.delete(name));
    }
    return opened;
  }

  /** What a graph reads: arrays that are given, and the state. */
  private feeds(name: GraphName, given: Iterable<readonly [string, Tensor]>, instead: ReadonlyMap<string, string> = new Map()): Record<string, OrtTensor> {
    const feeds: Record<string, OrtTensor> = {};
    for (const entry of this.signatureOf(name).inputs) {
      if (isState(entry)) feeds[entry.name] = this.current.get(instead.get(entry.name) ?? entry.name)!;
    }
    for (const [key, tensor] of given) feeds[key] = this.runtime.toOrt(tensor);
    return feeds;
  }

  private async run(name: GraphName, feeds: Record<string, OrtTensor>): Promise<Record<string, OrtTensor>> {
    const session = await this.graph(name);
    try {
      return (await session.run(feeds)) as Record<string, OrtTensor>;
    } catch (error) {
      throw this.runtime.failure(name, "cannot be run", error);
    }
  }

  private async inference(name: "evaluate" | "predict", batch: Batch, ignored: string[], parameters?: "average"): Promise<Map<string, Tensor>> {
    const instead = this.averages(parameters);
    return this.alone(async () => {
      const signature = this.program.signature[name];
      const outputs = await this.run(name, this.feeds(name, checkBatch(signature, batch, ignored, this.featureNames), instead));
      return this.results(signature.outputs, outputs);
    });
  }

  private async results(entries: readonly Entry[], outputs: Record<string, OrtTensor>): Promise<Map<string, Tensor>> {
    const results = new Map<string, Tensor>();
    for (const { name } of entries) results.set(name, await this.runtime.fromOrt(outputs[name]!));
    return results;
  }

  private async checkLoss(results: ReadonlyMap<string, Tensor>, outputs: Record<string, OrtTensor>): Promise<void> {
    for (const { name } of entriesOf(this.program.signature.step.outputs, "loss")) {
      const loss = numberAt(results.get(name)!, 0);
      if (Number.isFinite(loss)) continue;
      for (const output of this.updates.values()) dispose(outputs[output]!);
      const state = await this.copies();
      const damaged = [...state].find(([, tensor]) => !isFinite(tensor))?.[0];
      throw new NonFiniteLossError(
        `The ${name} at step ${this.stepCount} is ${String(loss).replace("NaN", "nan").replace("Infinity", "inf")}. ` +
          (damaged === undefined
            ? "The state is kept as it was before this step. Look for NaN or infinite values in the batch, lower the learning rate (lr), or clip the gradients"
            : `The state is kept as it was before this step, but '${damaged}' holds NaN or infinite values already. Restore an earlier ` +
              "checkpoint and lower the learning rate (lr), or clip the gradients"),
      );
    }
  }

  /** Make the results of a step the state. */
  private moveOn(outputs: Record<string, OrtTensor>): void {
    for (const [name, output] of this.updates) this.replace(name, outputs[output]!);
  }

  private replace(name: string, value: OrtTensor): void {
    dispose(this.current.get(name)!);
    this.current.set(name, value);
  }

  /** Parameter to the state entry of its average. */
  private averages(parameters: string | undefined): Map<string, string> {
    if (parameters === undefined) return new Map();
    const kept = parameters === "average" ? [...this.program.state.keys()].filter((name) => AVERAGE.test(name)) : [];
    if (!kept.length) {
      throw new ConfigurationError(
        `parameters='${parameters}': the program's optimizer keeps no average of them; wrap it in burnish.optim.ema(...) or burnish.optim.swa(...)`,
      );
    }
    return new Map(kept.map((name) => [name.replace(AVERAGE, "param/"), name]));
  }
}

/** What the names of averages begin with; those of a parameter group have its number. */
const AVERAGE = /^opt\/average(:[^/]*)?\//;

function reported(entries: readonly Entry[], results: ReadonlyMap<string, Tensor>): Figures {
  const shown = entriesOf(entries, "loss", "metric", "diagnostic", "rate");
  return Object.fromEntries(shown.map(({ name }) => [name, numberAt(results.get(name)!, 0)]));
}

/** Free what lies on a device; arrays of JavaScript are freed by themselves. */
function dispose(tensor: OrtTensor): void {
  if (tensor.location === "gpu-buffer") tensor.dispose();
}
