/** What training keeps next to a model becomes part of it: adapters are merged, masks applied, and quantized weights made integers. */

import { CheckpointError, UnsupportedOperatorError } from "./errors.js";
import { ATTRIBUTE, GRAPH, MODEL, NODE, TENSOR, VALUE, graphsWithin, propertiesOf, readTensor, tensorMessage } from "./onnx.js";
import { Message } from "./protobuf.js";
import { emptyTensor, numberAt, setNumber, sizeOf, type Tensor } from "./tensor.js";

/** Runs a model without inputs, and returns its outputs. */
export type Evaluate = (model: Uint8Array) => Promise<ReadonlyMap<string, Tensor>>;

export const ADAPTERS = "burnish.adapters";
const PRUNING = "burnish.pruning";
const QUANTIZATION = "burnish.quantization";
/** Integers of a bias beyond it leave no room for the sum; scales of weights are so large that none is beyond `ROOM`. */
const LARGEST_BIAS = 2 ** 30;
const ROOM = 2 ** 29;
const IN_PYTHON = "Save a checkpoint, and export that in Python: session.restore(path), session.export('tuned.onnx')";

interface Node {
  message: Message;
  operator: string;
  inputs: string[];
  outputs: string[];
}

interface Adapter {
  layer: string;
  operator: string;
  variant: string;
  weight: string;
  product: string;
  base_output: string;
  output: string;
  parameters: Record<string, string>;
  rank: number;
  alpha: number;
  rslora: boolean;
}

interface Quantization {
  role: "weight" | "activation";
  levels: number;
  bits: number;
  block: number;
}

/**
 * Settle a model in place, as Python's export does; one without adapters, masks and quantization stays as it is.
 *
 * @param tensors its initializers by name that are not in the model yet; changed in place.
 * @throws UnsupportedOperatorError for what this client does not settle; CheckpointError where weights are too large.
 */
export async function settle(model: Message, tensors: Map<string, Tensor>, evaluate: Evaluate): Promise<void> {
  const text = propertiesOf(model).get(ADAPTERS);
  const adapters = text === undefined ? [] : (JSON.parse(text).adapters as Adapter[]);
  const nodes = model.message(MODEL.graph)!.messages(GRAPH.nodes);
  if (!adapters.length && !nodes.some((node) => markOf(node, PRUNING) || markOf(node, QUANTIZATION))) return;
  const graph = new Graph(model, tensors, evaluate);
  const masked = graph.marked("Mul", PRUNING);
  const quantized = graph.marked("QuantizeLinear", QUANTIZATION);
  if (adapters.length) await mergeAdapters(graph, adapters);
  for (const { node } of masked) applyMask(graph, node);
  if (quantized.length) await new Quantizing(graph).settle(quantized as { node: Node; mark: Quantization }[]);
  graph.write();
}

/** The graph of a model, to be edited. */
class Graph {
  nodes: Node[];
  private readonly graph: Message;
  private readonly results: ReadonlySet<string>;
  private readonly names: Set<string>;
  private readonly stored: ReadonlyMap<string, Message>;
  private readonly computed = new Map<string, Tensor>();

  constructor(private readonly model: Message, readonly tensors: Map<string, Tensor>, private readonly evaluate: Evaluate) {
    this.graph = model.message(MODEL.graph)!;
    this.stored = new Map(this.graph.messages(GRAPH.initializers).map((tensor) => [tensor.text(TENSOR.name), tensor]));
    this.nodes = this.graph.messages(GRAPH.nodes).map((message) => ({
      message, operator: message.text(NODE.domain) === "" ? message.text(NODE.operator) : "", inputs: message.texts(NODE.inputs), outputs: message.texts(NODE.outputs),
    }));
    this.results = new Set(this.graph.messages(GRAPH.outputs).map((value) => value.text(VALUE.name)));
    this.names = new Set([...tensors.keys(), ...this.stored.keys()]);
    for (const body of graphsWithin(this.graph)) {
      for (const value of body.messages(GRAPH.inputs)) this.names.add(value.text(VALUE.name));
      for (const node of body.messages(GRAPH.nodes)) for (const name of node.texts(NODE.outputs)) this.names.add(name);
    }
  }

