/** The session: a program opened on ONNX Runtime, with its state. */

import type { InferenceSession, Tensor as OrtTensor } from "onnxruntime-common";

import { checkBatch, checkHyperparameters, type Batch } from "./batch.js";
import { baseHash, checkCheckpoint, checkedMetadata, extraText, openCheckpoint, writeCheckpoint } from "./checkpoint.js";
import { CheckpointError, ConfigurationError, EngineError, InputError, NonFiniteLossError } from "./errors.js";
import { exportModel, type DataName, type ExportedModel } from "./export.js";
import { checkOptions, shown } from "./options.js";
import type { Program } from "./program.js";
import { Runtime, RUNTIME_OPTIONS, type Backend, type RuntimeOptions } from "./runtime.js";
import { entriesOf, FEATURES, isState, type Entry, type GraphName, type GraphSignature } from "./signature.js";
import { checkState, copiesOf } from "./state.js";
import { store } from "./store.js";
import { bytesIn, copyOf, dtypeOfArray, isFinite, numberAt, scalar, type Tensor } from "./tensor.js";
import { totalOf, type Totals } from "./totals.js";
import { Trains, type Figures } from "./training.js";

export interface SessionOptions extends RuntimeOptions {
  /** Where to start, as `state()` returns it; else the weights of the program and what its init graph computes. */
  state?: ReadonlyMap<string, Tensor>;
  /** Of the random key, where `state` is not given. */
  seed?: number;
}

const REMEDY = "Give what session.state() of this program returns";

/**
 * A program opened on ONNX Runtime, holding the state there: runs steps, evaluates, predicts, saves and restores.
 *
 * A session takes one call at a time: calls wait for each other, in their order. Each step dispatches the event `step`.
 */
