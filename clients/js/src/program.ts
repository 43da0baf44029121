/** A program: six graphs, and one of features where they are cached, their signature, and the weights of the source model. */

import { checkDigest, checkVersion, DIGEST } from "./digest.js";
import { CheckpointError, messageOf } from "./errors.js";
import { sha256 } from "./hashes.js";
import { parseJson } from "./json.js";
import { readSafetensors } from "./safetensors.js";
import { FEATURES, GRAPH_NAMES, readSignature, stateEntries, type Entry, type GraphName, type Signature } from "./signature.js";
import { fetchBytes, isZip, sourceOfFiles, sourceOfUrl, sourceOfZip, type Source } from "./source.js";
import { checkState } from "./state.js";
import type { Tensor } from "./tensor.js";
import { readTrainingModel } from "./training-info.js";

const FORMAT = "burnish program";
const MANIFEST = "program.json";
const STATE_FILE = "state.safetensors";

/** What tells one program from another, as checkpoints name it. */
export interface Identity {
  program: string;
  graphs: Record<string, string>;
}

/** A graph, as a runtime opens it: its bytes; and the file of its large constants, or the path of the graph, where it has one. */
export interface GraphFile {
  bytes: Uint8Array;
  externalData?: { path: string; data: Uint8Array };
  path?: string;
}

interface Parts {
  name: string;
  signature: Signature;
  options: Record<string, any>;
  identity: Identity;
  /** The state entries that adapters stand next to, which checkpoints leave out. */
  base: readonly string[];
  weights: Map<string, Tensor>;
  savedState?: Map<string, Tensor>;
  open: (graph: GraphName) => Promise<GraphFile>;
}

/** A program that burnish compiled. Graphs are read when they are first run, and checked against the program's own hashes. */
export class Program {
  /** How errors call it. */
  readonly name: string;
  readonly signature: Signature;
  /** What it was compiled with. */
  readonly options: Readonly<Record<string, any>>;
  /** What checkpoints of it name. */
  readonly identity: Identity;
  /** The state entries that no step changes while adapters train; checkpoints leave them out. Empty without adapters. */
  readonly base: readonly string[];
  /** The weights and running statistics of the source model, by state name. */
  readonly weights: ReadonlyMap<string, Tensor>;
  /** The state that a program in one ONNX file holds. */
  readonly savedState: ReadonlyMap<string, Tensor> | undefined;
  /** Every state entry, by name. */
  readonly state: ReadonlyMap<string, Entry>;
  private readonly open: Parts["open"];

  private constructor(parts: Parts) {
    this.name = parts.name;
    this.signature = parts.signature;
    this.options = parts.options;
    this.identity = parts.identity;
    this.base = parts.base;
    this.weights = parts.weights;
    this.savedState = parts.savedState;
    this.open = parts.open;
    this.state = stateEntries(parts.signature);
  }