  /** Nodes of an operator with what their metadata say under a key. */
  marked(operator: string, key: string): { node: Node; mark: unknown }[] {
    return this.nodes.flatMap((node) => {
      if (node.operator !== operator) return [];
      const entry = markOf(node.message, key);
      return entry ? [{ node, mark: JSON.parse(entry.text(2)) }] : [];
    });
  }

  producer(name: string | undefined, operator?: string): Node | undefined {
    const found = name ? this.nodes.find(({ outputs }) => outputs.includes(name)) : undefined;
    return operator === undefined || found?.operator === operator ? found : undefined;
  }

  readers(name: string): Node[] {
    return this.nodes.filter((node) => reads(node).includes(name));
  }

  isUsed(name: string): boolean {
    return this.results.has(name) || this.readers(name).length > 0;
  }

  isResult(name: string): boolean {
    return this.results.has(name);
  }

  /** A name that nothing has, with a number after it where `wanted` is taken. */
  take(wanted: string): string {
    let name = wanted;
    for (let number = 1; this.names.has(name); number++) name = `${wanted}_${number}`;
    this.names.add(name);
    return name;
  }

  /** Add an initializer under a name, which one that nothing will read gives up. */
  add(name: string, tensor: Tensor, given: ReadonlySet<string> = new Set()): string {
    const present = this.tensors.get(name);
    if (present && (given.has(name) || !this.isUsed(name))) {
      const other = this.take(`${name}:trained`);
      this.tensors.set(other, present);
      this.tensors.delete(name);
      this.names.delete(name);
      for (const node of this.nodes) node.inputs = node.inputs.map((input) => (input === name ? other : input));
    }
    const taken = this.take(name);
    this.tensors.set(taken, tensor);
    return taken;
  }

  remove(node: Node): void {
    this.nodes = this.nodes.filter((other) => other !== node);
  }

  insertBefore(place: Node, operator: string, inputs: string[], output: string, axis?: number): void {
    const message = new Message().addText(NODE.name, output).addText(NODE.operator, operator);
    if (axis !== undefined) {
      message.addMessage(NODE.attributes, new Message().addText(ATTRIBUTE.name, "axis").addInteger(ATTRIBUTE.integer, axis).addInteger(ATTRIBUTE.type, 2));
    }
    this.nodes.splice(this.nodes.indexOf(place), 0, { message, operator, inputs, outputs: [output] });
  }

  /** The array of a value that hangs on constants alone, and was asked for with `compute`. */
  of(name: string): Tensor {
    const stored = this.stored.get(name);
    return this.tensors.get(name) ?? (stored ? readTensor(stored) : this.computed.get(name)!);
  }

  /** Let ONNX Runtime compute those values that nodes make of initializers. */
  async compute(names: readonly string[]): Promise<void> {
    const wanted = [...new Set(names)].filter((name) => !this.tensors.has(name) && !this.stored.has(name));
    if (!wanted.length) return;
    const needed = new Set<string>(wanted);
    const nodes: Node[] = [];
    for (const node of [...this.nodes].reverse()) {
      if (!node.outputs.some((name) => needed.has(name))) continue;
      nodes.unshift(node);
      for (const name of reads(node)) needed.add(name);
    }
    const made = new Set(nodes.flatMap(({ outputs }) => outputs));
    const body = new Message().addText(GRAPH.name, "constants");
    for (const node of nodes) body.addMessage(GRAPH.nodes, written(node));
    for (const name of needed) {
      if (name === "" || made.has(name)) continue;
      const tensor = this.tensors.get(name);
      const initializer = tensor ? tensorMessage(name, tensor) : this.stored.get(name);
      if (!initializer) throw new CheckpointError(`'${name}', from which a weight or a scale is computed, is an input of the model: make it an initializer`);
      body.addMessage(GRAPH.initializers, initializer);
    }
    for (const value of this.graph.messages(GRAPH.valueInfo)) if (wanted.includes(value.text(VALUE.name))) body.addMessage(GRAPH.outputs, value);
    const model = new Message().addInteger(MODEL.irVersion, this.model.integer(MODEL.irVersion)).addMessage(MODEL.graph, body);
    for (const opset of this.model.messages(MODEL.opsets)) model.addMessage(MODEL.opsets, opset);
    for (const [name, tensor] of await this.evaluate(model.write())) this.computed.set(name, tensor);
  }

