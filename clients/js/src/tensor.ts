/** Arrays with a dtype and a shape, and how their elements lie in memory. */

import { ConfigurationError, UnsupportedOperatorError } from "./errors.js";
import { shown } from "./options.js";

export type TypedArray =
  | Float32Array | Float64Array
  | Int8Array | Int16Array | Int32Array | BigInt64Array
  | Uint8Array | Uint16Array | Uint32Array | BigUint64Array;

/** Element types under numpy's names. Elements of float16 and bfloat16 are their bits in a Uint16Array, those of bool bytes. */
export type DType =
  | "float32" | "float64" | "float16" | "bfloat16" | "int8" | "int16" | "int32" | "int64"
  | "uint8" | "uint16" | "uint32" | "uint64" | "bool" | "string";

/** An array: elements in C order. */
export interface Tensor {
  dtype: DType;
  shape: readonly number[];
  data: TypedArray;
}

interface Layout {
  onnx: string;
  /** The number of the type in an ONNX file. */
  code: number;
  safetensors: string;
  bytes: number;
  make: (buffer: ArrayBufferLike, offset: number, length: number) => TypedArray;
}

const LAYOUTS: Record<Exclude<DType, "string">, Layout> = {
  float32: { onnx: "FLOAT", code: 1, safetensors: "F32", bytes: 4, make: (b, o, n) => new Float32Array(b, o, n) },
  uint8: { onnx: "UINT8", code: 2, safetensors: "U8", bytes: 1, make: (b, o, n) => new Uint8Array(b, o, n) },
  int8: { onnx: "INT8", code: 3, safetensors: "I8", bytes: 1, make: (b, o, n) => new Int8Array(b, o, n) },
  uint16: { onnx: "UINT16", code: 4, safetensors: "U16", bytes: 2, make: (b, o, n) => new Uint16Array(b, o, n) },
  int16: { onnx: "INT16", code: 5, safetensors: "I16", bytes: 2, make: (b, o, n) => new Int16Array(b, o, n) },
  int32: { onnx: "INT32", code: 6, safetensors: "I32", bytes: 4, make: (b, o, n) => new Int32Array(b, o, n) },
  int64: { onnx: "INT64", code: 7, safetensors: "I64", bytes: 8, make: (b, o, n) => new BigInt64Array(b, o, n) },
  bool: { onnx: "BOOL", code: 9, safetensors: "BOOL", bytes: 1, make: (b, o, n) => new Uint8Array(b, o, n) },
  float16: { onnx: "FLOAT16", code: 10, safetensors: "F16", bytes: 2, make: (b, o, n) => new Uint16Array(b, o, n) },
  float64: { onnx: "DOUBLE", code: 11, safetensors: "F64", bytes: 8, make: (b, o, n) => new Float64Array(b, o, n) },
  uint32: { onnx: "UINT32", code: 12, safetensors: "U32", bytes: 4, make: (b, o, n) => new Uint32Array(b, o, n) },
  uint64: { onnx: "UINT64", code: 13, safetensors: "U64", bytes: 8, make: (b, o, n) => new BigUint64Array(b, o, n) },
  bfloat16: { onnx: "BFLOAT16", code: 16, safetensors: "BF16", bytes: 2, make: (b, o, n) => new Uint16Array(b, o, n) },
};

export const FLOATS: ReadonlySet<DType> = new Set<DType>(["float16", "float32", "float64", "bfloat16"]);
export const INTEGERS: ReadonlySet<DType> = new Set<DType>([
  "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
]);

const BY_ONNX = new Map(Object.entries(LAYOUTS).map(([name, layout]) => [layout.onnx, name as DType]));
const BY_CODE = new Map(Object.entries(LAYOUTS).map(([name, layout]) => [layout.code, name as DType]));
const BY_SAFETENSORS = new Map(Object.entries(LAYOUTS).map(([name, layout]) => [layout.safetensors, name as DType]));

