/** JSON as Python's `json.dumps` writes it: a file then has the same bytes whoever wrote it. It is read as Python reads it, too. */

import { isRecord, shown } from "./options.js";

/**
 * The text of a JSON-compatible value.
 *
 * @param what how errors call it.
 * @throws TypeError that names a value that JSON does not have, and which `JSON.stringify` would leave out or write as null.
 */
export function spacedJson(value: unknown, what: string): string {
  if (value === null || typeof value === "boolean") return String(value);
  if (typeof value === "string") return quoted(value);
  if (typeof value === "number" && Number.isFinite(value)) return numberText(value);
  if (Array.isArray(value)) return `[${Array.from(value, (item, place) => spacedJson(item, `${what}[${place}]`)).join(", ")}]`;
  if (isRecord(value)) {
    return `{${Object.entries(value).map(([key, item]) => `${quoted(key)}: ${spacedJson(item, `${what}.${key}`)}`).join(", ")}}`;
  }
  throw new TypeError(`${what} is ${shown(value)}`);
}

function numberText(value: number): string {
  if (Object.is(value, -0)) return "-0.0";
  // JavaScript writes whole numbers with as many digits as tell doubles apart, and Python reads all of them.
  if (Number.isInteger(value) && Math.abs(value) < 1e21) return String(BigInt(value));
  if (Math.abs(value) >= 1e-4) return String(value);
  return value.toExponential().replace(/e-(\d)$/, "e-0$1");
}

function quoted(text: string): string {
  // Others than those that stand in Python for the bytes of a file name that is not UTF-8.
  if (/[\ud800-\udc7f\udd00-\udfff]/u.test(text)) throw new TypeError(`${JSON.stringify(text)} has half of a surrogate pair, which is no character`);
  return JSON.stringify(text).replace(/[\u007f-\uffff]/g, (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/**
 * The value of a text of JSON.
 *
 * @throws SyntaxError where it is none, or has an object with a key that comes twice: other readers would take the other value.
 */
export function parseJson(json: string): any {
  const value: unknown = JSON.parse(json);
  const open: Set<string>[] = [];
  let [begin, end] = [0, 0];
  for (let place = 0; place < json.length; place++) {
    const unit = json[place]!;
    if (unit === "{" || unit === "[") open.push(new Set());
    else if (unit === "}" || unit === "]") open.pop();
    else if (unit === '"') {
      begin = place++;
      for (; json[place] !== '"'; place++) if (json[place] === "\\") place++;
      end = place + 1;
    } else if (unit === ":") {
      const text = json.slice(begin, end);
      const key: string = text.includes("\\") ? JSON.parse(text) : text.slice(1, -1);
      const keys = open.at(-1)!;
      if (keys.has(key)) throw new SyntaxError(`an object has the key ${JSON.stringify(key)} twice`);
      keys.add(key);
    }
  }
  return value;
}

/** The order of Python's strings. */
export function byCodePoints(one: string, other: string): number {
  const a = [...one];
  const b = [...other];
  for (let i = 0; i < Math.min(a.length, b.length); i++) {
    const difference = a[i]!.codePointAt(0)! - b[i]!.codePointAt(0)!;
    if (difference) return difference;
  }
  return a.length - b.length;
}