  /** Drop the nodes that do not contribute to the results; what contributes is returned. */
  dropUnread(): Set<string> {
    const live = new Set(this.results);
    const kept = [...this.nodes].reverse().filter((node) => {
      if (!node.outputs.some((name) => live.has(name))) return false;
      for (const name of reads(node)) live.add(name);
      return true;
    });
    this.nodes = kept.reverse();
    return live;
  }

  /** Write the nodes into the model, and drop what nothing reads. */
  write(): void {
    const live = this.dropUnread();
    this.graph.remove(GRAPH.nodes);
    for (const node of this.nodes) this.graph.addMessage(GRAPH.nodes, written(node));
    this.graph.remove(GRAPH.initializers, (tensor) => !live.has(tensor.text(TENSOR.name)));
    this.graph.remove(GRAPH.valueInfo, (value) => !live.has(value.text(VALUE.name)) || this.tensors.has(value.text(VALUE.name)));
    for (const name of this.tensors.keys()) if (!live.has(name)) this.tensors.delete(name);
  }
}

function markOf(node: Message, key: string): Message | undefined {
  return node.messages(NODE.metadata).find((item) => item.text(1) === key);
}

/** What a node reads, in its subgraphs too. */
function reads({ message, inputs }: Node): string[] {
  const within = message.messages(NODE.attributes).flatMap((attribute) => [...attribute.messages(ATTRIBUTE.graph), ...attribute.messages(ATTRIBUTE.graphs)]);
  if (!within.length) return inputs;
  return [...inputs, ...within.flatMap((body) => [...graphsWithin(body)]).flatMap((body) => [
    ...body.messages(GRAPH.nodes).flatMap((node) => node.texts(NODE.inputs)), ...body.messages(GRAPH.outputs).map((value) => value.text(VALUE.name)),
  ])];
}

function written({ message, inputs, outputs }: Node): Message {
  message.remove(NODE.inputs);
  message.remove(NODE.outputs);
  for (const name of inputs) message.addText(NODE.inputs, name);
  for (const name of outputs) message.addText(NODE.outputs, name);
  return message;
}

function attribute({ message }: Node, name: string): Message | undefined {
  return message.messages(NODE.attributes).find((item) => item.text(ATTRIBUTE.name) === name);
}

/** The axis of a weight that counts the outputs. */
function outputAxis(node: Node): number {
  return node.operator === "Conv" || (node.operator === "Gemm" && attribute(node, "transB")?.integer(ATTRIBUTE.integer)) ? 0 : 1;
}

