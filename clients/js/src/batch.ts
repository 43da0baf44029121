/** Checks of a batch before anything runs: names, dtypes, shapes and class indices, in messages that name the input. */

import { ConfigurationError, InputError } from "./errors.js";
import { isRecord, shown } from "./options.js";
import { entriesOf, type Entry, type GraphSignature } from "./signature.js";
import {
  FLOATS, INTEGERS, bfloat16Bits, bytesIn, copyOf, dtypeOfArray, emptyTensor, float16Bits, numberAt, scalar, tensorOfBytes, viewOf, type Tensor,
  type TypedArray,
} from "./tensor.js";

/**
 * What an input may be given as: an array with a dtype and a shape; a tensor of ONNX Runtime; a typed array, whose shape follows from
 * the program where one of its extents is open; or plain numbers, nested by axis or flat, whose last axis may be typed arrays.
 */
export type ArrayLike =
  | Tensor
  | { type: string; dims: readonly number[]; data: unknown }
  | { data: TypedArray; shape: readonly number[] }
  | TypedArray
  | Numbers;
export type Numbers = number | bigint | boolean | readonly Numbers[] | readonly TypedArray[];
export type Batch = Record<string, ArrayLike>;

/**
 * The batch as the arrays that a graph takes, which are copies: what is done to the batch after that changes no call.
 *
 * Floating-point values are rounded to the graph's type, and integers widened or narrowed where every value fits.
 *
 * @param ignored names that may be in the batch, and are not used.
 * @param features names of inputs that are computed from the model's own, once for each sample.
 * @throws InputError that names the input, what is wrong with it, and what to do; nothing has run.
 */
export function checkBatch(
  signature: GraphSignature, batch: Batch, ignored: readonly string[] = [], features: readonly string[] = [],
): Map<string, Tensor> {
  const entries = entriesOf(signature.inputs, "data", "label");
  const expected = new Map(entries.map((entry) => [entry.name, entry]));
  if (!isRecord(batch)) {
    throw new InputError(`A batch is an object of arrays by input name: give {${[...expected.keys()].map((name) => `'${name}': ...`).join(", ")}}`);
  }
  checkNames(expected, batch, ignored, features);
  const extents = new Map<string, { extent: number; name: string }>();
  const arrays = new Map<string, Tensor>();
  for (const [name, entry] of expected) {
    const array = withItsRank(entry, asTensor(entry, batch[name]!));
    checkShape(entry, array, extents);
    const converted = convert(entry, array);
    checkRange(entry, converted);
    arrays.set(name, converted);
  }
  for (const rule of signature.extents) {
    const { extent, name } = extents.get(rule.dimension) ?? { extent: rule.minimum * rule.multiple, name: "" };
    if (rule.maximum && extent > rule.maximum) {
      throw new InputError(
        `The input '${name}' has ${extent} along '${rule.dimension}', and the teacher of the loss '${rule.layer}' takes ` +
          `${rule.maximum} at a time, and cannot be opened for more: ${rule.cause}. Give batches of that size, or export the teacher with an open batch`,
      );
    }
    if (extent % rule.multiple !== 0 || extent < rule.minimum) {
      const reason =
        rule.multiple > 1
          ? `takes its statistics over groups of ${rule.multiple}, and asks for a multiple of ${rule.multiple}`
          : `needs ${rule.minimum} or more: a single value per channel has no variance to normalize by`;
      throw new InputError(
        `The input '${name}' has ${extent} along '${rule.dimension}', and batch normalization '${rule.layer}' ${reason}. ` +
          `Give batches of another size, or compile with norm={'${rule.layer}': 'frozen'}`,
      );
    }
  }
  return arrays;
}

/**
 * Every hyperparameter of a graph as a scalar: the value that is asked for, else its default.
 *
 * @throws ConfigurationError for an unknown name, a rate that the graph computes itself, or a value that is no rate.
 */
