/** ONNX Runtime as this client uses it: how graphs are opened, and where the values of a run lie. */

import type { InferenceSession, Tensor as OrtTensor, TensorConstructor } from "onnxruntime-common";

import { ConfigurationError, EngineError, UnsupportedOperatorError, messageOf } from "./errors.js";
import { isRecord, shown } from "./options.js";
import type { GraphFile } from "./program.js";
import { bytesIn, tensorOfBytes, type DType, type Tensor, type TypedArray } from "./tensor.js";

/** `cpu`: onnxruntime-node. `wasm` and `webgpu`: onnxruntime-web. */
export type Backend = "cpu" | "wasm" | "webgpu";
export const BACKENDS: readonly Backend[] = ["cpu", "wasm", "webgpu"];

/** The module of onnxruntime-node or onnxruntime-web. */
export interface OrtModule {
  InferenceSession: { create(model: any, options?: InferenceSession.SessionOptions): Promise<InferenceSession> };
  Tensor: TensorConstructor;
  env: any;
}

export interface RuntimeOptions {
  backend?: Backend;
  /** The module to use, where it is already loaded or comes from a place of its own. */
  ort?: OrtModule;
  /** Threads inside one operator. The browser needs a page that is isolated (COOP and COEP) for more than one. */
  threads?: number;
  /** Where onnxruntime-web finds its `.wasm` files: an address that ends in `/`. */
  wasmPaths?: string;
  /** Further session options of ONNX Runtime. */
  sessionOptions?: InferenceSession.SessionOptions;
}

/** Each graph has threads of its own, and ONNX Runtime makes as many as it is told. */
const MOST_THREADS = 1024;
export const RUNTIME_OPTIONS = ["backend", "ort", "threads", "wasmPaths", "sessionOptions"] as const;

/** What depends on where the client runs. */
export interface Platform {
  defaultBackend: Backend;
  load(backend: Backend): Promise<OrtModule>;
}

/** What texts of ONNX Runtime tell of the situation, what to do then, and whether it is one of onnxruntime-web alone. */
const SITUATIONS: readonly (readonly [RegExp, string, boolean])[] = [
  [
    /\bimport\(\) is disallowed|ServiceWorkerGlobalScope/i,
    "A service worker cannot load modules while it runs: import * as ort from \"onnxruntime-web/wasm\" at the top of its script, and pass { ort } to Session.open",
    true,
  ],
  [
    /previous call to|multiple calls to 'init/i,
    "ONNX Runtime could not start before, and tries once in a page: correct what failed then, such as wasmPaths, and load the page again",
    true,
  ],
  [
    /out of memory|bad_alloc|failed to allocate|allocation failed|memory access out of bounds|cannot enlarge memory|\bOOM\b|: \d{4,}$|^\d{4,}$/i,
    "There is not enough memory for it: take a smaller batch, or compile the program with a limit (burnish compile --memory)",
    false,
  ],
  [
    /magic word|fetching of the wasm|\.wasm|dynamically imported module|ort-wasm|failed to fetch|MIME type|no available backend/i,
    "Give wasmPaths, the address where the page serves ort-wasm-simd-threaded* of the same version of onnxruntime-web, ending in / (with " +
      "Vite, exclude onnxruntime-web from optimizeDeps), and load the page again: ONNX Runtime tries once",
    true,
  ],
];

/** The flags of WebGPU's buffers, by its specification. */
const USAGE = { mapRead: 1, copySource: 4, copyTarget: 8, storage: 128 } as const;
const MAP_READ = 1;

let platform: Platform | undefined;

export function usePlatform(chosen: Platform): void {
  platform = chosen;
}

/** Opens graphs with one set of options. */
export class Runtime {
  private constructor(
    readonly ort: OrtModule,
    readonly backend: Backend,
    private readonly options: RuntimeOptions,
  ) {}