async function mergeAdapters(graph: Graph, adapters: readonly Adapter[]): Promise<void> {
  const other = adapters.find(({ variant }) => variant !== "lora" && variant !== "dora");
  if (other) throw new UnsupportedOperatorError(`The layer '${other.layer}' has an adapter of the kind ${other.variant}, which this client does not merge. ${IN_PYTHON}`);
  const nodes = adapters.map((adapter) => {
    const node = graph.producer(adapter.product, adapter.operator);
    if (!node) throw new CheckpointError(`The adapter of the layer '${adapter.layer}' is not as it was put: '${adapter.product}' is not there. Compile the model again`);
    return node;
  });
  const place = (node: Node) => (node.operator === "Gather" ? 0 : 1);
  await graph.compute(nodes.map((node) => node.inputs[place(node)]!));
  const merged = new Map<string, Tensor>();
  adapters.forEach((adapter, index) => {
    const node = nodes[index]!;
    const operand = node.inputs[place(node)]!;
    const key = JSON.stringify([adapter.layer, operand]);
    if (!merged.has(key)) merged.set(key, mergedWeight(graph, adapter, node, graph.of(operand)));
  });
  for (const adapter of adapters) {
    if (adapter.output === adapter.base_output) continue;
    graph.remove(graph.producer(adapter.output)!);
    const rename = (name: string) => (name === adapter.base_output ? adapter.output : name);
    for (const node of graph.nodes) [node.inputs, node.outputs] = [node.inputs.map(rename), node.outputs.map(rename)];
  }
  graph.dropUnread();
  const layers = new Map<string, Set<Node>>();
  adapters.forEach(({ layer }, index) => layers.set(layer, (layers.get(layer) ?? new Set()).add(nodes[index]!)));
  for (const [key, tensor] of merged) {
    const [layer, operand] = JSON.parse(key) as [string, string];
    const own = layers.get(layer)!;
    const weight = adapters.find((adapter) => adapter.layer === layer)!.weight;
    const order = orderFrom(graph, operand, weight, tensor.shape.length);
    if (order && [...terminalReaders(graph, weight)].every((reader) => own.has(reader as Node))) {
      graph.tensors.set(weight, transposed(tensor, order));
      continue;
    }
    const name = graph.add(`${layer}.merged_weight`, tensor);
    for (const node of own) node.inputs = node.inputs.map((input) => (input === operand ? name : input));
  }
}

/** The weight that computes what a weight and its adapter do: in float64, rounded once. */
function mergedWeight(graph: Graph, adapter: Adapter, node: Node, weight: Tensor): Tensor {
  const [a, b] = [graph.of(adapter.parameters.A!), graph.of(adapter.parameters.B!)];
  const scaling = adapter.rank ? adapter.alpha / (adapter.rslora ? Math.sqrt(adapter.rank) : adapter.rank) : 1;
  const factor = node.operator === "Gemm" ? (attribute(node, "alpha")?.float(ATTRIBUTE.float) ?? 1) : 1;
  const whole = Float64Array.from({ length: weight.data.length }, (_, i) => numberAt(weight, i) * factor);
  addProduct(whole, a, b, scaling, node);
  if (adapter.variant === "dora") {
    const axis = outputAxis(node);
    const inner = sizeOf(weight.shape.slice(axis + 1));
    const outputs = weight.shape[axis]!;
    const output = (i: number) => Math.floor(i / inner) % outputs;
    const squares = new Float64Array(outputs);
    whole.forEach((value, i) => (squares[output(i)]! += value * value));
    const magnitude = graph.of(adapter.parameters.magnitude!);
    whole.forEach((value, i) => (whole[i] = value * (numberAt(magnitude, output(i)) / Math.sqrt(squares[output(i)]!))));
  }
  const result = emptyTensor(weight.dtype, weight.shape);
  for (let i = 0; i < whole.length; i++) {
    setNumber(result, i, whole[i]! / factor);
    if (!Number.isFinite(numberAt(result, i))) {
      throw new CheckpointError(
        `The weight '${adapter.weight}' and its adapter come to NaN or infinite values in ${weight.dtype}: train with a smaller learning rate`,
      );
    }
  }
  return result;
}

/** Add `scaling · A B` to a weight of a node. A Conv's outputs read the inputs of their group. */
function addProduct(whole: Float64Array, a: Tensor, b: Tensor, scaling: number, node: Node): void {
  const isConv = node.operator === "Conv";
  const groups = isConv ? attribute(node, "group")?.integer(ATTRIBUTE.integer) || 1 : 1;
  const [down, up] = isConv ? [a, b] : [a, b].map(matrixTransposed) as [Tensor, Tensor];
  // Down is [rank, inputs], up is [outputs, rank / groups].
  const rank = down.shape[0]! / groups;
  const inputs = sizeOf(down.shape.slice(1));
  const outputs = up.shape[0]!;
  const isTransposed = outputAxis(node) === 1;
  const sum = new Float64Array(inputs);
  for (let output = 0; output < outputs; output++) {
    const first = Math.floor((output * groups) / outputs) * rank;
    sum.fill(0);
    for (let k = 0; k < rank; k++) {
      const value = numberAt(up, output * rank + k);
      for (let input = 0; input < inputs; input++) sum[input]! += value * numberAt(down, (first + k) * inputs + input);
    }
    for (let input = 0; input < inputs; input++) whole[isTransposed ? input * outputs + output : output * inputs + input]! += scaling * sum[input]!;
  }
}

