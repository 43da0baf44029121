/** A program in one ONNX file: the inference graph, and a `training_info` with what a step changes. */

import { checkDigest, checkVersion, DIGEST } from "./digest.js";
import { CheckpointError, ModelError, messageOf } from "./errors.js";
import { parseJson } from "./json.js";
import {
  ATTRIBUTE, FUNCTION, GRAPH, MODEL, NODE, TENSOR, TRAINING, propertiesOf, readTensor, renameValues, setProperties, valueInfo,
} from "./onnx.js";
import { Message } from "./protobuf.js";
import { readSignature, stateEntries, type GraphName, type Signature } from "./signature.js";
import { checkState } from "./state.js";
import { codeOf, type Tensor } from "./tensor.js";

const FORMAT = "burnish training";
const PROPERTY = "burnish.training";
const FUNCTION_DOMAIN = "burnish.program";
const INITIALIZER_NODE = "initializer:";
const KEYS = ["signature", "options", "state", "step", "prefix", "opsets", "ir_versions", "hashes", "program", "base"];

interface Layout {
  options: Record<string, any>;
  /** State name to initializer. */
  state: Record<string, string>;
  /** Input or output of the step to value of the file. */
  step: Record<string, string>;
  prefix: string;
  opsets: Record<string, number>;
  ir_versions: Record<string, number>;
  /** Of each graph, and of the program. */
  hashes: Record<string, string>;
  program: string;
  base: string[];
}

/** Read what `program.save("file.onnx")` wrote; see `Program.fromBytes`. */
export async function readTrainingModel(bytes: Uint8Array, name: string) {
  let model: Message;
  let properties: Map<string, string>;
  try {
    model = Message.read(bytes);
    properties = propertiesOf(model);
    if (!model.message(MODEL.graph)) throw new Error("it has no graph");
  } catch (error) {
    throw new ModelError(`'${name}' is not a whole ONNX file: ${messageOf(error)}. Use another copy`, { cause: error });
  }
  const text = properties.get(PROPERTY);
  if (text === undefined) {
    throw new CheckpointError(
      `'${name}' is an ONNX model that holds no burnish program: compile it with burnish compile, or give a file that ` +
        "program.save wrote",
    );
  }
  return new TrainingModel(name, bytes, model, properties).parts(text);
}

class TrainingModel {
  constructor(
    private readonly name: string,
    private readonly bytes: Uint8Array,
    private readonly model: Message,
    private readonly properties: Map<string, string>,
  ) {}

  async parts(text: string) {
    const layout = await this.layout(text);
    let signature: Signature;
    try {
      signature = readSignature((layout as any).signature);
    } catch (error) {
      throw this.damaged(`the signature in its metadata cannot be read: ${messageOf(error)}`, error);
    }
    const savedState = this.state(layout, signature);
    const isWeight = (name: string) => name.startsWith("param/") || name.startsWith("stat/");
    return {
      name: this.name,
      signature,
      options: layout.options,
      identity: { program: layout.program, graphs: layout.hashes },
      base: layout.base,
      weights: new Map([...savedState].filter(([name]) => isWeight(name))),
      savedState,
      open: async (graph: GraphName) => {
        try {
          return { bytes: this.graph(graph, layout, signature).write() };
        } catch (error) {
          throw error instanceof CheckpointError ? error : this.damaged(`its ${graph} graph cannot be read: ${messageOf(error)}`, error);
        }
      },
    };
  }

  private async layout(text: string): Promise<Layout> {
    let layout: any;
    try {
      layout = parseJson(text);
    } catch (error) {
      throw this.damaged(`its metadata '${PROPERTY}' cannot be read: ${messageOf(error)}`, error);
    }
    if (layout?.format !== FORMAT) throw this.damaged(`its metadata '${PROPERTY}' is not of the format '${FORMAT}'`);
    checkVersion(layout.version, `'${this.name}'`, `make it again from the model, with burnish compile MODEL -o ${this.name}`);
    await checkDigest(this.bytes, this.properties.get(DIGEST), () => this.damaged("it has changed since it was written"));
    const absent = KEYS.find((key) => layout[key] === undefined || layout[key] === null);
    if (absent) throw this.damaged(`its metadata '${PROPERTY}' has no '${absent}'`);
    return layout;
  }

  private state(layout: Layout, signature: Signature): Map<string, Tensor> {
    const tensors = new Map<string, Message>();
    for (const graph of [this.model.message(MODEL.graph)!, this.training(TRAINING.algorithm)]) {
      for (const tensor of graph.messages(GRAPH.initializers)) tensors.set(tensor.text(TENSOR.name), tensor);
    }
    const state = new Map<string, Tensor>();
    for (const name of stateEntries(signature).keys()) {
      const tensor = tensors.get(layout.state[name] ?? "");
      if (!tensor) throw this.damaged(`it has no initializer that holds '${name}'`);
      try {
        state.set(name, readTensor(tensor));
      } catch (error) {
        throw this.damaged(`'${name}' cannot be read: ${messageOf(error)}`, error);
      }
    }
    checkState(stateEntries(signature).values(), state, CheckpointError, `'${this.name}'`, "Write the model again, or use another copy");
    return state;
  }