  /** Load ONNX Runtime for a backend. */
  static async load(options: RuntimeOptions): Promise<Runtime> {
    const backend = options.backend ?? platform!.defaultBackend;
    if (!BACKENDS.includes(backend)) {
      throw new ConfigurationError(`backend: unknown ${typeof backend === "string" ? `'${backend}'` : shown(backend)}; choose among ${BACKENDS.map((name) => `'${name}'`).join(", ")}`);
    }
    const { threads } = options;
    if (threads !== undefined && (!Number.isInteger(threads) || threads < 1 || threads > MOST_THREADS)) {
      throw new ConfigurationError(`threads=${shown(threads)}: give a whole number from 1 to ${MOST_THREADS}, or leave it out`);
    }
    const { ort: given, sessionOptions, wasmPaths } = options;
    if (given !== undefined && typeof given?.InferenceSession?.create !== "function") {
      throw new ConfigurationError(`ort=${shown(given)}: give the module of onnxruntime-node or onnxruntime-web, as import * as ort gives it`);
    }
    if (sessionOptions !== undefined && !isRecord(sessionOptions)) {
      throw new ConfigurationError(`sessionOptions=${shown(sessionOptions)}: give an object of ONNX Runtime's session options`);
    }
    if (wasmPaths !== undefined && typeof wasmPaths !== "string") {
      throw new ConfigurationError(`wasmPaths=${shown(wasmPaths)}: give the address that serves the .wasm files of onnxruntime-web, ending in /`);
    }
    if (backend === "webgpu" && !(globalThis.navigator as any)?.gpu) {
      throw new EngineError("backend 'webgpu': there is no WebGPU here. Use backend 'wasm', or a browser that has WebGPU, on a page from a secure address");
    }
    const ort = options.ort ?? (await platform!.load(backend));
    if (backend !== "cpu") {
      if (options.wasmPaths !== undefined) ort.env.wasm.wasmPaths = options.wasmPaths;
      if (threads !== undefined) ort.env.wasm.numThreads = threads;
    }
    return new Runtime(ort, backend, options);
  }

  /** Whether values of a dtype stay on a device with memory of its own. Counters and keys, which the host reads, do not. */
  staysOnDevice(dtype: DType): boolean {
    return this.backend === "webgpu" && (dtype === "float32" || dtype === "float16");
  }

  /**
   * Open a graph.
   *
   * @param name of the graph, for errors.
   * @param onDevice outputs that stay on the device, where it has memory of its own.
   */
  async open(name: string, file: GraphFile, onDevice: readonly string[] = []): Promise<InferenceSession> {
    const { backend } = this;
    const options: InferenceSession.SessionOptions = {
      // What starts the state runs once, and draws random numbers of integers.
      executionProviders: [backend === "webgpu" && name === "init" ? "wasm" : backend],
      graphOptimizationLevel: "all",
      enableMemPattern: false,
      logSeverityLevel: 3,
      ...(this.options.threads !== undefined && backend === "cpu" ? { intraOpNumThreads: this.options.threads } : {}),
      ...(backend === "webgpu" && onDevice.length
        ? { preferredOutputLocation: Object.fromEntries(onDevice.map((output) => [output, "gpu-buffer" as const])) }
        : {}),
      ...(file.externalData ? { externalData: [file.externalData] } : {}),
      ...this.options.sessionOptions,
    };
    try {
      return await this.ort.InferenceSession.create(backend === "cpu" && file.path ? file.path : file.bytes, options);
    } catch (error) {
      throw this.failure(name, "cannot be loaded", error);
    }
  }

  /** Run a model without inputs, on the host. */
  async evaluate(model: Uint8Array): Promise<Map<string, Tensor>> {
    try {
      const session = await this.ort.InferenceSession.create(model, { executionProviders: [this.backend === "cpu" ? "cpu" : "wasm"], logSeverityLevel: 3 });
      const outputs = await session.run({});
      const results = new Map<string, Tensor>();
      for (const [output, value] of Object.entries(outputs)) results.set(output, await this.fromOrt(value as OrtTensor));
      await session.release();
      return results;
    } catch (error) {
      throw this.failure("constants", "cannot be run", error);
    }
  }

