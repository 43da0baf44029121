/** Figures of many batches, from totals that add up. */

import { InputError } from "./errors.js";
import { INTEGERS, emptyTensor, numberAt, type Tensor } from "./tensor.js";

/** Totals by the names of the outputs of `evaluate`: `sum:<name>`, `count:<name>`, `total:<name>:<part>`. */
export type Totals = Map<string, Tensor>;

/** What an output of `evaluate` is a total of, and which; undefined for a figure. */
export function totalOf(output: string): { name: string; part: string } | undefined {
  const [kind, ...rest] = output.split(":");
  if (kind === "sum" || kind === "count") return { name: rest.join(":"), part: kind };
  if (kind !== "total") return undefined;
  return { name: rest.slice(0, -1).join(":"), part: rest.at(-1)! };
}

/** Add totals: counts exactly, sums in float64, rounded once. */
export function exactSum(totals: readonly Totals[]): Totals {
  const added: Totals = new Map();
  for (const [name, first] of totals[0] ?? []) {
    const result = emptyTensor(INTEGERS.has(first.dtype) ? "int64" : "float64", first.shape);
    for (let place = 0; place < first.data.length; place++) {
      if (result.dtype === "int64") {
        (result.data as BigInt64Array)[place] = totals.reduce((sum, one) => sum + BigInt(one.get(name)!.data[place]!), 0n);
      } else {
        (result.data as Float64Array)[place] = roundedOnce(totals.map((one) => numberAt(one.get(name)!, place)));
      }
    }
    added.set(name, result);
  }
  return added;
}

/** The sum of numbers, rounded once (Shewchuk 1997), as Python's `math.fsum`. */
export function roundedOnce(values: readonly number[]): number {
  const parts: number[] = [];
  for (let value of values) {
    if (!Number.isFinite(value)) return values.reduce((sum, other) => sum + other, 0);
    let kept = 0;
    for (let part of parts) {
      if (Math.abs(value) < Math.abs(part)) [value, part] = [part, value];
      const sum = value + part;
      const rest = part - (sum - value);
      if (rest) parts[kept++] = rest;
      value = sum;
    }
    parts.length = kept;
    parts.push(value);
  }
  let sum = 0;
  let rest = 0;
  while (parts.length) {
    const before = sum;
    const part = parts.pop()!;
    sum = before + part;
    rest = part - (sum - before);
    if (rest) break;
  }
  const next = parts.at(-1);
  if (next !== undefined && ((rest < 0 && next < 0) || (rest > 0 && next > 0))) {
    const twice = rest * 2;
    const other = sum + twice;
    if (twice === other - sum) return other;
  }
  return sum;
}

/**
 * The loss and the metrics of added totals.
 *
 * @param lossTerms coefficients of the figures that the loss is the sum of, where it has several.
 * @throws InputError where nothing counts towards a figure, or a metric is no quotient of a sum and a count.
 */
export function combined(totals: Totals, lossTerms: Readonly<Record<string, number>>): Record<string, number> {
  const parts = new Map<string, Map<string, Tensor>>();
  for (const [output, tensor] of totals) {
    const { name, part } = totalOf(output)!;
    parts.set(name, (parts.get(name) ?? new Map()).set(part, tensor));
  }
  const names = [...parts.keys()].sort((one, other) => Number(!one.startsWith("loss")) - Number(!other.startsWith("loss")));
  const figures: Record<string, number> = {};
  for (const name of names) {
    const sum = parts.get(name)!.get("sum");
    const count = parts.get(name)!.get("count");
    if (sum && parts.get(name)!.size === 1 && name.split(":")[0] === "loss") {
      figures[name] = numberAt(sum, 0);
      continue;
    }
    if (!sum || !count) {
      throw new InputError(
        `The metric '${name}' is no quotient of a sum and a count, and this client does not combine its totals: evaluate one batch at a ` +
          "time, or combine them in Python (session.combine_totals)",
      );
    }
    if (numberAt(count, 0) === 0) {
      throw new InputError(`Nothing counts towards '${name}': every label is ignored, or none is of a class that it is about. Evaluate on labelled samples`);
    }
    figures[name] = numberAt(sum, 0) / numberAt(count, 0);
  }
  const terms = Object.entries(lossTerms);
  if (!terms.length) return figures;
  return { loss: roundedOnce(terms.map(([name, coefficient]) => coefficient * figures[name]!)), ...figures };
}
