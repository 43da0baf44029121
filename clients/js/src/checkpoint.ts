/** Checkpoints in the format that Python reads and writes: the whole state in one safetensors file. */

import { checkDigest, checkDigestNow, checkVersion, DIGEST } from "./digest.js";
import { CheckpointError, ConfigurationError, messageOf } from "./errors.js";
import { sha256Now } from "./hashes.js";
import { parseJson, spacedJson } from "./json.js";
import { isRecord, shown } from "./options.js";
import type { Identity, Program } from "./program.js";
import { readSafetensors, writeSafetensors } from "./safetensors.js";
import { checkState, stateDifferences } from "./state.js";
import { bytesIn, isFinite, safetensorsNameOf, type Tensor } from "./tensor.js";

const FORMAT = "burnish checkpoint";

/** What a checkpoint holds. */
export interface Checkpoint {
  state: Map<string, Tensor>;
  /** How many steps had been taken. */
  step: number;
  identity: Identity;
  /** What it was made on. */
  engine: string;
  /** What the caller added: JSON-compatible values. */
  extra: Record<string, unknown>;
  /** Entries for the `metadata_props` of an exported model. */
  metadata: Record<string, string>;
  /** The hash of what adapters stand next to, which is not in the file; undefined for a whole state. */
  base?: string;
}

/**
 * The text of what a caller adds to a checkpoint.
 *
 * @throws ConfigurationError for what JSON cannot hold.
 */
export function extraText(extra: unknown): string {
  if (!isRecord(extra)) throw new ConfigurationError(`extra of the checkpoint is ${shown(extra)}: give an object of JSON-compatible values`);
  try {
    return spacedJson(extra, "extra");
  } catch (error) {
    throw new ConfigurationError(`extra of the checkpoint is not JSON: ${messageOf(error)}. Give numbers, strings, lists and objects`);
  }
}

/** A copy of entries for the `metadata_props` of a model, which are texts. */
export function checkedMetadata(metadata: Readonly<Record<string, string>>): Record<string, string> {
  for (const [key, value] of Object.entries(metadata)) {
    if (typeof value !== "string") throw new ConfigurationError(`metadata '${key}' is ${shown(value)}: give texts`);
    try {
      spacedJson([key, value], key);
    } catch (error) {
      throw new ConfigurationError(`metadata ${JSON.stringify(key)} is not a text that can be read again: ${messageOf(error)}`);
    }
  }
  return { ...metadata };
}

/**
 * The bytes of a checkpoint.
 *
 * @param checkpoint what it holds, `extra` as text.
 * @param base the hash of the program's `base` in this state; undefined for a program without adapters.
 */
export async function writeCheckpoint(
  program: Program, checkpoint: Pick<Checkpoint, "state" | "step" | "engine" | "metadata"> & { extra: string }, base: string | undefined,
): Promise<Uint8Array> {
  const { identity } = program;
  for (const { updates } of program.signature.step.outputs) {
    if (updates !== undefined && !isFinite(checkpoint.state.get(updates)!)) {
      throw new CheckpointError(
        `No checkpoint was written: '${updates}' holds NaN or infinite values. Restore an earlier one and lower the learning ` +
          "rate (lr), or clip the gradients",
      );
    }
  }
  const leftOut = new Set(base === undefined ? [] : program.base);
  return writeSafetensors(new Map([...checkpoint.state].filter(([name]) => !leftOut.has(name))), {
    format: FORMAT,
    version: "3",
    step: String(checkpoint.step),
    program: identity.program,
    graphs: spacedJson(identity.graphs, "graphs"),
    engine: checkpoint.engine,
    extra: checkpoint.extra,
    ...(Object.keys(checkpoint.metadata).length ? { metadata: spacedJson(checkpoint.metadata, "metadata") } : {}),
    ...(base === undefined ? {} : { base }),
  });
}

/** The hash of what the adapters of a program stand next to: names, dtypes, shapes and bits. Undefined where it has none. */
export function baseHash(program: Program, state: ReadonlyMap<string, Tensor>): string | undefined {
  if (!program.base.length) return undefined;
  const encoder = new TextEncoder();
  const sizes = (...values: number[]) => new Uint8Array(BigUint64Array.from(values, BigInt).buffer);
  const names = [...program.base].map((name) => ({ name, bytes: encoder.encode(name) })).sort((one, other) => byBytes(one.bytes, other.bytes));
  const parts = names.flatMap(({ name, bytes }) => {
    const { dtype, shape, data } = state.get(name)!;
    const kind = encoder.encode(safetensorsNameOf(dtype));
    return [sizes(bytes.length), bytes, sizes(kind.length), kind, sizes(shape.length, ...shape), bytesIn(data)];
  });
  return sha256Now(...parts);
}