export function checkHyperparameters(signature: GraphSignature, requested: Readonly<Record<string, number>>): Map<string, Tensor> {
  if (!isRecord(requested)) {
    throw new ConfigurationError(`Hyperparameters are an object, such as {lr: 0.01}, not ${shown(requested)}: give numbers by name`);
  }
  const computed = new Set(entriesOf(signature.outputs, "rate").map((entry) => entry.name));
  const entries = new Map(entriesOf(signature.inputs, "hyperparameter").map((entry) => [entry.name, entry]));
  for (const name of Object.keys(requested)) {
    if (computed.has(name)) {
      throw new ConfigurationError(
        `${name}=${requested[name]}: this program computes '${name}' from the step, by the schedule that it was compiled with: ` +
          `leave it out, or compile with a number as ${name}`,
      );
    }
    if (!entries.has(name)) {
      throw new ConfigurationError(
        `There is no hyperparameter '${name}'; a step of this program takes ${[...entries.keys()].join(", ") || "none"}`,
      );
    }
  }
  const values = new Map<string, Tensor>();
  for (const [name, entry] of entries) {
    const value = Object.hasOwn(requested, name) ? (requested[name] as unknown) : entry.default;
    if (value === undefined && !Object.hasOwn(requested, name)) {
      throw new ConfigurationError(`The hyperparameter '${name}' has no default: give it with every step, {${name}: ...}`);
    }
    const mayBeAny = entry.default !== undefined && Number.isNaN(entry.default);
    const largest = entry.dtype === "float32" ? 3.4028234663852886e38 : Number.MAX_VALUE;
    const isRate = typeof value === "number" && value >= 0 && value <= largest;
    if (!isRate && !(mayBeAny && typeof value === "number" && !(Math.abs(value) > largest))) {
      throw new ConfigurationError(
        `The hyperparameter '${name}' is ${shown(value)}: give one finite number` +
          (mayBeAny ? ", or leave it out where nothing is new" : ` that is not negative, such as {${name}: 0.01}`),
      );
    }
    values.set(name, scalar(entry.dtype, value));
  }
  return values;
}

function checkNames(expected: ReadonlyMap<string, Entry>, batch: Batch, ignored: readonly string[], features: readonly string[]): void {
  const unexpected = Object.keys(batch).filter((name) => !expected.has(name) && !ignored.includes(name));
  for (const [name, entry] of expected) {
    if (batch[name] !== undefined) continue;
    const instead = unexpected.length ? `; instead it has ${unexpected.map((other) => `'${other}'`).join(", ")}` : "";
    const remedy = features.includes(name) ? "give what session.features, or a FeatureCache, returns" : "add it to the batch";
    throw new InputError(`The batch lacks the input '${name}' (${described(entry)})${instead}: ${remedy}`);
  }
  if (unexpected.length) {
    throw new InputError(
      `The batch has an unexpected input '${unexpected[0]}': expected ${[...expected.keys()].map((name) => `'${name}'`).join(", ")}; leave it out`,
    );
  }
}

function described(entry: Entry): string {
  return `${entry.dtype} of shape [${extentsText(entry.shape ?? [])}]`;
}

function extentsText(shape: readonly (number | string | null)[]): string {
  return shape.map((extent) => extent ?? "?").join(", ");
}

function asTensor(entry: Entry, value: unknown): Tensor {
  const dtype = dtypeOfArray(value);
  if (dtype !== undefined) {
    const data = value as TypedArray;
    return tensorOfBytes(dtype, inferredShape(entry, data.length), bytesIn(data));
  }
  if (Array.isArray(value) || typeof value !== "object") return ofNumbers(entry, value);
  let reason = "is not an array";
  if (value !== null && "data" in value) {
    const tensor = viewOf(fieldsOf(entry.name, value as GivenTensor));
    if (typeof tensor !== "string") return tensor;
    reason = `has ${tensor}`;
  }
  throw new InputError(`The input '${entry.name}' ${reason}: give {data, shape}, a typed array or numbers, ${described(entry)}`);
}