function matrixTransposed(tensor: Tensor): Tensor {
  return transposed(tensor, [1, 0]);
}

/** The array with its axes in another order, as numpy's `transpose`. */
function transposed(tensor: Tensor, order: readonly number[]): Tensor {
  if (order.every((axis, place) => axis === place)) return tensor;
  const shape = order.map((axis) => tensor.shape[axis]!);
  const strides = order.map((axis) => sizeOf(tensor.shape.slice(axis + 1)));
  const result = emptyTensor(tensor.dtype, shape);
  const index = shape.map(() => 0);
  for (let place = 0, from = 0; place < result.data.length; place++) {
    result.data[place] = tensor.data[from]!;
    for (let axis = shape.length - 1; axis >= 0; axis--) {
      from += strides[axis]!;
      if (++index[axis]! < shape[axis]!) break;
      from -= strides[axis]! * shape[axis]!;
      index[axis] = 0;
    }
  }
  return result;
}

/** The order of axes that makes of what a node reads the initializer that it was transposed from; undefined where it was not. */
function orderFrom(graph: Graph, operand: string, source: string, rank: number): number[] | undefined {
  let order = Array.from({ length: rank }, (_, axis) => axis);
  for (let value = operand; value !== source; ) {
    const node = graph.producer(value);
    if (node?.operator !== "Transpose" && node?.operator !== "Identity") return undefined;
    if (node.operator === "Transpose") {
      const perm = attribute(node, "perm")?.integers(ATTRIBUTE.integers).map(Number) ?? order.map((_, axis) => rank - 1 - axis);
      const before = order;
      order = order.map((_, axis) => before[perm.indexOf(axis)]!);
    }
    value = node.inputs[0]!;
  }
  return order;
}

/** The nodes that read a value, through transpositions; undefined among them where the graph returns it. */
function terminalReaders(graph: Graph, source: string): Set<Node | undefined> {
  const readers = new Set<Node | undefined>();
  const pending = [source];
  for (let value = pending.pop(); value !== undefined; value = pending.pop()) {
    if (graph.isResult(value)) readers.add(undefined);
    for (const reader of graph.readers(value)) {
      if (reader.operator === "Transpose" || reader.operator === "Identity") pending.push(reader.outputs[0]!);
      else readers.add(reader);
    }
  }
  return readers;
}

/** Write zeros into a weight where its mask has them. */
function applyMask(graph: Graph, node: Node): void {
  const [weight, mask] = node.inputs as [string, string];
  const [numbers, kept] = [graph.tensors.get(weight), graph.tensors.get(mask)];
  if (!numbers || !kept) return;
  for (let i = 0; i < numbers.data.length; i++) setNumber(numbers, i, numberAt(numbers, i) * numberAt(kept, i % kept.data.length));
  const output = node.outputs[0]!;
  const readers = graph.readers(output);
  // What a subgraph or the caller reads stays under its name: a mask changes nothing a second time.
  if (graph.isResult(output) || readers.some(({ inputs }) => !inputs.includes(output))) return;
  for (const reader of readers) reader.inputs = reader.inputs.map((input) => (input === output ? weight : input));
  graph.remove(node);
}

/** Weights, scales and biases as integers, in the format QDQ. */
class Quantizing {
  private readonly given = new Set<string>();

  constructor(private readonly graph: Graph) {}