function byBytes(one: Uint8Array, other: Uint8Array): number {
  const place = one.findIndex((byte, i) => byte !== other[i]);
  return place < 0 ? one.length - other.length : one[place]! - (other[place] ?? -1);
}

/**
 * Read a checkpoint without comparing it with a program.
 *
 * @throws CheckpointError where it is truncated, damaged, not a checkpoint, or of a format that this client does not read.
 */
export function readCheckpoint(bytes: Uint8Array, name = "checkpoint"): Checkpoint {
  const { checkpoint, digest } = parsed(bytes, name);
  checkDigestNow(bytes, digest, () => changed(name));
  return checkpoint();
}

/** The same, hashed while other work goes on. */
export async function openCheckpoint(bytes: Uint8Array, name: string): Promise<Checkpoint> {
  const { checkpoint, digest } = parsed(bytes, name);
  await checkDigest(bytes, digest, () => changed(name));
  return checkpoint();
}

function changed(name: string): CheckpointError {
  return new CheckpointError(`The checkpoint '${name}' is damaged: it has changed since it was written. Use an earlier checkpoint`);
}

function parsed(bytes: Uint8Array, name: string): { checkpoint: () => Checkpoint; digest: unknown } {
  const { arrays, metadata: header } = readSafetensors(bytes, `checkpoint '${name}'`);
  if (header.format !== FORMAT) {
    throw new CheckpointError(`'${name}' is a safetensors file, but not a burnish checkpoint: give a file that a checkpoint was saved to`);
  }
  checkVersion(header.version, `The checkpoint '${name}'`, "go on with the burnish that wrote it, or train again without it");
  const checkpoint = (): Checkpoint => {
    if (header.journal !== undefined) {
      throw new CheckpointError(
        `'${name}' goes on from a base in the folder 'journal' next to it, which this client does not read: restore it in Python, and ` +
          "save it without journal",
      );
    }
    try {
      return {
        state: arrays,
        step: Number(header.step),
        identity: { program: text(header.program), graphs: parseJson(text(header.graphs)) },
        engine: text(header.engine),
        extra: parseJson(text(header.extra)),
        metadata: parseJson(header.metadata ?? "{}"),
        ...(header.base === undefined ? {} : { base: header.base }),
      };
    } catch (error) {
      throw new CheckpointError(`The header of the checkpoint '${name}' is damaged (${messageOf(error)}): use an earlier checkpoint`);
    }
  };
  return { checkpoint, digest: header[DIGEST] };
}

function text(value: string | undefined): string {
  if (typeof value !== "string") throw new Error("an entry is missing");
  return value;
}

/** Throw CheckpointError unless the checkpoint was made with this program and holds exactly its state, or its adapters. */
export function checkCheckpoint(checkpoint: Checkpoint, program: Program, name: string, ownBase: string | undefined): void {
  const remedy = "Compile the model with the options that it was made with, or start without it";
  const { base } = checkpoint;
  if (base !== undefined && ownBase === undefined) {
    throw new CheckpointError(
      `The checkpoint '${name}' holds adapters alone, and the program has none: compile the model that it was made with, with its ` +
        "adapters (burnish.surgery.lora)",
    );
  }
  const leftOut = new Set(base === undefined ? [] : program.base);
  const entries = [...program.state.values()].filter((entry) => !leftOut.has(entry.name));
  const differences = stateDifferences(entries, checkpoint.state);
  const { identity } = program;
  if (checkpoint.identity.program !== identity.program) {
    const differing = Object.keys(identity.graphs).filter((graph) => checkpoint.identity.graphs[graph] !== identity.graphs[graph]);
    const what = differing.length ? `these graphs differ: ${differing.join(", ")}` : "the signatures differ";
    throw new CheckpointError(
      `The checkpoint '${name}' was made with another program: ` +
        (differences.length ? `${differences.join("; ")}. ` : `its state has the same names and shapes, but ${what}. `) + remedy,
    );
  }
  if (base !== ownBase && base !== undefined) {
    throw new CheckpointError(
      `The checkpoint '${name}' holds adapters of another model: the weights next to them had the SHA-256 ${base.slice(0, 16)}..., and ` +
        `those of this session have ${ownBase!.slice(0, 16)}.... Compile the file that they were trained on`,
    );
  }
  checkState(entries, checkpoint.state, CheckpointError, `The checkpoint '${name}'`, "It is damaged: use an earlier checkpoint");
}
