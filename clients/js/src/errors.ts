/** Every error that is the user's to act on, under the names that Python's `burnish.errors` has. */

/** Characters that steer a terminal or an editor: names in a file can hold any. */
const UNSHOWN = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;

function escaped(text: string): string {
  return text.replace(UNSHOWN, (character) => {
    const code = character.codePointAt(0)!.toString(16);
    return code.length <= 2 ? `\\x${code.padStart(2, "0")}` : `\\u${code.padStart(4, "0")}`;
  });
}

/** Base of all errors: the input or file, what is wrong with it, and what to do. */
export class BurnishError extends Error {
  override name = "BurnishError";

  constructor(message: string, options?: ErrorOptions) {
    super(escaped(message), options);
  }
}

/** A model that cannot be read or is not valid ONNX. */
export class ModelError extends BurnishError {
  override name = "ModelError";
}

/** An operator or a dtype that the runtime does not have. */
export class UnsupportedOperatorError extends BurnishError {
  override name = "UnsupportedOperatorError";
}

/** An option that does not fit: an unknown hyperparameter, backend or dtype. */
export class ConfigurationError extends BurnishError {
  override name = "ConfigurationError";
}

/** A batch that does not fit the program: a missing input, a wrong shape or dtype, a label out of range. */
export class InputError extends BurnishError {
  override name = "InputError";
}

/** The loss became NaN or infinite; the state is the one from before the step. */
export class NonFiniteLossError extends BurnishError {
  override name = "NonFiniteLossError";
}

/** A checkpoint or saved program that is truncated, foreign, or does not fit. */
export class CheckpointError extends BurnishError {
  override name = "CheckpointError";
}

/** A runtime that is missing, or cannot run what it was given. */
export class EngineError extends BurnishError {
  override name = "EngineError";
}

const CLASSES: Record<string, new (message: string) => BurnishError> = {
  BurnishError, ModelError, UnsupportedOperatorError, ConfigurationError, InputError, NonFiniteLossError, CheckpointError, EngineError,
};

/** The error of a class by its name, as a worker sends it. */
export function errorOf(name: string, message: string): Error {
  const errorClass = CLASSES[name];
  return errorClass ? new errorClass(message) : Object.assign(new Error(message), { name });
}

/** The text of anything that was thrown. */
export function messageOf(thrown: unknown): string {
  return thrown instanceof Error ? thrown.message : String(thrown);
}
