/** Options of the public functions: an unknown one is an error, as JavaScript ignores it. */

import { ConfigurationError } from "./errors.js";

/**
 * Throw ConfigurationError unless the options are an object of known names alone.
 *
 * @param where the function, as the caller writes it.
 * @param known the names that it takes.
 * @param remedies what to do in place of a name that others take.
 */
export function checkOptions(where: string, options: unknown, known: readonly string[], remedies: Readonly<Record<string, string>> = {}): void {
  const taken = `it takes ${known.join(", ")}`;
  if (!isRecord(options)) throw new ConfigurationError(`${where} takes options as an object, not ${shown(options)}: ${taken}`);
  for (const name of Object.keys(options)) {
    if (!known.includes(name)) throw new ConfigurationError(`${where} has no option '${name}': ${remedies[name] ?? taken}`);
  }
}

/** Whether a value is an object whose entries have names: no array, no map, nothing with elements. */
export function isRecord(value: unknown): value is Record<string, unknown> {
  if (typeof value !== "object" || value === null || Array.isArray(value) || ArrayBuffer.isView(value)) return false;
  return Object.prototype.toString.call(value) === "[object Object]";
}

/** Any value in a few characters, for a message. */
export function shown(value: unknown): string {
  if (typeof value === "string") return value.length > 40 ? `${JSON.stringify(value.slice(0, 40))}...` : JSON.stringify(value);
  if (typeof value === "function") return "a function";
  if (typeof value !== "object" || value === null) return String(value);
  if (Array.isArray(value)) return `a list of ${value.length}`;
  return `an object (${Object.prototype.toString.call(value).slice(8, -1)})`;
}
