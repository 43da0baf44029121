"""The last part of a fine-tuning run that ends in integers: the tuned model is quantized, calibrated, and trained as such."""

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
"""Settings of ``Quantization`` itself; all others are of ``burnish.surgery.quantize``."""
SHORT: dict[str, dict[str, Any]] = {
    "int8": {"weights": "int8 per channel"},
    "int4": {"weights": "int4 per channel", "first_and_last": "int8"},
}
"""What a name alone asks for."""
RATES = {8: 0.1, 4: 0.3}
"""The learning rate of the quantized model, in that of the run, by bits of its weights: these were tuned already. Weights with a
single scale have batch normalization folded into them, which then holds no layer in its range. That bounds the rate, whatever the
bits: on pictures of training digits alone a MobileNetV2 whose normalization is folded diverges at 0.3 in float32 as it does in 4
bits, and trains at 0.1 in both. So they take the rate of 8 bits."""
PARTS = {8: 3, 4: 1}
"""The quantized model trains for this part of the epochs before, rounded up. Four bits take weights far from where they were:
Esser et al. (2020) train one epoch for eight bits, and as long as for float32, ten times as fast, for fewer."""
DISTILLED, TEMPERATURE = 0.9, 4.0
"""What the tuned model says of the classes has this part of the loss, at this temperature, and the labels the rest (Hinton et al.
2015): integers are to compute what it computes, and its probabilities say more of that than a label. Mishra and Marr (2017) train
networks of few bits so."""
LINEAR_ENDS = ("Gemm", "MatMul", "Conv", "Add")
SAMPLES = 256
"""Calibrated on so many at most."""


@dataclass(frozen=True)
class Quantization:
    """How a tuned model becomes one of integers.

    Attributes:
        options: of ``burnish.surgery.quantize``.
        epochs: for which it trains quantized; None: with weights of 8 bits a third of the run's, rounded up, of 4 as many.
        rate: its learning rate, as a factor of the run's.
        distill: which part of its loss is what the tuned model says, from 0 to 1; None: ``DISTILLED``, where the loss is one of
            classes, and no samples are mixed.
    """

    options: Mapping[str, Any]
    epochs: int | None
    rate: float
    distill: float | None = None

    @classmethod
    def read(cls, asked: str | Mapping[str, Any]) -> Quantization:
        """Return what is asked for.

        Args:
            asked: ``int8``, ``int4``, or one of them with settings of ``burnish.surgery.quantize`` or of this class after a
                colon, ``int8:method=entropy,epochs=2``; or these settings.

        Raises:
            ConfigurationError: there is no such form, or a setting does not fit.
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
        """Return the quantized form of a tuned model, calibrated on samples that are spread evenly over a data set.

        Args:
            tuned: the ONNX file, with batch normalization as it was trained.
            dataset: that it was trained on.
            output: with the classes. Behind a Softmax or a Sigmoid it stays in float32, so that the loss finds the logits.
            batch_size: of the calibration.
            engine: runs the model.
        """
        model = load(tuned)
        find_sample_axes(model.graph)
        produced = next(value for value in model.graph.outputs if value.name == output).producer()
        # Values in their own units stay in floating point: 256 of them would be all that the model can give.
        ends_linear = not OUTPUT_SCALE.is_on(model) and produced is not None and produced.op_type in LINEAR_ENDS
        if self.options.get("activations", "uint8") is None:
            return quantize(model, **self.options)
        batches, _ = calibration_batches(dataset, SAMPLES, batch_size, moved_inputs(model.graph))
        given = {"quantize_outputs": ends_linear, **self.options}
        return quantize(model, calibration=batches, engine=engine, **given)

    def objective(self, loss: losses.Loss, tuned: str | Path, outputs: str | Sequence[str]) -> losses.Loss:
        """Return what the quantized model learns: for classes, what the tuned model says of them beside the labels.

        Args:
            loss: of the run.
            tuned: the tuned model in float32, a file.
            outputs: what the loss reads.

        Raises:
            ConfigurationError: ``distill`` was asked for, and the loss reads no classes, or mixes samples.
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
        """Return for how many epochs the quantized model trains, after so many before."""
        return -(-epochs // PARTS[weight_format(self.options["weights"], True).bits]) if self.epochs is None else self.epochs


def figure_of(model: str | Path, metric: str, dataset: Dataset, batch_size: int, engine: str | Engine = "auto") -> float:
    """Return a figure of a file, with its objective in its metadata, over a data set."""
    opened = open_model(model, metrics=(metric,), engine=engine)
    return float(opened.evaluate(dataset, batch_size)[metric])


def accuracies_line(figures: Mapping[str, float], metric: str, data: str) -> str:
    """Return a line that says what quantization cost and what training brought back.

    Args:
        figures: ``float32``, ``quantized_after_training``, ``quantized_in_training``.
        metric: what they are.
        data: which these are of.
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
    """Return batches of samples spread evenly over a data set, and how many samples they are.

    Args:
        dataset: what is read.
        samples: how many at most.
        size: of a batch; what is left over is left out, where there is more than one.
        axes: along which the model has the samples of an input, where that is another than the first.
    """
    count = min(samples, len(dataset))
    count = max(count - count % size, min(size, count))
    chosen = np.linspace(0, len(dataset) - 1, count).astype(np.int64)

    def each() -> Iterator[Mapping[str, np.ndarray]]:
        for start in range(0, count, size):
            yield to_model(dataset.batch(chosen[start : start + size]), axes or {})

    return list(each()), count