  private training(field: number): Message {
    const training = this.model.message(MODEL.training);
    const graph = training?.message(field);
    if (!graph) throw this.damaged("its training_info has not what was written");
    return graph;
  }

  private graph(name: GraphName, layout: Layout, signature: Signature): Message {
    const graph = this.content(name, layout, signature);
    for (const field of [GRAPH.inputs, GRAPH.outputs, GRAPH.name]) graph.remove(field);
    graph.addText(GRAPH.name, name);
    const { inputs, outputs } = signature[name]!;
    for (const entry of inputs) graph.addMessage(GRAPH.inputs, valueInfo(entry.name, codeOf(entry.dtype), entry.shape));
    for (const entry of outputs) graph.addMessage(GRAPH.outputs, valueInfo(entry.name, codeOf(entry.dtype), entry.shape));
    const model = new Message()
      .addInteger(MODEL.irVersion, layout.ir_versions[name]!)
      .addText(MODEL.producer, "burnish")
      .addMessage(MODEL.graph, graph)
      .addMessage(MODEL.opsets, new Message().addText(1, "").addInteger(2, layout.opsets[name]!));
    if (name === "predict") setProperties(model, new Map([...this.properties].filter(([key]) => key !== PROPERTY && key !== DIGEST)));
    return model;
  }

  private content(name: GraphName, layout: Layout, signature: Signature): Message {
    if (name === "predict") {
      const graph = copyOf(this.model.message(MODEL.graph)!);
      const own = new Set(graph.messages(GRAPH.initializers).map((tensor) => tensor.text(TENSOR.name)));
      const names = new Map(Object.entries(layout.state).flatMap(([state, value]) => (own.has(value) ? [[value, state]] : [])));
      graph.remove(GRAPH.initializers, (tensor) => names.has(tensor.text(TENSOR.name)));
      renameValues(graph, (value) => names.get(value) ?? value);
      return graph;
    }
    if (name === "init") {
      const graph = copyOf(this.training(TRAINING.initialization));
      const inputs = new Set(signature.init.inputs.map((entry) => entry.name));
      graph.remove(GRAPH.initializers, (tensor) => inputs.has(tensor.text(TENSOR.name)));
      return graph;
    }
    if (name === "step") return this.step(layout);
    return this.function(name);
  }

  private step(layout: Layout): Message {
    const graph = copyOf(this.training(TRAINING.algorithm));
    const names = new Map(Object.entries(layout.step).map(([name, value]) => [value, name]));
    const others = new Set(Object.values(layout.state));
    graph.remove(GRAPH.initializers, (tensor) => names.has(tensor.text(TENSOR.name)) || others.has(tensor.text(TENSOR.name)));
    const without = (name: string) => (name.startsWith(layout.prefix) ? name.slice(layout.prefix.length) : name);
    renameValues(graph, (value) => names.get(value) ?? without(value), without);
    return graph;
  }

  private function(name: GraphName): Message {
    const functions = this.model.messages(MODEL.functions);
    const found = functions.filter((item) => item.text(FUNCTION.domain) === FUNCTION_DOMAIN && item.text(FUNCTION.name) === name);
    if (found.length !== 1) throw this.damaged(`it has ${found.length} functions '${FUNCTION_DOMAIN}.${name}', and one was written`);
    const graph = new Message();
    for (const node of found[0]!.messages(FUNCTION.nodes)) {
      const tensor = node.messages(NODE.attributes)[0]?.message(ATTRIBUTE.tensor);
      if (node.text(NODE.operator) === "Constant" && node.text(NODE.name).startsWith(INITIALIZER_NODE) && tensor) {
        const initializer = copyOf(tensor);
        initializer.remove(TENSOR.name);
        graph.addMessage(GRAPH.initializers, initializer.addText(TENSOR.name, node.text(NODE.outputs)));
      } else {
        graph.addMessage(GRAPH.nodes, node);
      }
    }
    for (const value of found[0]!.messages(FUNCTION.valueInfo)) graph.addMessage(GRAPH.valueInfo, value);
    return graph;
  }

  private damaged(what: string, cause?: unknown): CheckpointError {
    return new CheckpointError(
      `'${this.name}' is not a whole model that program.save wrote: ${what}. Write it again, or use another copy`, { cause },
    );
  }
}

function copyOf(message: Message): Message {
  return Message.read(message.write());
}