  /**
   * Read a program from an address: of its folder, of a `.zip` of that folder, or of one `.onnx` file.
   *
   * @throws CheckpointError where it is not a whole program, or a file has changed since it was written.
   */
  static async fromUrl(url: string): Promise<Program> {
    if (!/\.(zip|onnx)([?#].*)?$/.test(url)) return Program.fromSource(sourceOfUrl(url));
    const bytes = await fetchBytes(url);
    if (bytes === undefined) throw new CheckpointError(`There is no program at '${url}': check the address`);
    return Program.fromBytes(bytes, url);
  }

  /** Read a program from the bytes of a `.zip` or an `.onnx` file. */
  static async fromBytes(bytes: Uint8Array | ArrayBuffer, name = "program"): Promise<Program> {
    const content = bytes instanceof Uint8Array ? bytes : new Uint8Array(bytes);
    if (isZip(content)) return Program.fromSource(sourceOfZip(content, name));
    return new Program(await readTrainingModel(content, name));
  }

  /** Read a program from its files by name, such as those of a folder that was dropped on a page. */
  static async fromFiles(files: ReadonlyMap<string, Uint8Array>, name = "program"): Promise<Program> {
    return Program.fromSource(sourceOfFiles(files, name));
  }

  static async fromSource(source: Source): Promise<Program> {
    return new Program(await readFolder(source));
  }

  /** A graph as a runtime opens it. */
  graph(name: GraphName): Promise<GraphFile> {
    return this.open(name);
  }
}

function damaged(source: Source, what: string, cause?: unknown): CheckpointError {
  return new CheckpointError(
    `'${source.name}' is not a whole saved program: ${what}. Save the program again, or use another copy`, { cause },
  );
}

async function readFolder(source: Source): Promise<Parts> {
  const content = await source.read(MANIFEST);
  if (content === undefined) {
    throw new CheckpointError(`'${source.name}' is not a saved program: it has no ${MANIFEST}. Give the folder that was saved to`);
  }
  const { manifest, signature } = await readManifest(source, content);
  const files = manifest.files as Record<string, { bytes: number; sha256: string }>;
  const graphs = signature[FEATURES] ? [...GRAPH_NAMES, FEATURES] : GRAPH_NAMES;
  const needed = [...graphs.map((graph) => `${graph}.onnx`), STATE_FILE];
  const unlisted = needed.find((file) => !(file in files));
  if (unlisted) throw damaged(source, `${MANIFEST} does not list ${unlisted}`);
  const outside = Object.keys(files).find((file) => /[/\\]/.test(file) || ["", ".", ".."].includes(file));
  if (outside !== undefined) {
    throw new CheckpointError(
      `${MANIFEST} of '${source.name}' names '${outside}', which lies outside the folder, and was not opened. ` +
        "Do not use this folder, or save the program again",
    );
  }

  const readChecked = async (file: string): Promise<Uint8Array> => {
    const bytes = await source.read(file);
    if (bytes === undefined) throw damaged(source, `${file} is missing`);
    const recorded = files[file]!;
    if (bytes.byteLength !== recorded.bytes) {
      throw damaged(source, `${file} has ${bytes.byteLength} bytes, and ${recorded.bytes} were written`);
    }
    if ((await sha256(bytes)) !== recorded.sha256) throw damaged(source, `${file} has changed since it was written`);
    return bytes;
  };
  const { arrays: weights } = readSafetensors(await readChecked(STATE_FILE), `state file '${STATE_FILE}' of '${source.name}'`);
  const entries = [...stateEntries(signature).values()].filter(({ role }) => role === "parameter" || role === "statistic");
  checkState(entries, weights, CheckpointError, `'${STATE_FILE}' of '${source.name}'`, "Save the program again from the original model");
  const open = async (graph: GraphName): Promise<GraphFile> => {
    const file: GraphFile = { bytes: await readChecked(`${graph}.onnx`) };
    const data = `${graph}.data`;
    if (!(data in files)) return file;
    if (source.path) return { ...file, path: (await readChecked(data), source.path(`${graph}.onnx`)) };
    return { ...file, externalData: { path: data, data: await readChecked(data) } };
  };
  const { options, identity, base } = manifest;
  return { name: source.name, signature, options, identity, base, weights, open };
}

async function readManifest(source: Source, content: Uint8Array): Promise<{ manifest: any; signature: Signature }> {
  let manifest: any;
  try {
    manifest = parseJson(new TextDecoder("utf-8", { fatal: true }).decode(content));
  } catch (error) {
    throw damaged(source, `${MANIFEST} cannot be read as one: ${messageOf(error)}`, error);
  }
  if (manifest?.format !== FORMAT) throw damaged(source, `${MANIFEST} cannot be read as one: its format is not '${FORMAT}'`);
  checkVersion(manifest.version, `The program in '${source.name}'`, `make it again from the model, with burnish compile MODEL -o ${source.name}`);
  await checkDigest(content, manifest[DIGEST], () => damaged(source, `${MANIFEST} has changed since it was written`));
  for (const key of ["signature", "options", "files", "identity", "base"]) {
    if (typeof manifest[key] !== "object" || manifest[key] === null) throw damaged(source, `${MANIFEST} has no '${key}'`);
  }
  try {
    return { manifest, signature: readSignature(manifest.signature) };
  } catch (error) {
    throw damaged(source, `the signature in ${MANIFEST} cannot be read: ${messageOf(error)}`, error);
  }
}
