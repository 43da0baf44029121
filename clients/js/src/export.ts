/** From a program and its state to an inference model that any runtime loads, under the source's names. */

import { DIGEST } from "./digest.js";
import { CheckpointError } from "./errors.js";
import {
  GRAPH, MODEL, NODE, VALUE, externalTensorMessage, graphsWithin, propertiesOf, renameValues, setProperties, tensorMessage, valuesOf,
} from "./onnx.js";
import type { Program } from "./program.js";
import { Message } from "./protobuf.js";
import { ADAPTERS, settle, type Evaluate } from "./settling.js";
import { isState } from "./signature.js";
import { bfloat16Bits, bytesIn, emptyTensor, float16Bits, numberAt, type DType, type Tensor } from "./tensor.js";

/** Bytes of weights above which they lie beside the model: a protobuf ends at 2 GiB. */
const ONE_FILE_LIMIT = 2 ** 30;
/** Bytes from which a tensor goes into the file beside, where there is one. */
const SMALLEST_EXTERNAL = 1024;
const OBJECTIVE = "burnish.objective";
const LARGEST_OBJECTIVE = 2 ** 16;

/** An exported model: the `.onnx` file, and the file of its weights where they lie beside it. */
export interface ExportedModel {
  model: Uint8Array;
  data?: { name: string; bytes: Uint8Array };
}

export type DataName = string | ((bytes: Uint8Array) => string);

/**
 * The model that predicts what the program does in this state.
 *
 * @param evaluate runs a model without inputs.
 * @param dataName where weights lie beside the model, the name of their file, or what makes it of them.
 * @param oneFileLimit bytes of weights above which they lie beside.
 */
export async function exportModel(
  program: Program,
  state: ReadonlyMap<string, Tensor>,
  metadata: Record<string, string>,
  evaluate: Evaluate,
  dataName: DataName = "model.onnx.data",
  oneFileLimit = ONE_FILE_LIMIT,
): Promise<ExportedModel> {
  const file = await program.graph("predict");
  const model = Message.read(file.bytes);
  const graph = model.message(MODEL.graph)!;
  const entries = program.signature.predict.inputs.filter(isState);
  const names = new Map(entries.map(({ name }) => [name, name.slice(name.indexOf("/") + 1)]));
  makeRoom(graph, names);
  graph.remove(GRAPH.inputs, (input) => names.has(input.text(VALUE.name)));
  renameValues(graph, (name) => names.get(name) ?? name);

  const rounded = (program.options.rounded_weights ?? {}) as Record<string, DType>;
  const initializers = new Map(entries.map(({ name }): [string, Tensor] => {
    const called = names.get(name)!;
    const dtype = rounded[called];
    return [called, dtype ? roundedTensor(called, state.get(name)!, dtype) : state.get(name)!];
  }));
  for (const name of Object.keys(rounded)) if (initializers.has(name)) removeCast(graph, name);
  await settle(model, initializers, evaluate);
  const tensors = [...initializers];

  const properties = propertiesOf(model);
  properties.delete("burnish.training");
  properties.delete(DIGEST);
  properties.delete(OBJECTIVE);
  properties.delete(ADAPTERS);
  const objective = objectiveOf(program.options);
  if (objective.length <= LARGEST_OBJECTIVE && program.options.loss !== undefined) properties.set(OBJECTIVE, objective);
  for (const [key, value] of Object.entries(metadata)) properties.set(key, value);
  setProperties(model, properties);

  const total = tensors.reduce((sum, [, tensor]) => sum + tensor.data.byteLength, 0);
  const data = total > oneFileLimit ? weightsBeside(graph, tensors, dataName) : undefined;
  if (!data) for (const [name, tensor] of tensors) graph.addMessage(GRAPH.initializers, tensorMessage(name, tensor));
  return data ? { model: model.write(), data } : { model: model.write() };
}

/** Rename other values that took the names of initializers while these were called `param/<name>`. */
function makeRoom(graph: Message, names: ReadonlyMap<string, string>): void {
  const wanted = new Set(names.values());
  const taken = new Set(valuesOf(graph));
  const clashing = new Map<string, string>();
  for (const name of taken) {
    if (names.has(name) || !wanted.has(name)) continue;
    let other = `${name}:value`;
    while (taken.has(other) || wanted.has(other)) other += "_";
    clashing.set(name, other);
  }
  if (clashing.size) renameValues(graph, (name) => clashing.get(name) ?? name);
}

function roundedTensor(name: string, tensor: Tensor, dtype: DType): Tensor {
  const result = emptyTensor(dtype, tensor.shape);
  const bits = dtype === "float16" ? float16Bits : bfloat16Bits;
  for (let place = 0; place < tensor.data.length; place++) {
    const value = numberAt(tensor, place);
    (result.data as Uint16Array)[place] = bits(value);
    if (Number.isFinite(value) && !Number.isFinite(numberAt(result, place))) {
      throw new CheckpointError(
        `'${name}' holds ${value}, too large for ${dtype}, its dtype in the source's file. Train with a smaller learning rate or with ` +
          "weight decay, or a file in float32",
      );
    }
  }
  return result;
}

/** Take out the casts of an initializer: it has the dtype that they cast to. */
function removeCast(graph: Message, name: string): void {
  const replaced = new Set<string>();
  for (const body of graphsWithin(graph)) {
    body.remove(GRAPH.nodes, (node) => {
      const isCast = node.text(NODE.operator) === "Cast" && node.texts(NODE.inputs)[0] === name;
      if (isCast) replaced.add(node.text(NODE.outputs));
      return isCast;
    });
  }
  renameValues(graph, (value) => (replaced.has(value) ? name : value));
  for (const body of graphsWithin(graph)) body.remove(GRAPH.valueInfo, (value) => value.text(VALUE.name) === name);
}

function objectiveOf(options: Readonly<Record<string, any>>): string {
  const outputs = (options.predictions ?? []).map((prediction: any) => prediction.output);
  return JSON.stringify({ loss: options.loss, metrics: options.metrics ?? [], outputs });
}

function weightsBeside(graph: Message, tensors: [string, Tensor][], dataName: DataName): { name: string; bytes: Uint8Array } {
  const large = tensors.filter(([, tensor]) => tensor.data.byteLength >= SMALLEST_EXTERNAL).map(([, { data }]) => data);
  const bytes = new Uint8Array(large.reduce((sum, data) => sum + data.byteLength, 0));
  let offset = 0;
  for (const data of large) {
    bytes.set(bytesIn(data), offset);
    offset += data.byteLength;
  }
  const name = typeof dataName === "string" ? dataName : dataName(bytes);
  offset = 0;
  for (const [weight, tensor] of tensors) {
    const isSmall = tensor.data.byteLength < SMALLEST_EXTERNAL;
    graph.addMessage(GRAPH.initializers, isSmall ? tensorMessage(weight, tensor) : externalTensorMessage(weight, tensor, name, offset));
    if (!isSmall) offset += tensor.data.byteLength;
  }
  return { name, bytes };
}