  async settle(marked: { node: Node; mark: Quantization }[]): Promise<void> {
    const { graph } = this;
    const other = marked.find(({ mark }) => mark.bits !== 8 || mark.block);
    if (other) {
      const what = other.mark.block ? "in blocks" : `of ${other.mark.bits} bits`;
      throw new UnsupportedOperatorError(`'${this.stem(other.node)}' is quantized to integers ${what}, which this client does not export. ${IN_PYTHON}`);
    }
    const biases = graph.nodes.filter(({ operator }) => operator === "Gemm" || operator === "Conv").flatMap(({ inputs }) => (inputs[2] ? [inputs[2]] : []));
    await graph.compute([...marked.flatMap(({ node, mark }) => (mark.role === "weight" ? node.inputs.slice(0, 2) : node.inputs.slice(1, 3))), ...biases]);
    for (const { node } of marked) for (const leaf of this.leaves(node.inputs[1]!)) this.given.add(leaf);
    for (const { node, mark } of marked) if (mark.role === "activation") this.settleActivation(node);
    for (const { node, mark } of marked) if (mark.role === "weight") this.settleWeight(node, mark);
    for (const node of [...graph.nodes]) this.settleBias(node);
  }

  /** Give an activation its scale and zero point as scalars, before and after. */
  private settleActivation(node: Node): void {
    const { graph } = this;
    const stem = node.inputs[0]!.split(":unquantized")[0]!;
    const [scale, zero] = node.inputs.slice(1, 3).map((name) => graph.of(name)) as [Tensor, Tensor];
    const names = [
      graph.add(`${stem}_scale`, { ...scale, shape: [] }, this.given),
      graph.add(`${stem}_zero_point`, { ...zero, shape: [] }, this.given),
    ];
    for (const owner of [node, ...graph.readers(node.outputs[0]!)]) {
      owner.inputs.splice(1, 2, ...names);
      owner.message.remove(NODE.metadata);
      owner.message.remove(NODE.attributes, (item) => item.text(ATTRIBUTE.name) === "axis");
    }
  }

  /** Put the integers of a weight in place of what computes them. */
  private settleWeight(node: Node, mark: Quantization): void {
    const { graph } = this;
    const [weight, given] = node.inputs.slice(0, 2).map((name) => graph.of(name)) as [Tensor, Tensor];
    const axis = attribute(node, "axis")?.integer(ATTRIBUTE.integer) ?? 1;
    const isSingle = given.data.length === 1;
    const inner = sizeOf(weight.shape.slice(axis + 1));
    const channel = (i: number) => (isSingle ? 0 : Math.floor(i / inner) % given.data.length);
    const numbers = Float32Array.from({ length: weight.data.length }, (_, i) => {
      const rounded = rint(Math.fround(numberAt(weight, i) / numberAt(given, channel(i))));
      return Math.min(Math.max(rounded, -mark.levels), mark.levels);
    });
    const clip = graph.readers(node.outputs[0]!)[0]!;
    const last = graph.readers(clip.outputs[0]!)[0]!;
    const stem = this.stem(node);
    const layers = graph.readers(last.outputs[0]!);
    let scale = Float32Array.from(given.data as Float32Array);
    const bias = layers.length === 1 ? this.biasOf(layers[0]!) : undefined;
    if (bias) {
      // The weights of a channel that died are nothing next to its bias, and its integers are few then.
      const needed = Float32Array.from(bias.numbers, (value) => Math.abs(value) / (bias.x * ROOM));
      const least = needed.reduce((largest, value) => Math.max(largest, value), 0);
      const roomy = scale.map((value, i) => Math.max(value, isSingle ? least : needed[needed.length === 1 ? 0 : i]!));
      const ratio = scale.map((value, i) => value / roomy[i]!);
      numbers.forEach((value, i) => (numbers[i] = rint(Math.fround(value * ratio[channel(i)]!))));
      scale = roomy;
    }
    const shape = isSingle ? [] : [scale.length];
    const inputs = [
      graph.add(`${stem}_quantized`, { dtype: "int8", shape: weight.shape, data: Int8Array.from(numbers) }, this.given),
      graph.add(`${stem}_scale`, { dtype: "float32", shape, data: scale }, this.given),
      graph.add(`${stem}_zero_point`, emptyTensor("int8", shape), this.given),
    ];
    graph.insertBefore(last, "DequantizeLinear", inputs, last.outputs[0]!, isSingle ? undefined : axis);
    graph.remove(last);
  }

