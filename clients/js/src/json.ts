/**
 * JSON as Python writes it with sorted keys: the text that digests of programs are taken of.
 *
 * Numbers stay the text that they were read as, because 1.0 and 1 are two things there.
 */

class NumberText {
  constructor(readonly text: string) {}
}

type Value = null | boolean | string | NumberText | Value[] | Map<string, Value>;

const TOKEN = /\s*(?:([{}[\]:,])|("(?:[^"\\]|\\.)*")|(-?(?:\d[\d.eE+-]*|Infinity)|NaN)|(true|false|null))/y;

/** A JSON text of which entries can be taken out, and the digest text of the rest be had. */
export class ExactJson {
  private constructor(private readonly value: Value) {}

  static parse(text: string): ExactJson {
    const tokens = tokenized(text);
    const value = read(tokens, { place: 0 });
    return new ExactJson(value);
  }

  static list(...items: ExactJson[]): ExactJson {
    return new ExactJson(items.map((item) => item.value));
  }

  /** The value under a key. */
  get(key: string): ExactJson | undefined {
    const value = this.value instanceof Map ? this.value.get(key) : undefined;
    return value === undefined ? undefined : new ExactJson(value);
  }

  /** The entries of an object, or the items of a list. */
  items(): ExactJson[] {
    const values = this.value instanceof Map ? [...this.value.values()] : Array.isArray(this.value) ? this.value : [];
    return values.map((value) => new ExactJson(value));
  }

  /** Remove keys of an object, in place. */
  remove(...keys: string[]): this {
    if (this.value instanceof Map) for (const key of keys) this.value.delete(key);
    return this;
  }

  /** The text as `json.dumps(value, sort_keys=True)` gives it. */
  text(): string {
    return write(this.value);
  }
}

function tokenized(text: string): string[] {
  const tokens: string[] = [];
  TOKEN.lastIndex = 0;
  for (let end = 0; text.slice(end).trim() !== ""; end = TOKEN.lastIndex) {
    const match = TOKEN.exec(text);
    if (!match) throw new SyntaxError(`no JSON at character ${end}`);
    tokens.push(match[0].trim());
  }
  return tokens;
}

function read(tokens: string[], at: { place: number }): Value {
  const token = tokens[at.place++];
  if (token === undefined) throw new SyntaxError("JSON that ends too early");
  if (token === "{") {
    const entries = new Map<string, Value>();
    while (tokens[at.place] !== "}") {
      if (entries.size) expect(tokens, at, ",");
      const key = JSON.parse(tokens[at.place++] ?? "") as string;
      expect(tokens, at, ":");
      entries.set(key, read(tokens, at));
    }
    at.place++;
    return entries;
  }
  if (token === "[") {
    const items: Value[] = [];
    while (tokens[at.place] !== "]") {
      if (items.length) expect(tokens, at, ",");
      items.push(read(tokens, at));
    }
    at.place++;
    return items;
  }
  if (token.startsWith('"')) return JSON.parse(token) as string;
  if (token === "null") return null;
  if (token === "true" || token === "false") return token === "true";
  return new NumberText(token);
}

function expect(tokens: string[], at: { place: number }, wanted: string): void {
  if (tokens[at.place++] !== wanted) throw new SyntaxError(`JSON without '${wanted}' where it belongs`);
}

function write(value: Value, sorted = true): string {
  if (value === null) return "null";
  if (typeof value === "boolean") return String(value);
  if (typeof value === "string") return quoted(value);
  if (value instanceof NumberText) return value.text;
  if (Array.isArray(value)) return `[${value.map((item) => write(item, sorted)).join(", ")}]`;
  const keys = sorted ? [...value.keys()].sort(byCodePoints) : [...value.keys()];
  return `{${keys.map((key) => `${quoted(key)}: ${write(value.get(key)!, sorted)}`).join(", ")}}`;
}

function quoted(text: string): string {
  return JSON.stringify(text).replace(/[\u007f-\uffff]/g, (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** The text of a JSON-compatible value as Python's `json.dumps` spaces it; a file then has the same bytes whoever wrote it. */
export function spacedJson(value: unknown): string {
  const text = JSON.stringify(value);
  if (text === undefined) throw new TypeError(`${String(value)} is no JSON`);
  return write(read(tokenized(text), { place: 0 }), false);
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