type GivenTensor = { data: unknown; shape?: unknown; dims?: unknown; dtype?: unknown; type?: unknown; location?: unknown };

/** What this client calls the fields of a tensor of ONNX Runtime; of another object its own. */
function fieldsOf(name: string, given: GivenTensor): { data: unknown; dtype: unknown; shape: unknown } {
  if (given.location !== undefined && given.location !== "cpu") {
    throw new InputError(`The input '${name}' is a tensor whose elements are on a device: give {data: await tensor.getData(), shape}`);
  }
  return { data: given.data, dtype: given.dtype ?? given.type, shape: given.shape ?? given.dims };
}

/** A batch as it can be sent to a worker, where a tensor of ONNX Runtime would be without its elements. */
export function sendable(batch: Batch): Batch {
  if (!isRecord(batch)) return batch;
  const isTensor = (value: unknown) => typeof value === "object" && value !== null && "dims" in value && "data" in value;
  const entries = Object.entries(batch).map(([name, value]) => [name, isTensor(value) ? fieldsOf(name, value as GivenTensor) : value]);
  return Object.fromEntries(entries) as Batch;
}

/** An array that holds itself is nested without end. */
const MOST_AXES = 32;

/** An array of numbers that are nested by axis; the last axis may be typed arrays, all of one kind. */
function ofNumbers(entry: Entry, value: unknown): Tensor {
  const shape: number[] = [];
  let first: unknown = value;
  for (; Array.isArray(first); first = first[0]) {
    if (shape.push(first.length) > MOST_AXES) throw new InputError(`The input '${entry.name}' is nested more than ${MOST_AXES} deep: give ${described(entry)}`);
  }
  const kind = shape.length ? dtypeOfArray(first) : undefined;
  if (kind !== undefined) shape.push((first as TypedArray).length);
  const numbers: (number | bigint | boolean)[] = [];
  const rows: TypedArray[] = [];
  const index: number[] = [];
  const gather = (part: unknown): void => {
    const wanted = shape[index.length];
    const isRow = kind !== undefined && index.length === shape.length - 1;
    if (wanted === undefined) {
      if (!["number", "bigint", "boolean"].includes(typeof part)) {
        throw new InputError(`The input '${entry.name}' holds ${shown(part)}, which is not a number, at [${index.join(", ")}]: give ${described(entry)}`);
      }
      numbers.push(part as number);
      return;
    }
    if (isRow ? dtypeOfArray(part) !== kind : !Array.isArray(part)) {
      const row = isRow ? `row of ${kind}` : "row";
      throw new InputError(`The input '${entry.name}' holds ${shown(part)} at [${index.join(", ")}], which is no ${row} as the first: give ${described(entry)}`);
    }
    const { length } = part as unknown[];
    if (length !== wanted) {
      const earlier = index.map(() => 0).join(", ");
      throw new InputError(
        `The input '${entry.name}' has rows of different lengths: ${wanted} at [${earlier}] and ${length} at [${index.join(", ")}]. Give ${described(entry)}`,
      );
    }
    if (isRow) {
      rows.push(part as TypedArray);
      return;
    }
    for (let place = 0; place < length; place++) {
      index.push(place);
      gather((part as unknown[])[place]);
      index.pop();
    }
  };
  gather(value);
  if (kind !== undefined) {
    const joined = emptyTensor(kind, shape);
    const bytes = bytesIn(joined.data);
    rows.forEach((row, place) => bytes.set(bytesIn(row), place * row.byteLength));
    return joined;
  }
  const rank = entry.shape?.length ?? 0;
  const placed = shape.length === 1 && rank > 1 ? inferredShape(entry, numbers.length) : shape;
  const refuse = (place: number, reason: string) => {
    throw new InputError(`The input '${entry.name}' holds ${String(numbers[place])} at ${position(place, placed)}, expected ${entry.dtype}; ${reason}`);
  };
  if (INTEGERS.has(entry.dtype)) {
    const broken = numbers.findIndex((item) => typeof item === "number" && !Number.isSafeInteger(item));
    if (broken >= 0) refuse(broken, `${entry.role === "label" ? "class indices are integers" : "it takes integers"}: round it`);
    return { dtype: "int64", shape: placed, data: BigInt64Array.from(numbers, (item) => fitting(entry, BigInt(item))) };
  }
  if (entry.dtype === "bool") {
    const broken = numbers.findIndex((item) => Number(item) !== 0 && Number(item) !== 1);
    if (broken >= 0) refuse(broken, "give true or false, 1 or 0");
    return { dtype: "bool", shape: placed, data: Uint8Array.from(numbers, Number) };
  }
  return { dtype: "float64", shape: placed, data: Float64Array.from(numbers, Number) };
}

