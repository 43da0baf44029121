"""Quantized training at the end of a fine-tuning run: the tuned model is quantized, calibrated, and trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish import losses
from burnish.data import Dataset
from burnish.engines import Engine
from burnish.errors import ConfigurationError
from burnish.graph.annotations import OUTPUT_SCALE
from burnish.importer import load
from burnish.losses.distillation import reads_classes
from burnish.losses.mixed import Mixed
from burnish.metrics import higher_is_better
from burnish.program.layout import Axes, to_model
from burnish.quantization.calibration import check_method
from burnish.quantization.formats import activation_format, weight_format
from burnish.sample_axes import find_sample_axes, moved_inputs
from burnish.settings import check_settings, read_settings, suggestion
from burnish.surgery import quantize
from burnish.training.trained_model import open_model
from burnish.validation import is_number, is_whole

OWN = ("epochs", "rate", "distill")
"""Settings of ``Quantization``; all others belong to ``burnish.surgery.quantize``."""
SHORT: dict[str, dict[str, Any]] = {
    "int8": {"weights": "int8 per channel"},
    "int4": {"weights": "int4 per channel", "first_and_last": "int8"},
}
"""Settings of each short name."""
RATES = {8: 0.1, 4: 0.3}
"""Learning rate of the quantized model as a factor of the run's, by bits of its weights: these are tuned already. Weights with a
single scale have batch normalization folded into them, so it no longer keeps layers in range. That bounds the rate with any bits:
on images of training digits a MobileNetV2 with folded normalization diverges at 0.3 both in float32 and in 4 bits, and trains at
0.1 in both. So they use the rate of 8 bits."""
PARTS = {8: 3, 4: 1}
"""The quantized model trains for the epochs divided by this, rounded up. Four bits move weights far: Esser et al. (2020) train
one epoch for eight bits, and for fewer as long as for float32, ten times as fast."""
DISTILLED, TEMPERATURE = 0.9, 4.0
"""Weight of the tuned model's class probabilities in the loss, and their temperature; labels have the rest (Hinton et al. 2015).
The quantized model is to compute the same as the tuned one, and probabilities tell more about that than labels. Mishra and Marr
(2017) train networks of few bits so."""
LINEAR_ENDS = ("Gemm", "MatMul", "Conv", "Add")
SAMPLES = 256
"""Most samples for calibration."""


@dataclass(frozen=True)
class Quantization:
    """The quantization of a tuned model.

    Attributes:
        options: options of ``burnish.surgery.quantize``.
        epochs: epochs of quantized training; None: a third of the run's, rounded up, for 8-bit weights, and as many for 4 bits.
        rate: learning rate as a factor of the run's.
        distill: weight of the tuned model's outputs in the loss, from 0 to 1; None: ``DISTILLED`` for a loss of classes without
            mixed samples, else 0.
    """

    options: Mapping[str, Any]
    epochs: int | None
    rate: float
    distill: float | None = None

    @classmethod
    def read(cls, asked: str | Mapping[str, Any]) -> Quantization:
        """Return the quantization for an option.

        Args:
            asked: ``int8``, ``int4``, or one of them with settings of ``burnish.surgery.quantize`` or of this class after a
                colon, ``int8:method=entropy,epochs=2``; or these settings.

        Raises:
            ConfigurationError: the form is unknown, or a setting does not fit.
        """
        if isinstance(asked, str):
            name, settings = read_settings("quantize", asked)
            if name not in SHORT:
                raise ConfigurationError(
                    f"quantize='{name}': there is no such form{suggestion(name, SHORT)}: give int8 or int4, with settings behind "
                    "a colon where needed, such as int8:epochs=2"
                )
            settings = {**SHORT[name], **settings}
        else:
            settings = {**SHORT["int8"], **asked}
        own = {name: settings.pop(name) for name in OWN if name in settings}
        for name in ("source", "calibration", "engine"):
            if name in settings:
                raise ConfigurationError(f"quantize: {name} is the run's own: leave it out")
        check_settings("quantize", quantize, {"source": ..., **settings})
        kind = weight_format(settings["weights"], settings.get("reduce_range", True))
        is_folded = settings.get("batch_norm") == "fold" or not kind.keeps_sign
        activation_format(settings.get("activations", "uint8"), settings.get("symmetric", False))
        check_method(settings.get("method", "minmax"), settings.get("percentile", 99.99))
        epochs, rate = own.get("epochs"), own.get("rate", RATES[8 if is_folded else kind.bits])
        if epochs is not None and (not is_whole(epochs) or epochs < 1):
            raise ConfigurationError(f"quantize: epochs={epochs!r}: give a whole number of 1 or more, of training with integers")
        if not is_number(rate) or rate <= 0:
            raise ConfigurationError(f"quantize: rate={rate!r}: give a factor of the learning rate above 0, such as {RATES[8]:g}")
        distill = own.get("distill")
        if distill is not None and not (is_number(distill) and 0 <= distill <= 1):
            raise ConfigurationError(
                f"quantize: distill={distill!r}: give the part of the loss that is what the tuned model says, from 0 to 1, such "
                f"as {DISTILLED:g}"
            )
        return cls(settings, epochs, float(rate), None if distill is None else float(distill))

    def applied(
        self, tuned: str | Path, dataset: Dataset, output: str, batch_size: int, engine: str | Engine = "auto"
    ) -> ir.Model:
        """Return the quantized form of a tuned model, calibrated on samples spread evenly over a data set.

        Args:
            tuned: ONNX file, with batch normalization as trained.
            dataset: data that it was trained on.
            output: output with the classes. After a Softmax or Sigmoid it stays in float32, so that the loss finds the logits.
            batch_size: batch size of the calibration.
            engine: engine that runs the model.
        """
        model = load(tuned)
        find_sample_axes(model.graph)
        produced = next(value for value in model.graph.outputs if value.name == output).producer()
        # Values in their own units stay in floating point: otherwise the model could give only 256 different ones.
        ends_linear = not OUTPUT_SCALE.is_on(model) and produced is not None and produced.op_type in LINEAR_ENDS
        if self.options.get("activations", "uint8") is None:
            return quantize(model, **self.options)
        batches, _ = calibration_batches(dataset, SAMPLES, batch_size, moved_inputs(model.graph))
        given = {"quantize_outputs": ends_linear, **self.options}
        return quantize(model, calibration=batches, engine=engine, **given)

    def objective(self, loss: losses.Loss, tuned: str | Path, outputs: str | Sequence[str]) -> losses.Loss:
        """Return the loss of the quantized model; for classes, it adds the tuned model's probabilities to the labels.

        Args:
            loss: loss of the run.
            tuned: file of the tuned model in float32.
            outputs: values that the loss reads.

        Raises:
            ConfigurationError: ``distill`` is set, but the loss reads no classes, or mixes samples.
        """
        part = self.distill
        if part is None:
            part = DISTILLED if reads_classes(loss) and not isinstance(loss, Mixed) else 0.0
        if part == 0:
            return loss
        if isinstance(loss, Mixed):
            raise ConfigurationError(
                "quantize: distill: the tuned model says nothing of mixed samples: leave distill out, or MixUp and CutMix "
                "(augment)"
            )
        output = outputs if isinstance(outputs, str) else next(iter(outputs), None)
        return losses.distill(tuned, temperature=TEMPERATURE, alpha=part, loss=loss, teacher_output=output)

    def length(self, epochs: int) -> int:
        """Return the epochs of quantized training after so many epochs of tuning."""
        return -(-epochs // PARTS[weight_format(self.options["weights"], True).bits]) if self.epochs is None else self.epochs


def figure_of(model: str | Path, metric: str, dataset: Dataset, batch_size: int, engine: str | Engine = "auto") -> float:
    """Return a metric of a file, with its objective in the metadata, over a data set."""
    opened = open_model(model, metrics=(metric,), engine=engine)
    return float(opened.evaluate(dataset, batch_size)[metric])


def accuracies_line(figures: Mapping[str, float], metric: str, data: str) -> str:
    """Return a line with the cost of quantization and the gain of training.

    Args:
        figures: ``float32``, ``quantized_after_training``, ``quantized_in_training``.
        metric: name of the metric.
        data: name of the data.
    """
    is_share = higher_is_better(metric)
    before, after, trained = (f"{100 * value:.2f} %" if is_share else f"{value:.4g}" for value in figures.values())
    return (
        f"quantization: {metric} {before} in float32, {after} quantized after training, {trained} quantized in training "
        f"({data} data)"
    )


def calibration_batches(
    dataset: Dataset, samples: int, size: int, axes: Axes | None = None
) -> tuple[list[Mapping[str, np.ndarray]], int]:
    """Return batches of samples spread evenly over a data set, and their number of samples.

    Args:
        dataset: data to read.
        samples: most samples.
        size: batch size; a partial batch is left out if there are others.
        axes: sample axes of the model's inputs that are not the first.
    """
    count = min(samples, len(dataset))
    count = max(count - count % size, min(size, count))
    chosen = np.linspace(0, len(dataset) - 1, count).astype(np.int64)

    def each() -> Iterator[Mapping[str, np.ndarray]]:
        for start in range(0, count, size):
            yield to_model(dataset.batch(chosen[start : start + size]), axes or {})

    return list(each()), count
