/** What the client offers, wherever it runs. */

export type { ArrayLike, Batch, Numbers } from "./batch.js";
export { readCheckpoint, type Checkpoint } from "./checkpoint.js";
export {
  BurnishError, CheckpointError, ConfigurationError, EngineError, InputError, ModelError, NonFiniteLossError, UnsupportedOperatorError,
} from "./errors.js";
export type { ExportedModel } from "./export.js";
export { FeatureCache, type ComputesFeatures, type LoadSamples } from "./feature-cache.js";
export { Program, type GraphFile, type Identity } from "./program.js";
export type { Backend, OrtModule, RuntimeOptions } from "./runtime.js";
export { Session, type SessionOptions } from "./session.js";
export type { Entry, GraphName, GraphSignature, Role, Signature } from "./signature.js";
export type { Source } from "./source.js";
export type { DType, Tensor, TypedArray } from "./tensor.js";
export type { Totals } from "./totals.js";
export type { Batches, Figures, StepReport, TrainOptions } from "./training.js";