/** A number that an element of 64 bits holds. */
function fitting(entry: Entry, value: bigint): bigint {
  if (BigInt.asIntN(64, value) !== value) throw new InputError(`The input '${entry.name}' holds ${value}, which ${entry.dtype} cannot hold`);
  return value;
}

/** The shape of elements without one: that of the program, in which one extent may be open. */
function inferredShape(entry: Entry, length: number): number[] {
  const shape = entry.shape ?? [];
  const open = shape.flatMap((extent, axis) => (typeof extent === "number" ? [] : [axis]));
  const known = shape.reduce<number>((product, extent) => product * (typeof extent === "number" ? extent : 1), 1);
  if (open.length > 1 || (open.length === 1 && length % known !== 0) || (open.length === 0 && length !== known)) {
    throw new InputError(
      `The input '${entry.name}' has ${length} elements without a shape, and the program takes ${described(entry)}: give {data, shape}`,
    );
  }
  return shape.map((extent, place) => (place === open[0] ? length / known : (extent as number)));
}

/** Labels may leave out last axes of extent 1. */
function withItsRank(entry: Entry, array: Tensor): Tensor {
  const expected = entry.shape ?? [];
  const rank = array.shape.length;
  if (entry.role !== "label" || rank === 0 || rank >= expected.length || expected.slice(rank).some((extent) => extent !== 1)) return array;
  return { ...array, shape: [...array.shape, ...expected.slice(rank).map(() => 1)] };
}

function checkShape(entry: Entry, array: Tensor, extents: Map<string, { extent: number; name: string }>): void {
  const expected = entry.shape ?? [];
  const wanted = `expected shape [${extentsText(expected)}], got [${array.shape.join(", ")}]`;
  if (array.shape.length !== expected.length) {
    throw new InputError(`The input '${entry.name}' has ${array.shape.length} dimensions, and the program takes ${expected.length}: ${wanted}`);
  }
  array.shape.forEach((extent, axis) => {
    const declared = expected[axis]!;
    if (typeof declared === "number") {
      if (extent !== declared) {
        throw new InputError(`The input '${entry.name}' has extent ${extent} along axis ${axis}, and the program takes ${declared}: ${wanted}`);
      }
      return;
    }
    if (extent === 0) throw new InputError(`The input '${entry.name}' is empty along axis ${axis} (got [${array.shape.join(", ")}]): leave empty batches out`);
    if (declared === null) return;
    const earlier = extents.get(declared);
    if (earlier === undefined) {
      extents.set(declared, { extent, name: entry.name });
    } else if (earlier.extent !== extent) {
      throw new InputError(
        `The inputs '${earlier.name}' and '${entry.name}' disagree about '${declared}': ${earlier.extent} and ${extent} ` +
          `('${entry.name}': ${wanted}). Give both for the same samples`,
      );
    }
  });
}

function convert(entry: Entry, array: Tensor): Tensor {
  if (array.dtype === entry.dtype) return copyOf(array);
  if (FLOATS.has(entry.dtype) && FLOATS.has(array.dtype)) return rounded(entry, array);
  if (INTEGERS.has(entry.dtype) && INTEGERS.has(array.dtype)) return fitted(entry, array);
  let reason = "";
  if (INTEGERS.has(entry.dtype) && FLOATS.has(array.dtype)) {
    reason = entry.role === "label" ? "; class indices are integers" : "; it takes integers";
  } else if (FLOATS.has(entry.dtype)) {
    reason = "; scale integers (pixels: divide by 255) to what the model was made for";
  }
  throw new InputError(`The input '${entry.name}' has dtype ${array.dtype}, expected ${entry.dtype}${reason}: convert it`);
}

