/** Checkpoints in the format that Python reads and writes: the whole state in one safetensors file. */

import { CheckpointError, ConfigurationError, messageOf } from "./errors.js";
import { spacedJson } from "./json.js";
import type { Identity, Program } from "./program.js";
import { checksumOf, readSafetensors, writeSafetensors } from "./safetensors.js";
import { checkState, stateDifferences } from "./state.js";
import { isFinite, type Tensor } from "./tensor.js";

const FORMAT = "burnish checkpoint";
const WHOLE = 1;
const NEWEST = 2;

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
}

/** The bytes of a checkpoint. */
export function writeCheckpoint(program: Program, checkpoint: Omit<Checkpoint, "identity">): Uint8Array {
  const { identity } = program;
  if (!identity) {
    throw new CheckpointError(
      `'${program.name}' does not say what checkpoints of it belong to: an older burnish wrote it. Save the program again with this one`,
    );
  }
  for (const { updates } of program.signature.step.outputs) {
    if (updates !== undefined && !isFinite(checkpoint.state.get(updates)!)) {
      throw new CheckpointError(
        `No checkpoint was written: '${updates}' holds NaN or infinite values. Restore an earlier one and lower the learning ` +
          "rate (lr), or clip the gradients",
      );
    }
  }
  let extra: string;
  try {
    extra = spacedJson(checkpoint.extra);
  } catch (error) {
    throw new ConfigurationError(`extra of the checkpoint is not JSON: ${messageOf(error)}. Give numbers, strings, lists and objects`);
  }
  return writeSafetensors(checkpoint.state, {
    format: FORMAT,
    version: String(WHOLE),
    step: String(checkpoint.step),
    program: identity.program,
    graphs: spacedJson(identity.graphs),
    engine: checkpoint.engine,
    extra,
    ...(Object.keys(checkpoint.metadata).length ? { metadata: spacedJson(checkpoint.metadata) } : {}),
    checksum: checksumOf(checkpoint.state),
  });
}

/**
 * Read a checkpoint without comparing it with a program.
 *
 * @throws CheckpointError where it is truncated, damaged, not a checkpoint, or of a format that this client does not read.
 */
export function readCheckpoint(bytes: Uint8Array, name = "checkpoint"): Checkpoint {
  const { arrays, metadata: header } = readSafetensors(bytes, `checkpoint '${name}'`);
  if (header.format !== FORMAT) {
    throw new CheckpointError(`'${name}' is a safetensors file, but not a burnish checkpoint: give a file that a checkpoint was saved to`);
  }
  const version = Number(header.version);
  if (version > NEWEST) {
    throw new CheckpointError(`'${name}' is of checkpoint format ${version}, and this client reads up to ${NEWEST}: update burnish-runtime`);
  }
  if (version > WHOLE) {
    throw new CheckpointError(
      `'${name}' goes on from a base in the folder 'journal' beside it, which this client does not read: restore it in Python, and ` +
        "save it without journal",
    );
  }
  if (header.checksum !== undefined && header.checksum !== checksumOf(arrays)) {
    throw new CheckpointError(`'${name}' is damaged: its arrays are not those that were written. Use an earlier checkpoint`);
  }
  try {
    return {
      state: arrays,
      step: Number(header.step),
      identity: { program: text(header.program), graphs: JSON.parse(text(header.graphs)) },
      engine: text(header.engine),
      extra: JSON.parse(text(header.extra)),
      metadata: JSON.parse(header.metadata ?? "{}"),
    };
  } catch (error) {
    throw new CheckpointError(`The header of the checkpoint '${name}' is damaged (${messageOf(error)}): use an earlier checkpoint`);
  }
}

function text(value: string | undefined): string {
  if (typeof value !== "string") throw new Error("an entry is missing");
  return value;
}

/** Throw CheckpointError unless the checkpoint was made with this program and holds exactly its state. */
export function checkCheckpoint(checkpoint: Checkpoint, program: Program, name: string): void {
  const remedy = "Compile the model with the options that it was made with, or start without it";
  const differences = stateDifferences(program.state.values(), checkpoint.state);
  const { identity } = program;
  if (identity && checkpoint.identity.program !== identity.program) {
    const changed = Object.keys(identity.graphs).filter((graph) => checkpoint.identity.graphs[graph] !== identity.graphs[graph]);
    const what = changed.length ? `these graphs differ: ${changed.join(", ")}` : "the signatures differ";
    throw new CheckpointError(
      `The checkpoint '${name}' was made with another program: ` +
        (differences.length ? `${differences.join("; ")}. ` : `its state has the same names and shapes, but ${what}. `) + remedy,
    );
  }
  checkState(program.state.values(), checkpoint.state, CheckpointError, `The checkpoint '${name}'`, "It is damaged: use an earlier checkpoint");
}
