/** What this client reads and changes in ONNX files, by the numbers of the fields in onnx.proto. */

import { UnsupportedOperatorError } from "./errors.js";
import { Message } from "./protobuf.js";
import { bytesIn, bytesOf, codeOf, dtypeOfCode, emptyTensor, sizeOf, tensorOfBytes, type Tensor } from "./tensor.js";

export const MODEL = { irVersion: 1, producer: 2, graph: 7, opsets: 8, properties: 14, training: 20, functions: 25 } as const;
export const GRAPH = { nodes: 1, name: 2, initializers: 5, inputs: 11, outputs: 12, valueInfo: 13 } as const;
export const NODE = { inputs: 1, outputs: 2, name: 3, operator: 4, attributes: 5, domain: 7, metadata: 9 } as const;
export const ATTRIBUTE = { name: 1, float: 2, integer: 3, tensor: 5, graph: 6, integers: 8, graphs: 11, type: 20 } as const;
export const TENSOR = {
  dims: 1, dtype: 2, floats: 4, int32s: 5, int64s: 7, name: 8, raw: 9, doubles: 10, uint64s: 11, external: 13, location: 14,
} as const;
export const VALUE = { name: 1, type: 2 } as const;
export const FUNCTION = { name: 1, nodes: 7, domain: 10, valueInfo: 12 } as const;
export const TRAINING = { initialization: 1, algorithm: 2 } as const;
const EXTERNAL = 1;

/** The entries of `metadata_props` of a model. */
export function propertiesOf(model: Message): Map<string, string> {
  return new Map(model.messages(MODEL.properties).map((entry) => [entry.text(1), entry.text(2)]));
}

export function setProperties(model: Message, properties: ReadonlyMap<string, string>): void {
  model.remove(MODEL.properties);
  for (const [key, value] of properties) model.addMessage(MODEL.properties, new Message().addText(1, key).addText(2, value));
}

/** A graph and all graphs in the attributes of its nodes. */
export function* graphsWithin(graph: Message): Generator<Message> {
  yield graph;
  for (const node of graph.messages(GRAPH.nodes)) {
    for (const attribute of node.messages(NODE.attributes)) {
      for (const body of [...attribute.messages(ATTRIBUTE.graph), ...attribute.messages(ATTRIBUTE.graphs)]) yield* graphsWithin(body);
    }
  }
}

/** Rename, in place, every value and node of a graph and its subgraphs. */
export function renameValues(
  graph: Message, rename: (name: string) => string, renameNode: (name: string) => string = (name) => name,
): void {
  for (const body of graphsWithin(graph)) {
    for (const field of [GRAPH.inputs, GRAPH.outputs, GRAPH.valueInfo]) {
      for (const value of body.messages(field)) value.rename(VALUE.name, rename);
    }
    for (const tensor of body.messages(GRAPH.initializers)) tensor.rename(TENSOR.name, rename);
    for (const node of body.messages(GRAPH.nodes)) {
      node.rename(NODE.inputs, rename);
      node.rename(NODE.outputs, rename);
      node.rename(NODE.name, renameNode);
    }
  }
}

/** Every name that a graph gives to a value, in its subgraphs too. */
export function* valuesOf(graph: Message): Generator<string> {
  for (const body of graphsWithin(graph)) {
    for (const value of body.messages(GRAPH.inputs)) yield value.text(VALUE.name);
    for (const tensor of body.messages(GRAPH.initializers)) yield tensor.text(TENSOR.name);
    for (const node of body.messages(GRAPH.nodes)) yield* node.texts(NODE.outputs);
  }
}

/** A tensor as a file holds it. */
export function tensorMessage(name: string, tensor: Tensor): Message {
  return tensorHeader(name, tensor).addBytes(TENSOR.raw, bytesIn(tensor.data));
}

/** A tensor whose elements lie in another file. */
export function externalTensorMessage(name: string, tensor: Tensor, location: string, offset: number): Message {
  const message = tensorHeader(name, tensor);
  for (const [key, value] of Object.entries({ location, offset: String(offset), length: String(tensor.data.byteLength) })) {
    message.addMessage(TENSOR.external, new Message().addText(1, key).addText(2, value));
  }
  return message.addInteger(TENSOR.location, EXTERNAL);
}

function tensorHeader(name: string, { dtype, shape }: Tensor): Message {
  const message = new Message();
  for (const extent of shape) message.addInteger(TENSOR.dims, extent);
  return message.addInteger(TENSOR.dtype, codeOf(dtype)).addText(TENSOR.name, name);
}

/** The array that a tensor of a file holds. */
export function readTensor(message: Message): Tensor {
  const name = message.text(TENSOR.name);
  const code = message.integer(TENSOR.dtype);
  const dtype = dtypeOfCode(code);
  if (dtype === undefined) throw new UnsupportedOperatorError(`The initializer '${name}' has element type ${code}, which this client has no arrays of`);
  if (message.integer(TENSOR.location) === EXTERNAL) throw new Error(`'${name}' lies in another file`);
  const shape = message.integers(TENSOR.dims).map(Number);
  const raw = message.bytes(TENSOR.raw).at(-1);
  if (raw !== undefined) return tensorOfBytes(dtype, shape, raw);
  const floating = { float32: TENSOR.floats, float64: TENSOR.doubles }[dtype as string];
  if (floating !== undefined) {
    const parts = message.bytes(floating);
    const joined = new Uint8Array(parts.reduce((total, part) => total + part.length, 0));
    let place = 0;
    for (const part of parts) {
      joined.set(part, place);
      place += part.length;
    }
    return tensorOfBytes(dtype, shape, joined);
  }
  const field = { int64: TENSOR.int64s, uint64: TENSOR.uint64s, uint32: TENSOR.uint64s }[dtype as string] ?? TENSOR.int32s;
  const values = message.integers(field);
  const tensor = emptyTensor(dtype, shape);
  if (values.length !== sizeOf(shape)) throw new Error(`'${name}' has ${values.length} elements, and its shape ${sizeOf(shape)}`);
  const isLong = bytesOf(dtype) === 8;
  values.forEach((value, place) => ((tensor.data as any)[place] = isLong ? value : Number(BigInt.asIntN(64, value))));
  return tensor;
}

/** What a graph says of an input or output. */
export function valueInfo(name: string, code: number, shape: readonly (number | string | null)[] | null): Message {
  const tensorType = new Message().addInteger(1, code);
  if (shape !== null) {
    const dims = new Message();
    for (const extent of shape) {
      const dim = new Message();
      if (typeof extent === "number") dim.addInteger(1, extent);
      else if (extent !== null) dim.addText(2, extent);
      dims.addMessage(1, dim);
    }
    tensorType.addMessage(2, dims);
  }
  return new Message().addText(VALUE.name, name).addMessage(VALUE.type, new Message().addMessage(1, tensorType));
}