function rounded(entry: Entry, array: Tensor): Tensor {
  const result = emptyTensor(entry.dtype, array.shape);
  const target = result.data as Float32Array;
  const bits = { float16: float16Bits, bfloat16: bfloat16Bits }[entry.dtype as string];
  for (let place = 0; place < target.length; place++) {
    const value = numberAt(array, place);
    target[place] = bits ? bits(value) : value;
    if (Number.isFinite(value) && !Number.isFinite(numberAt(result, place))) {
      throw new InputError(`The input '${entry.name}' holds ${value} at ${position(place, array.shape)}, too large for ${entry.dtype}: scale the data`);
    }
  }
  return result;
}

const LIMITS: Record<string, [bigint, bigint]> = Object.fromEntries(
  [8, 16, 32, 64].flatMap((bits) => [
    [`int${bits}`, [-(2n ** BigInt(bits - 1)), 2n ** BigInt(bits - 1) - 1n]],
    [`uint${bits}`, [0n, 2n ** BigInt(bits) - 1n]],
  ]),
);

function fitted(entry: Entry, array: Tensor): Tensor {
  const [low, high] = LIMITS[entry.dtype]!;
  const result = emptyTensor(entry.dtype, array.shape);
  const isLong = entry.dtype === "int64" || entry.dtype === "uint64";
  for (let place = 0; place < array.data.length; place++) {
    const value = BigInt(array.data[place]!);
    if (value < low || value > high) {
      throw new InputError(`The input '${entry.name}' holds ${value} at ${position(place, array.shape)}, which ${entry.dtype} cannot hold`);
    }
    (result.data as any)[place] = isLong ? value : Number(value);
  }
  return result;
}

function checkRange(entry: Entry, array: Tensor): void {
  if (entry.dtype === "bool") {
    const broken = (array.data as Uint8Array).findIndex((value) => value > 1);
    if (broken >= 0) throw new InputError(`The input '${entry.name}' holds ${array.data[broken]} at ${position(broken, array.shape)}: give 1 for true and 0 for false`);
  }
  if (entry.minimum === undefined && entry.maximum === undefined) return;
  for (let place = 0; place < array.data.length; place++) {
    const value = numberAt(array, place);
    const isWithin = !(value < (entry.minimum ?? -Infinity)) && !(value > (entry.maximum ?? Infinity));
    const isInside = entry.two_values ? value === entry.minimum || value === entry.maximum : isWithin;
    if (isInside || value === entry.ignored) continue;
    const also = entry.ignored === undefined ? "" : ` or ${entry.ignored}, which is ignored`;
    let remedy = "Number the classes from 0, and check that the model has an output for each";
    if (entry.role === "data") remedy = "Number them as the model was made to read them (its vocabulary), or take a model with more rows";
    else if (entry.two_values) remedy = `Write ${entry.minimum} for no, which is often 0, and ${entry.maximum} for yes`;
    else if (!INTEGERS.has(entry.dtype)) remedy = "Give the loss what it compares with, or choose a loss for values of any size";
    throw new InputError(
      `The input '${entry.name}' holds ${value} at ${position(place, array.shape)}, out of range: valid are ` +
        `${entry.minimum ?? ""}${entry.two_values ? " and " : ".."}${entry.maximum ?? ""}${also}. ${remedy}`,
    );
  }
}

/** A place among flat elements, as an index. */
function position(place: number, shape: readonly number[]): string {
  const index: number[] = [];
  let rest = place;
  for (const extent of [...shape].reverse()) {
    index.unshift(rest % extent);
    rest = Math.floor(rest / extent);
  }
  return `[${index.join(", ")}]`;
}