/** The dtype of an ONNX element type by its name, such as `FLOAT`; undefined for one that this client has no arrays of. */
export function dtypeOfOnnx(name: string): DType | undefined {
  return name === "STRING" ? "string" : BY_ONNX.get(name);
}

export function dtypeOfCode(code: number): DType | undefined {
  return BY_CODE.get(code);
}

export function codeOf(dtype: DType): number {
  return layoutOf(dtype).code;
}

export function dtypeOfSafetensors(name: string): DType | undefined {
  return BY_SAFETENSORS.get(name);
}

export function safetensorsNameOf(dtype: DType): string {
  return layoutOf(dtype).safetensors;
}

export function bytesOf(dtype: DType): number {
  return layoutOf(dtype).bytes;
}

function layoutOf(dtype: DType): Layout {
  if (dtype === "string") {
    throw new UnsupportedOperatorError("This client has no arrays of text: preprocess the text before the model");
  }
  return LAYOUTS[dtype];
}

export function sizeOf(shape: readonly number[]): number {
  return shape.reduce((product, extent) => product * extent, 1);
}

/** An array over these bytes; they are copied only where they do not lie as their elements must. */
export function tensorOfBytes(dtype: DType, shape: readonly number[], bytes: Uint8Array): Tensor {
  const { bytes: width, make } = layoutOf(dtype);
  const size = sizeOf(shape);
  if (bytes.byteLength !== size * width) {
    throw new ConfigurationError(`${bytes.byteLength} bytes are no array of ${dtype} of shape [${shape.join(", ")}]: it has ${size * width}`);
  }
  const placed = bytes.byteOffset % width === 0 ? bytes : new Uint8Array(bytes);
  return { dtype, shape: [...shape], data: make(placed.buffer, placed.byteOffset, size) };
}

/** The bytes of an array, not copied. */
export function bytesIn(data: TypedArray): Uint8Array {
  return data.byteLength ? new Uint8Array(data.buffer, data.byteOffset, data.byteLength) : new Uint8Array(); // a buffer that was sent away has none
}

export function copyOf(tensor: Tensor): Tensor {
  return { dtype: tensor.dtype, shape: [...tensor.shape], data: tensor.data.slice() as TypedArray };
}

const DTYPE_OF_ARRAY: Readonly<Record<string, DType>> = {
  Float32Array: "float32", Float64Array: "float64", Float16Array: "float16", BigInt64Array: "int64", BigUint64Array: "uint64",
  Int32Array: "int32", Uint32Array: "uint32", Int16Array: "int16", Uint16Array: "uint16", Int8Array: "int8", Uint8Array: "uint8",
  Uint8ClampedArray: "uint8",
};
/** What holds the bits of elements that have no typed array everywhere. */
const HELD_IN: Partial<Record<DType, DType>> = { float16: "uint16", bfloat16: "uint16", bool: "uint8" };

/** The dtype of the elements of a typed array, also of one from a frame or a context of its own, which is no instance of ours. */
export function dtypeOfArray(data: unknown): DType | undefined {
  return ArrayBuffer.isView(data) ? DTYPE_OF_ARRAY[Object.prototype.toString.call(data).slice(8, -1)] : undefined;
}

/** The array that a value from outside is, over the same bytes; or, as a phrase, why it is none. */
export function viewOf({ dtype, shape, data }: { dtype?: unknown; shape?: unknown; data?: unknown }): Tensor | string {
  const held = dtypeOfArray(data);
  if (held === undefined) return "no typed array as its data";
  const own = (dtype ?? held) as DType;
  if (!(own in LAYOUTS)) return `elements of the unknown dtype ${typeof own === "string" ? own : shown(own)}`;
  if (held !== own && held !== HELD_IN[own]) return `elements of ${held} that are called ${own}`;
  if (!Array.isArray(shape) || !shape.every((extent) => Number.isSafeInteger(extent) && extent >= 0)) {
    return `the shape ${Array.isArray(shape) ? `[${shape.map(shown).join(", ")}]` : shown(shape)}`;
  }
  const { length } = data as TypedArray;
  if (sizeOf(shape) !== length) return `${length} elements, and shape [${shape.join(", ")}] has ${sizeOf(shape)}`;
  return tensorOfBytes(own, shape, bytesIn(data as TypedArray));
}