  /** The error of a graph that ONNX Runtime cannot load or run. */
  failure(name: string, what: string, error: unknown): EngineError | UnsupportedOperatorError {
    const text = messageOf(error).replace(/\s+/g, " ").trim().slice(0, 600);
    const message = `The ${name} graph ${what} by ONNX Runtime (backend '${this.backend}'): ${text}. ${this.remedy(text)}`;
    const lacks = /NOT_IMPLEMENTED|Could not find an implementation|not supported|dilations should be/i.test(text);
    return new (lacks ? UnsupportedOperatorError : EngineError)(message, { cause: error });
  }

  private remedy(text: string): string {
    const found = SITUATIONS.find(([pattern, , isOfWeb]) => pattern.test(text) && !(isOfWeb && this.backend === "cpu"));
    if (found) return found[1];
    if (this.backend === "webgpu") {
      return "Compile the model for it (burnish compile --target webgpu), which lowers or names what WebGPU lacks, or use backend 'wasm'";
    }
    const target = this.backend === "wasm" ? ", or compile the program for it (burnish compile --target web)" : "";
    return `Check that it is of the version that this client was tested with${target}`;
  }

  /** A tensor of ONNX Runtime over the elements of an array. */
  toOrt(tensor: Tensor): OrtTensor {
    if (tensor.dtype === "bfloat16" || tensor.dtype === "string") {
      throw new UnsupportedOperatorError(
        `ONNX Runtime for JavaScript has no tensors of ${tensor.dtype}: compile the program with precision='float32'`,
      );
    }
    const Float16 = (globalThis as any).Float16Array;
    const { data } = tensor;
    const elements = tensor.dtype === "float16" && Float16 ? new Float16(data.buffer, data.byteOffset, data.length) : data;
    return new this.ort.Tensor(tensor.dtype as any, elements as any, tensor.shape);
  }

  /** The same where state lies: on the device, once a graph is open there. */
  toDevice(tensor: Tensor): OrtTensor {
    if (!this.staysOnDevice(tensor.dtype) || tensor.data.length === 0) return this.toOrt(tensor);
    const device = this.ort.env.webgpu.device as GPUDevice;
    const size = Math.ceil(tensor.data.byteLength / 16) * 16;
    const usage = USAGE.storage | USAGE.copySource | USAGE.copyTarget;
    const buffer = device.createBuffer({ size, usage, mappedAtCreation: true });
    new Uint8Array(buffer.getMappedRange()).set(bytesIn(tensor.data));
    buffer.unmap();
    const { dtype, shape: dims } = tensor;
    const download = async () => (await this.downloaded(buffer, tensor)) as any;
    return this.ort.Tensor.fromGpuBuffer(buffer as any, { dataType: dtype as any, dims, dispose: () => buffer.destroy(), download });
  }

  private async downloaded(buffer: GPUBuffer, { dtype, shape, data }: Tensor): Promise<TypedArray> {
    const device = this.ort.env.webgpu.device as GPUDevice;
    const target = device.createBuffer({ size: buffer.size, usage: USAGE.copyTarget | USAGE.mapRead });
    const encoder = device.createCommandEncoder();
    encoder.copyBufferToBuffer(buffer, 0, target, 0, buffer.size);
    device.queue.submit([encoder.finish()]);
    await target.mapAsync(MAP_READ);
    const bytes = new Uint8Array(target.getMappedRange().slice(0, data.byteLength));
    target.destroy();
    return tensorOfBytes(dtype, shape, bytes).data;
  }

  /** A tensor of ONNX Runtime as an array; what lies on a device is copied from there. */
  async fromOrt(value: OrtTensor): Promise<Tensor> {
    const data = (value.location === "cpu" || value.location === "none" ? value.data : await value.getData(false)) as unknown as TypedArray;
    return tensorOfBytes(value.type as DType, value.dims, new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
  }
}
