/** The features of a frozen backbone, kept by sample: in a second epoch the backbone does not run. */

import type { Batch } from "./batch.js";
import { ConfigurationError, InputError } from "./errors.js";
import { checkOptions, shown } from "./options.js";
import { FEATURES, type Signature } from "./signature.js";
import { emptyTensor, sizeOf, type Tensor } from "./tensor.js";

/** What computes features: a `Session`, or a `WorkerSession`. */
export interface ComputesFeatures {
  features(batch: Batch): Promise<Record<string, Tensor>>;
  readonly signature?: Signature;
  readonly program?: { readonly signature: Signature };
}

/** The inputs of the model for these samples, in their order; it is asked for those alone whose features are not kept. */
export type LoadSamples = (samples: number[]) => Batch | Promise<Batch>;

type Features = Record<string, Tensor>;

/**
 * Keeps features in memory, by the number of the sample.
 *
 * Where the memory is full the features that are there stay, and others are computed each time: data that are gone through again and
 * again would push every sample out before it comes back.
 */
export class FeatureCache {
  /** How many samples the backbone has run for. */
  computed = 0;
  /** Bytes of features that are kept. */
  bytes = 0;
  private readonly kept = new Map<number, Features>();
  private readonly limit: number;

  /**
   * @param session of a program that was compiled with `cached_features`.
   * @param options.limit the most bytes of features to keep.
   * @throws ConfigurationError where the limit is no number of bytes, or a feature has its samples along another axis than the first.
   */
  constructor(
    private readonly session: ComputesFeatures,
    options: { limit?: number } = {},
  ) {
    checkOptions("FeatureCache", options, ["limit"]);
    const { limit = DEFAULT_LIMIT } = options;
    if (typeof limit !== "number" || !(limit >= 0)) throw new ConfigurationError(`limit=${shown(limit)}: give a number of bytes`);
    this.limit = limit;
    const outputs = (session.signature ?? session.program?.signature)?.[FEATURES]?.outputs ?? [];
    const other = outputs.find(({ sample_axis: axis }) => axis !== undefined && axis !== 0);
    if (other !== undefined) {
      throw new ConfigurationError(
        `The feature '${other.name}' has ${other.sample_axis === null ? "no samples" : `its samples along axis ${String(other.sample_axis)}`}, and a cache keeps samples of the first: call session.features for each batch, or export the model with its samples first`,
      );
    }
  }

  /** How many samples' features are kept. */
  get size(): number {
    return this.kept.size;
  }

  /** Whether the features of a sample are kept. */
  has(sample: number): boolean {
    return this.kept.has(sample);
  }

  /** Let go of everything, as for other data. */
  clear(): void {
    this.kept.clear();
    this.bytes = 0;
  }

  /**
   * The features of samples, by name, as `step` and `evaluate` take them beside the labels.
   *
   * @param samples the number of each sample, from 0, the same in every epoch.
   * @param load gives the model's inputs of the samples that it is asked for.
   * @throws InputError where a number is none, or what `load` gives does not fit; ConfigurationError as `Session.features`.
   */
  async features(samples: readonly number[], load: LoadSamples): Promise<Features> {
    const other = samples.find((sample) => !Number.isSafeInteger(sample) || sample < 0);
    if (other !== undefined || !samples.length) {
      throw new InputError(`samples: ${samples.length ? String(other) : "none"}; give the number of each sample of the batch, from 0`);
    }
    const missing = [...new Set(samples)].filter((sample) => !this.kept.has(sample));
    const fresh = new Map<number, Features>();
    if (missing.length) {
      const rows = rowsOf(await this.session.features(await load([...missing])), missing.length);
      missing.forEach((sample, index) => fresh.set(sample, rows[index]!));
      this.computed += missing.length;
      this.keep(fresh);
    }
    return joined(samples.map((sample) => fresh.get(sample) ?? this.kept.get(sample)!));
  }

  private keep(fresh: ReadonlyMap<number, Features>): void {
    for (const [sample, features] of fresh) {
      const bytes = Object.values(features).reduce((total, { data }) => total + data.byteLength, 0);
      if (this.kept.has(sample) || this.bytes + bytes > this.limit) continue;
      this.kept.set(sample, features);
      this.bytes += bytes;
    }
  }
}

/** As much as Python keeps in memory before it takes a file. */
const DEFAULT_LIMIT = 256 * 2 ** 20;

/** The features of each sample of a batch, in arrays of their own. */
function rowsOf(features: Features, count: number): Features[] {
  const rows: Features[] = Array.from({ length: count }, () => ({}));
  for (const [name, { dtype, shape, data }] of Object.entries(features)) {
    if (shape[0] !== count) {
      throw new InputError(`The feature '${name}' has shape [${shape.join(", ")}] for ${count} samples: give the inputs of exactly the samples that load is asked for`);
    }
    const rest = shape.slice(1);
    const size = sizeOf(rest);
    rows.forEach((row, index) => (row[name] = { dtype, shape: rest, data: data.slice(index * size, (index + 1) * size) }));
  }
  return rows;
}

/** A batch of the features of samples. */
function joined(rows: readonly Features[]): Features {
  const features: Features = {};
  for (const [name, { dtype, shape }] of Object.entries(rows[0]!)) {
    const whole = emptyTensor(dtype, [rows.length, ...shape]);
    const size = sizeOf(shape);
    rows.forEach((row, index) => {
      const { shape: own, data } = row[name]!;
      if (own.join() !== shape.join()) {
        throw new InputError(
          `The feature '${name}' has shape [${shape.join(", ")}] for one sample and [${own.join(", ")}] for another: put samples of one shape into a batch`,
        );
      }
      whole.data.set(data as any, index * size);
    });
    features[name] = whole;
  }
  return features;
}