export function emptyTensor(dtype: DType, shape: readonly number[]): Tensor {
  const { bytes, make } = layoutOf(dtype);
  const size = sizeOf(shape);
  return { dtype, shape: [...shape], data: make(new ArrayBuffer(size * bytes), 0, size) };
}

/** A scalar of a dtype that numbers go into. */
export function scalar(dtype: DType, value: number | bigint): Tensor {
  const tensor = emptyTensor(dtype, []);
  if (dtype === "int64" || dtype === "uint64") {
    (tensor.data as BigInt64Array)[0] = BigInt(value);
  } else {
    (tensor.data as Float32Array)[0] = Number(value);
  }
  return tensor;
}

const scratch = new DataView(new ArrayBuffer(4));

/** The nearest float16 of a number, as its bits; ties to even. */
export function float16Bits(value: number): number {
  if (Number.isNaN(value)) return 0x7e00;
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
  const size = Math.abs(value);
  if (size >= 65520) return sign | 0x7c00;
  if (size < 2 ** -14) return sign | roundEven(size * 2 ** 24);
  let exponent = Math.floor(Math.log2(size));
  if (2 ** exponent > size) exponent -= 1;
  else if (2 ** (exponent + 1) <= size) exponent += 1;
  return sign | (((exponent + 15) << 10) + roundEven((size / 2 ** exponent - 1) * 1024));
}

/** The nearest bfloat16 of a number, as its bits; ties to even. */
export function bfloat16Bits(value: number): number {
  if (Number.isNaN(value)) return 0x7fc0;
  scratch.setFloat32(0, value);
  const bits = scratch.getUint32(0);
  return ((bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16) & 0xffff;
}

export function numberOfFloat16(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >>> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return exponent ? sign * 2 ** (exponent - 15) * (1 + fraction / 1024) : sign * fraction * 2 ** -24;
}

export function numberOfBfloat16(bits: number): number {
  scratch.setUint32(0, bits << 16);
  return scratch.getFloat32(0);
}

function roundEven(value: number): number {
  const down = Math.floor(value);
  const rest = value - down;
  return rest > 0.5 || (rest === 0.5 && down % 2 === 1) ? down + 1 : down;
}

/** The element of an array at a place, as a number. */
export function numberAt(tensor: Tensor, place: number): number {
  const value = tensor.data[place]!;
  if (tensor.dtype === "float16") return numberOfFloat16(Number(value));
  if (tensor.dtype === "bfloat16") return numberOfBfloat16(Number(value));
  return Number(value);
}

/** Round a number to the dtype of an array, and write it to a place. */
export function setNumber(tensor: Tensor, place: number, value: number): void {
  const bits = { float16: float16Bits, bfloat16: bfloat16Bits }[tensor.dtype as string];
  (tensor.data as Float32Array)[place] = bits ? bits(value) : value;
}

/** Whether no element of a floating-point array is NaN or infinite. */
export function isFinite(tensor: Tensor): boolean {
  if (!FLOATS.has(tensor.dtype)) return true;
  const { data } = tensor;
  if (data instanceof Float32Array || data instanceof Float64Array) {
    for (let i = 0; i < data.length; i++) if (!Number.isFinite(data[i]!)) return false;
    return true;
  }
  const exponent = tensor.dtype === "float16" ? 0x7c00 : 0x7f80;
  for (let i = 0; i < data.length; i++) if ((Number(data[i]!) & exponent) === exponent) return false;
  return true;
}