  /** Put the integers of a bias in its place, where the layer computes with integers. */
  private settleBias(layer: Node): void {
    const { graph } = this;
    const bias = this.biasOf(layer);
    const weight = bias && graph.producer(layer.inputs[1], "DequantizeLinear");
    if (!bias || !weight || attribute(weight, "block_size")) return;
    const factors = graph.of(weight.inputs[1]!);
    const scale = Float32Array.from(factors.data as Float32Array, (value) => bias.x * value);
    const integers = Float64Array.from({ length: Math.max(bias.numbers.length, scale.length) }, (_, i) =>
      rint(bias.numbers[bias.numbers.length === 1 ? 0 : i]! / (bias.x * numberAt(factors, scale.length === 1 ? 0 : i))),
    );
    if (!integers.every((value) => Math.abs(value) < LARGEST_BIAS)) return;
    const name = layer.inputs[2]!;
    const { shape } = factors;
    const inputs = [
      graph.add(`${name}_quantized`, { dtype: "int32", shape: [integers.length], data: Int32Array.from(integers) }, this.given),
      graph.add(`${name}_scale`, { dtype: "float32", shape, data: scale }, this.given),
      graph.add(`${name}_zero_point`, emptyTensor("int32", shape), this.given),
    ];
    const output = graph.take(`${name}:dequantized`);
    graph.insertBefore(layer, "DequantizeLinear", inputs, output, scale.length > 1 ? 0 : undefined);
    layer.inputs[2] = output;
  }

  /** The scale of what a layer reads, and its bias, where it adds that as integers. */
  private biasOf(layer: Node): { x: number; numbers: Float64Array } | undefined {
    const { graph } = this;
    const x = this.takesIntegers(layer) ? graph.producer(layer.inputs[0], "DequantizeLinear") : undefined;
    if (!x || !layer.inputs[2]) return undefined;
    const bias = graph.of(layer.inputs[2]);
    if (bias.shape.slice(0, -1).some((extent) => extent !== 1)) return undefined;
    return { x: numberAt(graph.of(x.inputs[1]!), 0), numbers: Float64Array.from({ length: bias.data.length }, (_, i) => numberAt(bias, i)) };
  }

  /** Whether ONNX Runtime computes a layer with integers where its operands are: a Conv alone whose result is quantized. */
  private takesIntegers(layer: Node): boolean {
    if (layer.operator !== "Conv") return layer.operator === "Gemm";
    for (let value = layer.outputs[0]!; ; ) {
      const readers = this.graph.readers(value);
      if (readers.length !== 1 || this.graph.isResult(value)) return false;
      const { operator, outputs } = readers[0]!;
      if (operator !== "Clip" && operator !== "Relu") return operator === "QuantizeLinear";
      value = outputs[0]!;
    }
  }

  /** The name of the weight that a chain of nodes begins with. */
  private stem(node: Node): string {
    let value = node.inputs[0]!;
    for (let producer = this.graph.producer(value); producer; producer = this.graph.producer(value)) value = producer.inputs[0]!;
    return value;
  }

  /** The initializers that a value is computed from. */
  private leaves(value: string): string[] {
    const producer = this.graph.producer(value);
    if (producer) return producer.inputs.flatMap((input) => this.leaves(input));
    return this.graph.tensors.has(value) ? [value] : [];
  }
}

/** The nearest whole number, ties to even. */
function rint(value: number): number {
  const rounded = Math.round(value);
  return Math.abs(value % 1) === 0.5 && rounded % 2 !== 0 ? rounded - 1 : rounded;
}

