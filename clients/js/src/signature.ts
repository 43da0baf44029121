/** The signature of a program: every input and output of every graph, by name, role, dtype and shape. */

import { UnsupportedOperatorError } from "./errors.js";
import { dtypeOfOnnx, type DType } from "./tensor.js";

export const GRAPH_NAMES = ["init", "step", "grad", "apply", "evaluate", "predict"] as const;
/** The graph that a program with cached features has beside these. */
export const FEATURES = "features";
export type GraphName = (typeof GRAPH_NAMES)[number] | typeof FEATURES;

export type Role =
  | "data" | "label" | "parameter" | "statistic" | "optimizer" | "key" | "step" | "hyperparameter" | "seed"
  | "gradient" | "indices" | "rows" | "weight" | "loss" | "metric" | "diagnostic" | "rate" | "output";

const STATE_ROLES: ReadonlySet<Role> = new Set<Role>(["parameter", "statistic", "optimizer", "key", "step"]);

/** One input or output of a graph. */
export interface Entry {
  name: string;
  role: Role;
  /** Its element type under numpy's name. */
  dtype: DType;
  /** Extents; a string is a symbolic dimension, null an unknown one. Null as a whole where the rank is not known. */
  shape: readonly (number | string | null)[] | null;
  /** The state entry whose next value this output is. */
  updates?: string;
  default?: number;
  minimum?: number;
  maximum?: number;
  /** Whether the minimum and the maximum alone are valid: a label that is a sign. */
  two_values?: boolean;
  ignored?: number;
  /** Of a batch and of what the model gives: the axis of the samples, 0 where it is left out; null: it has no samples. */
  sample_axis?: number | null;
}

/** What batch normalization, or the teacher of a loss, asks of a symbolic dimension. */
export interface ExtentRule {
  dimension: string;
  layer: string;
  multiple: number;
  minimum: number;
  /** The most that a teacher takes; 0: any. */
  maximum: number;
  cause: string;
}

export interface GraphSignature {
  inputs: readonly Entry[];
  outputs: readonly Entry[];
  extents: readonly ExtentRule[];
  /** The first step that the learning rate is not defined for. */
  end: number | null;
}

export type Signature = Record<(typeof GRAPH_NAMES)[number], GraphSignature> & { [FEATURES]?: GraphSignature };

export function isState(entry: Entry): boolean {
  return STATE_ROLES.has(entry.role);
}

export function entriesOf(entries: readonly Entry[], ...roles: Role[]): Entry[] {
  return entries.filter((entry) => roles.includes(entry.role));
}

/** Every state entry, in the order of the step graph; then what only evaluation and prediction read. */
export function stateEntries(signature: Signature): Map<string, Entry> {
  const entries = new Map<string, Entry>();
  for (const graph of ["step", "evaluate", "predict"] as const) {
    for (const entry of signature[graph].inputs) if (isState(entry) && !entries.has(entry.name)) entries.set(entry.name, entry);
  }
  return entries;
}

/**
 * Read a signature as `program.json` holds it.
 *
 * @throws Error where something is not what a signature has; UnsupportedOperatorError for a dtype without arrays here.
 */
export function readSignature(values: any): Signature {
  const names = Object.keys(values ?? {}).sort();
  const needed = names.filter((name) => name !== FEATURES);
  if (needed.join() !== [...GRAPH_NAMES].sort().join()) throw new Error(`it has the graphs ${names.join(", ")}`);
  return Object.fromEntries(
    names.map((name) => [
      name,
      {
        inputs: values[name].inputs.map(readEntry),
        outputs: values[name].outputs.map(readEntry),
        extents: (values[name].extents ?? []).map(readRule),
        end: values[name].end ?? null,
      },
    ]),
  ) as unknown as Signature;
}

function readEntry(values: any): Entry {
  if (typeof values.name !== "string" || typeof values.role !== "string") throw new Error(`an entry ${JSON.stringify(values)}`);
  const dtype = dtypeOfOnnx(values.dtype);
  if (dtype === undefined) {
    throw new UnsupportedOperatorError(
      `'${values.name}' of the program is of ${values.dtype}, which this client has no arrays of: compile with another precision`,
    );
  }
  const shape = values.shape as Entry["shape"];
  if (shape !== null && !(Array.isArray(shape) && shape.every(isExtent))) throw new Error(`the shape of '${values.name}'`);
  const axis = values.sample_axis ?? 0;
  if (!Number.isSafeInteger(axis) || axis < 0 || (axis > 0 && axis >= (shape?.length ?? Infinity))) throw new Error(`the sample_axis of '${values.name}'`);
  return { ...values, dtype, ...(values.default === "NaN" ? { default: NaN } : {}) };
}

function isExtent(extent: unknown): boolean {
  return extent === null || typeof extent === "string" || (Number.isSafeInteger(extent) && (extent as number) >= 0);
}

function readRule(values: any): ExtentRule {
  const { dimension, layer, multiple = 1, minimum = 1, maximum = 0, cause = "" } = values;
  return { dimension, layer, multiple, minimum, maximum, cause };
}