export class Session extends Trains {
  /** Entries for the `metadata_props` of exported models; checkpoints keep them. */
  metadata: Record<string, string> = {};
  /** The entries of `metadata` that the last checkpoint brought. */
  restored: Readonly<Record<string, string>> = {};
  private current = new Map<string, OrtTensor>();
  private readonly graphs = new Map<GraphName, Promise<InferenceSession>>();
  private readonly updates: ReadonlyMap<string, string>;
  private readonly featureNames: readonly string[];
  private turn: Promise<unknown> = Promise.resolve();
  private closing: Promise<void> | undefined;
  private isClosed = false;
  private ownBase: string | undefined;

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
    checkOptions("Session.open", options, ["state", "seed", ...RUNTIME_OPTIONS]);
    const { seed = 0 } = options;
    if (!Number.isSafeInteger(seed)) throw new ConfigurationError(`seed=${shown(seed)}: give a whole number`);
    const state = options.state === undefined ? undefined : fittingState(program, options.state);
    const session = new Session(program, await Runtime.load({ ...options }));
    await session.place(state ?? (await session.initialState(seed)));
    return session;
  }

  get backend(): Backend {
    return this.runtime.backend;
  }

  protected get lossTerms(): Readonly<Record<string, number>> {
    return this.program.options.loss_terms ?? {};
  }

  get stepCount(): number {
    const entry = [...this.program.state.values()].find(({ role }) => role === "step");
    const value = entry && this.current.get(entry.name);
    return value ? Number((value.data as BigInt64Array)[0]) : 0;
  }

  async step(batch: Batch, hyperparameters: Readonly<Record<string, number>> = {}): Promise<Figures> {
    const signature = this.program.signature.step;
    const given = [...checkBatch(signature, batch, [], this.featureNames), ...checkHyperparameters(signature, hyperparameters)];
    return this.alone(async () => {
      if (signature.end !== null && this.stepCount >= signature.end) {
        throw new ConfigurationError(
          `The learning-rate schedule of this program ends after ${signature.end} steps, and the state has taken ${this.stepCount}: ` +
            "compile with a schedule of more steps, or with past_end='hold' to go on at its last rate",
        );
      }
      const outputs = await this.run("step", this.feeds("step", given));
      const results = await this.results(signature.outputs.filter(({ updates }) => updates === undefined), outputs);
      await this.checkLoss(results, outputs);
      this.moveOn(outputs);
      const figures = reported(signature.outputs, results);
      this.report(figures);
      return figures;
    });
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

  async evaluateTotals(batch: Batch, parameters?: "average"): Promise<Totals> {
    const outputs = await this.inference("evaluate", batch, [], parameters);
    return new Map([...outputs].filter(([name]) => totalOf(name)));
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
  async features(batch: Batch): Promise<Record<string, Tensor>> {
    const { step, predict, [FEATURES]: signature } = this.program.signature;
    if (!signature) {
      throw new ConfigurationError(
        "The program has no features that are computed once: compile it with cached_features='auto', or with the name of the value that they are",
      );
    }
    const ignored = [step, predict].flatMap(({ inputs }) => entriesOf(inputs, "data", "label")).map(({ name }) => name);
    const given = checkBatch(signature, batch, ignored);
    return this.alone(async () => {
      const outputs = await this.run(FEATURES, this.feeds(FEATURES, given));
      return Object.fromEntries(await this.results(signature.outputs, outputs));
    });
  }

  /**
   * The gradients of one batch, and the next values of what they change besides parameters: `grad:*`, `next:stat/*`, `next:rng/key`,
   * the loss and the metrics. The state stays.
   */
  async gradients(batch: Batch): Promise<Map<string, Tensor>> {
    const signature = this.program.signature.grad;
    const given = checkBatch(signature, batch, [], this.featureNames);
    return this.alone(async () => this.results(signature.outputs, await this.run("grad", this.feeds("grad", given))));
  }

  /**
   * Update the parameters by gradients, such as those added up over several batches or clients.
   *
   * @param gradients `grad:<initializer>` for each parameter that trains; next to them `next:*` of `gradients`, which are taken over.
   * @throws InputError where one is missing, unknown, or of another shape or dtype; the state is as it was.
   */
  async applyGradients(gradients: ReadonlyMap<string, Tensor>, hyperparameters: Readonly<Record<string, number>> = {}): Promise<Figures> {
    const { apply: signature, grad } = this.program.signature;
    const remedy = "Give all that session.gradients returns";
    const arrays = copiesOf(gradients, "The gradients", remedy, InputError);
    const needed = entriesOf(signature.inputs, "gradient", "indices", "rows", "weight");
    const entries = new Map([...needed, ...grad.outputs.filter(({ name }) => arrays.has(name))].map((entry) => [entry.name, entry]));
    checkState(entries.values(), arrays, InputError, "The gradients", remedy);
    const given = [...needed.map(({ name }) => [name, arrays.get(name)!] as const), ...checkHyperparameters(signature, hyperparameters)];
    return this.alone(async () => {
      const next = grad.outputs.flatMap(({ name, updates }) =>
        updates !== undefined && arrays.has(name) ? [[updates, this.runtime.toOrt(arrays.get(name)!)] as const] : [],
      );
      const outputs = await this.run("apply", this.feeds("apply", given));
      const results = await this.results(signature.outputs.filter(({ updates }) => updates === undefined), outputs);
      for (const { name, updates } of signature.outputs) if (updates !== undefined) this.replace(updates, outputs[name]!);
      for (const [name, value] of next) this.replace(name, value);
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
  async loadState(state: ReadonlyMap<string, Tensor>): Promise<void> {
    const copies = fittingState(this.program, state);
    return this.alone(() => this.place(copies));
  }

  /**
   * The whole state as the bytes of a checkpoint, which Python's `session.restore` reads too.
   *
   * @param extra JSON-compatible values to keep with it, which `restore` returns.
   */
  async checkpoint(extra: Record<string, unknown> = {}): Promise<Uint8Array> {
    const write = this.checkpointWriter(extra);
    return this.alone(write);
  }

  /** Write a checkpoint, whole or not at all: into a file, or, in a browser, into IndexedDB under this name. */
  async saveCheckpoint(name: string, extra: Record<string, unknown> = {}): Promise<void> {
    checkName(name);
    const write = this.checkpointWriter(extra);
    return this.alone(async () => store().write(name, await write()));
  }

  /**
   * Take over the state of a checkpoint, made by this client or any other.
   *
   * @param checkpoint its bytes, or the name that it was saved under.
   * @returns the `extra` that it was saved with.
   * @throws CheckpointError where it is missing, damaged, or of another program. The state is as it was.
   */
  async restore(checkpoint: Uint8Array | string): Promise<Record<string, unknown>> {
    const given = dtypeOfArray(checkpoint) === "uint8" ? bytesIn(checkpoint as Uint8Array).slice() : undefined;
    if (given === undefined) checkName(checkpoint);
    const name = given === undefined ? (checkpoint as string) : "checkpoint";
    return this.alone(async () => {
      const bytes = given ?? (await store().read(name));
      if (bytes === undefined) throw new CheckpointError(`There is no checkpoint '${name}': check the name, or start without it`);
      const opened = await openCheckpoint(bytes, name);
      const kept = opened.base === undefined ? new Map<string, Tensor>() : await this.copies(this.program.base);
      checkCheckpoint(opened, this.program, name, opened.base === undefined ? undefined : this.baseOf(kept));
      await this.place(new Map([...opened.state, ...kept]));
      if (opened.base !== undefined) this.ownBase = opened.base;
      this.restored = opened.metadata;
      this.metadata = { ...this.metadata, ...opened.metadata };
      return opened.extra;
    });
  }

  /**
   * An inference model in this state that any ONNX runtime loads, under the source's own names. Batch normalization stays as it is.
   *
   * @param options.dataName name of the file of weights, where they are too many for one file, or what makes it of its bytes.
   * @param options.parameters `average` exports the average that the optimizer keeps.
   */
  async exportModel(options: { dataName?: DataName; parameters?: "average"; oneFileLimit?: number } = {}): Promise<ExportedModel> {
    checkOptions("exportModel", options, ["dataName", "parameters", "oneFileLimit"]);
    const { dataName, oneFileLimit } = options;
    const instead = this.averages(options.parameters);
    const metadata = this.metadataNow();
    return this.alone(async () => {
      const state = await this.copies();
      for (const [name, other] of instead) state.set(name, state.get(other)!);
      return exportModel(this.program, state, metadata(), (model) => this.runtime.evaluate(model), dataName, oneFileLimit);
    });
  }

  /** Free what the runtime holds, once the calls before are done. A second time does nothing. */
  close(): Promise<void> {
    return (this.closing ??= this.alone(async () => {
      this.isClosed = true;
      for (const graph of this.graphs.values()) await (await graph).release();
      for (const tensor of this.current.values()) dispose(tensor);
    }));
  }

  private checkpointWriter(extra: unknown): () => Promise<Uint8Array> {
    const text = extraText(extra);
    const metadata = this.metadataNow();
    return async () => {
      const state = await this.copies();
      const checkpoint = { state, step: this.stepCount, engine: "onnxruntime", extra: text, metadata: metadata() };
      return writeCheckpoint(this.program, checkpoint, this.baseOf(state));
    };
  }

  /** The entries of `metadata` as they are now, with those of a checkpoint that is restored before the call has its turn. */
  private metadataNow(): () => Record<string, string> {
    const { restored } = this;
    const now = checkedMetadata(this.metadata);
    return () => (this.restored === restored ? now : { ...now, ...this.restored });
  }

  private baseOf(state: ReadonlyMap<string, Tensor>): string | undefined {
    return (this.ownBase ??= baseHash(this.program, state));
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
    const state = new Map([...weights].map(([name, tensor]) => [name, copyOf(tensor)]));
    for (const { name, updates } of signature.init.outputs) if (updates !== undefined) state.set(updates, await this.runtime.fromOrt(outputs[name]!));
    await (await this.graphs.get("init")!).release();
    this.graphs.delete("init");
    return state;
  }

  /** Let these arrays, which are the session's own, be the state: all of them, or none where one cannot be placed. */
  private async place(state: ReadonlyMap<string, Tensor>): Promise<void> {
    if (this.backend === "webgpu") await this.graph("step"); // its device is there once a graph is open
    const placed = new Map<string, OrtTensor>();
    try {
      for (const name of this.program.state.keys()) placed.set(name, this.runtime.toDevice(state.get(name)!));
    } catch (error) {
      for (const tensor of placed.values()) dispose(tensor);
      throw error;
    }
    for (const tensor of this.current.values()) dispose(tensor);
    this.current = placed;
    this.ownBase = undefined;
  }

  private async copies(names: Iterable<string> = this.current.keys()): Promise<Map<string, Tensor>> {
    const state = new Map<string, Tensor>();
    for (const name of names) state.set(name, copyOf(await this.runtime.fromOrt(this.current.get(name)!)));
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
    const signature = this.program.signature[name];
    const given = checkBatch(signature, batch, ignored, this.featureNames);
    return this.alone(async () => this.results(signature.outputs, await this.run(name, this.feeds(name, given, instead))));
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
        `parameters=${shown(parameters)}: the program's optimizer keeps no average of them; wrap it in burnish.optim.ema(...) or burnish.optim.swa(...)`,
      );
    }
    return new Map(kept.map((name) => [name.replace(AVERAGE, "param/"), name]));
  }
}

/** What the names of averages begin with; those of a parameter group have its number. */
const AVERAGE = /^opt\/average(:[^/]*)?\//;

/** Copies of a state that is given, which fits the program. */
function fittingState(program: Program, state: ReadonlyMap<string, Tensor>): Map<string, Tensor> {
  const copies = copiesOf(state, "The state", REMEDY);
  checkState(program.state.values(), copies, ConfigurationError, "The state", REMEDY);
  return copies;
}

function checkName(name: unknown): void {
  if (typeof name !== "string" || name === "") throw new ConfigurationError(`A checkpoint has a name, not ${shown(name)}: give a text, or, to restore, its bytes`);
}

function reported(entries: readonly Entry[], results: ReadonlyMap<string, Tensor>): Figures {
  const shown = entriesOf(entries, "loss", "metric", "diagnostic", "rate");
  return Object.fromEntries(shown.map(({ name }) => [name, numberAt(results.get(name)!, 0)]));
}

/** Free what lies on a device; arrays of JavaScript are freed by themselves. */
function dispose(tensor: OrtTensor): void {
  if (tensor.location === "gpu-buffer") tensor.dispose();
}
