/** Arrays by name in one safetensors file, as burnish writes state and checkpoints. */

import { BLANK, DIGEST, putDigest } from "./digest.js";
import { CheckpointError, messageOf } from "./errors.js";
import { byCodePoints, parseJson } from "./json.js";
import { bytesIn, bytesOf, dtypeOfSafetensors, safetensorsNameOf, sizeOf, tensorOfBytes, type Tensor } from "./tensor.js";

export interface StateFile {
  arrays: Map<string, Tensor>;
  metadata: Record<string, string>;
}

const ALIGNMENT = 8;

/**
 * Read a safetensors file. The arrays lie over its bytes.
 *
 * @param bytes the file.
 * @param what how errors call it, such as `checkpoint 'last.safetensors'`.
 * @throws CheckpointError where it is truncated, damaged or another kind of file. Sizes are checked before memory is taken.
 */
export function readSafetensors(bytes: Uint8Array, what: string): StateFile {
  try {
    const header = headerOf(bytes);
    const { __metadata__: metadata = {}, ...entries } = header.described as Record<string, any>;
    const arrays = new Map<string, Tensor>();
    let expectedEnd = 0;
    for (const [name, { dtype, shape, data_offsets: offsets }] of Object.entries(entries)) {
      const known = dtypeOfSafetensors(dtype);
      if (known === undefined) throw new Error(`'${name}' is of ${dtype}`);
      const [begin, end] = offsets as [number, number];
      if (!(shape as unknown[]).every(isExtent) || !isExtent(begin) || end - begin !== sizeOf(shape) * bytesOf(known)) {
        throw new Error(`the place of '${name}' does not fit its shape`);
      }
      if (header.end + end > bytes.byteLength) throw new Error(`'${name}' ends behind the file`);
      expectedEnd = Math.max(expectedEnd, header.end + end);
      arrays.set(name, tensorOfBytes(known, shape, bytes.subarray(header.end + begin, header.end + end)));
    }
    if (arrays.size && expectedEnd !== bytes.byteLength) throw new Error("it does not end with its arrays");
    return { arrays, metadata };
  } catch (error) {
    throw new CheckpointError(
      `The ${what} is not a whole safetensors file: it is truncated, damaged or another kind of file (${messageOf(error)}). ` +
        "Use an earlier one, or start without it",
      { cause: error },
    );
  }
}

function isExtent(value: unknown): boolean {
  return Number.isSafeInteger(value) && (value as number) >= 0;
}

function headerOf(bytes: Uint8Array): { described: unknown; end: number } {
  if (bytes.byteLength < 8) throw new Error(`it has ${bytes.byteLength} bytes`);
  const size = new DataView(bytes.buffer, bytes.byteOffset, 8).getBigUint64(0, true);
  if (size > BigInt(bytes.byteLength - 8)) throw new Error("its header ends behind the file");
  const end = 8 + Number(size);
  return { described: parseJson(new TextDecoder("utf-8", { fatal: true }).decode(bytes.subarray(8, end))), end };
}

/** Write arrays and a text header with a digest; the arrays of large elements first, so that all are aligned. */
export async function writeSafetensors(arrays: ReadonlyMap<string, Tensor>, metadata: Record<string, string>): Promise<Uint8Array> {
  const names = [...arrays.keys()].sort(
    (one, other) => bytesOf(arrays.get(other)!.dtype) - bytesOf(arrays.get(one)!.dtype) || byCodePoints(one, other),
  );
  const described: Record<string, unknown> = { __metadata__: { [DIGEST]: BLANK, ...metadata } };
  let end = 0;
  for (const name of names) {
    const { dtype, shape, data } = arrays.get(name)!;
    described[name] = { dtype: safetensorsNameOf(dtype), shape, data_offsets: [end, end + data.byteLength] };
    end += data.byteLength;
  }
  const text = new TextEncoder().encode(JSON.stringify(described));
  const padded = Math.ceil(text.byteLength / ALIGNMENT) * ALIGNMENT;
  const bytes = new Uint8Array(8 + padded + end);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(padded), true);
  bytes.fill(0x20, 8, 8 + padded);
  bytes.set(text, 8);
  let offset = 8 + padded;
  for (const name of names) {
    const content = bytesIn(arrays.get(name)!.data);
    bytes.set(content, offset);
    offset += content.byteLength;
  }
  await putDigest(bytes);
  return bytes;
}
