/** Whether a state fits a program. */

import { ConfigurationError, type BurnishError } from "./errors.js";
import { shown } from "./options.js";
import type { Entry } from "./signature.js";
import { copyOf, viewOf, type Tensor } from "./tensor.js";

/**
 * Copies of arrays by name, as they are now.
 *
 * @param what the arrays, as errors call them.
 * @throws an error of the class where it is no map, or one of its values no array.
 */
export function copiesOf(
  arrays: ReadonlyMap<string, Tensor>, what: string, remedy: string, errorClass: new (message: string) => BurnishError = ConfigurationError,
): Map<string, Tensor> {
  if (Object.prototype.toString.call(arrays) !== "[object Map]") throw new errorClass(`${what} is ${shown(arrays)}, no Map of arrays by name. ${remedy}`);
  const copies = new Map<string, Tensor>();
  for (const [name, array] of arrays) {
    const view = typeof array === "object" && array !== null ? viewOf(array) : shown(array);
    if (typeof view === "string") throw new errorClass(`${what} does not fit the program: '${name}' has ${view}. ${remedy}`);
    copies.set(name, copyOf(view));
  }
  return copies;
}

/** What is missing, unknown or of another dtype or shape, each as a phrase; empty where the state fits. */
export function stateDifferences(entries: Iterable<Entry>, state: ReadonlyMap<string, Tensor>): string[] {
  const expected = new Map([...entries].map((entry) => [entry.name, entry]));
  const differences: string[] = [];
  const missing = [...expected.keys()].filter((name) => !state.has(name));
  const unknown = [...state.keys()].filter((name) => !expected.has(name));
  if (missing.length) differences.push(`missing ${listed(missing)}`);
  if (unknown.length) differences.push(`unknown ${listed(unknown)}`);
  for (const [name, entry] of expected) {
    const tensor = state.get(name);
    if (tensor === undefined) continue;
    if (entry.shape !== null && !shapeFits(tensor.shape, entry.shape)) {
      differences.push(`'${name}' has shape [${tensor.shape.join(", ")}], expected [${entry.shape.join(", ")}]`);
    } else if (tensor.dtype !== entry.dtype) {
      differences.push(`'${name}' has dtype ${tensor.dtype}, expected ${entry.dtype}`);
    }
  }
  return differences.length > 6 ? [...differences.slice(0, 6), `and ${differences.length - 6} more`] : differences;
}

/** Throw an error of a class unless `state` holds exactly these entries, each with its dtype and shape. */
export function checkState(
  entries: Iterable<Entry>,
  state: ReadonlyMap<string, Tensor>,
  errorClass: new (message: string) => BurnishError,
  source: string,
  remedy: string,
): void {
  const differences = stateDifferences(entries, state);
  if (differences.length) throw new errorClass(`${source} does not fit the program: ${differences.join("; ")}. ${remedy}`);
}

function shapeFits(actual: readonly number[], expected: readonly (number | string | null)[]): boolean {
  return actual.length === expected.length && expected.every((extent, axis) => typeof extent !== "number" || extent === actual[axis]);
}

function listed(names: string[]): string {
  const shown = names.slice(0, 5).map((name) => `'${name}'`).join(", ");
  return shown + (names.length > 5 ? ` and ${names.length - 5} more` : "");
}
