/** What sessions do in many calls: train on batches, and evaluate on them. */

import type { Batch } from "./batch.js";
import { ConfigurationError, InputError } from "./errors.js";
import { checkOptions, shown } from "./options.js";
import { combined, exactSum, type Totals } from "./totals.js";

/** The loss, the metrics and, where the program computes it, the learning rate of a step; by name. */
export type Figures = Record<string, number>;

/** What `train` gives after each step, and what the event `step` has as its `detail`. */
export interface StepReport {
  epoch: number;
  /** The number of steps that the state has taken. */
  step: number;
  figures: Figures;
}

export type Batches = Iterable<Batch> | AsyncIterable<Batch>;

/** Options of `train`. */
export interface TrainOptions {
  epochs?: number;
  /** Of each step, such as `{lr: 0.01}`. */
  hyperparameters?: Readonly<Record<string, number>>;
}

/** A session, here or in a worker. */
export abstract class Trains extends EventTarget {
  protected epoch = 1;

  /** How many steps the state has taken. */
  abstract readonly stepCount: number;

  /**
   * Run one training step.
   *
   * @param batch the model's inputs and the labels, by name.
   * @param hyperparameters such as `{lr: 0.01}`: for this step, in place of the program's.
   * @returns the loss and the metrics of this batch, from before the update.
   * @throws InputError, ConfigurationError: nothing has run. NonFiniteLossError: the state is the one from before the step.
   */
  abstract step(batch: Batch, hyperparameters?: Readonly<Record<string, number>>): Promise<Figures>;

  /** The totals of one batch. Added over batches or clients, they tell the figures of all of them. */
  abstract evaluateTotals(batch: Batch, parameters?: "average"): Promise<Totals>;

  protected abstract readonly lossTerms: Readonly<Record<string, number>>;

  override addEventListener(type: "step", listener: (event: CustomEvent<StepReport>) => void, options?: AddEventListenerOptions | boolean): void;
  override addEventListener(type: string, listener: EventListenerOrEventListenerObject | null, options?: AddEventListenerOptions | boolean): void;
  override addEventListener(type: string, listener: any, options?: AddEventListenerOptions | boolean): void {
    super.addEventListener(type, listener, options);
  }

  /**
   * Train on batches, epoch after epoch, and give a report after each step.
   *
   * @param batches the batches of an epoch, or a function that gives those of an epoch by its number, from 1.
   * @throws ConfigurationError for an option that it does not have; while it runs, as `step`.
   */
  train(batches: Batches | ((epoch: number) => Batches), options: TrainOptions = {}): AsyncGenerator<StepReport> {
    const remedies = { lr: "a rate goes into hyperparameters, as { hyperparameters: { lr: 0.01 } }" };
    checkOptions("train", options, ["epochs", "hyperparameters"], remedies);
    const { epochs = 1, hyperparameters = {} } = options;
    if (!Number.isSafeInteger(epochs) || epochs < 1) throw new ConfigurationError(`epochs=${shown(epochs)}: give a whole number of at least one`);
    return this.epochs(batches, epochs, hyperparameters);
  }

  private async *epochs(
    batches: Batches | ((epoch: number) => Batches), epochs: number, hyperparameters: Readonly<Record<string, number>>,
  ): AsyncGenerator<StepReport> {
    for (let epoch = 1; epoch <= epochs; epoch++) {
      let count = 0;
      for await (const batch of iterable(typeof batches === "function" ? batches(epoch) : batches)) {
        this.epoch = epoch;
        const figures = await this.step(batch, hyperparameters);
        count++;
        yield { epoch, step: this.stepCount, figures };
      }
      if (count === 0) throw new InputError(`There is no batch to train on in epoch ${epoch}: the data set is empty, or its iterator was already used up`);
    }
  }

  /** The loss and the metrics over many batches, of any sizes, from totals over all their samples. */
  async evaluateData(batches: Batches, parameters?: "average"): Promise<Figures> {
    const totals: Totals[] = [];
    for await (const batch of iterable(batches)) totals.push(await this.evaluateTotals(batch, parameters));
    if (!totals.length) throw new InputError("There is no batch to evaluate: the data set is empty, or its iterator was already used up");
    return combined(exactSum(totals), this.lossTerms);
  }

  protected report(figures: Figures): void {
    this.dispatchEvent(new CustomEvent<StepReport>("step", { detail: { epoch: this.epoch, step: this.stepCount, figures } }));
  }
}

function iterable(batches: Batches): Batches {
  if (typeof batches === "object" && batches !== null && (Symbol.iterator in batches || Symbol.asyncIterator in batches)) return batches;
  throw new InputError(`The batches are ${shown(batches)}: give an iterable of batches, such as a list`);
}
