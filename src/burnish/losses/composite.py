"""Losses made of other losses: a weighted sum over outputs, of a resized prediction, of standardized values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses.base import Compared, Extents, LabelSpec, Loss, Reading, Term, Wrapping, floating_shape
from burnish.losses.registry import LossLike, get
from burnish.settings import PlainSettings
from burnish.validation import check_number, is_whole, require


@dataclass(frozen=True)
class Summand(PlainSettings):
    """One loss of a sum.

    Attributes:
        weight: factor of the loss, 0 or more.
        loss: the loss.
        outputs: names of the outputs that it reads; empty leaves that to the loss, or to ``compile``.
    """

    weight: float
    loss: Loss
    outputs: tuple[str, ...] = ()

    @property
    def readings(self) -> tuple[Reading, ...]:
        readings = self.loss.readings
        if not self.outputs:
            return readings
        return tuple(replace(reading, output=name) for reading, name in zip(readings, self.outputs, strict=True))

    def label_name(self, name: str) -> str:
        """The graph's name for one of its labels: the loss's own name, followed by the output."""
        return f"{name}:{'+'.join(self.outputs)}" if self.outputs else name


@dataclass(frozen=True)
class WeightedSum(PlainSettings):
    """``sum of weight * loss``. Each loss is averaged by itself over the elements it counts, and reported as ``loss:<name>``.

    If a summand names its output, its labels are named after it too: ``labels:<output>``. Summands without an output read the
    same one and share labels of the same name.
    """

    name = "weighted_sum"

    summands: tuple[Summand, ...]

    def __post_init__(self) -> None:
        if not self.summands:
            raise ConfigurationError("weighted_sum: there is no loss to sum: give at least one")
        for summand in self.summands:
            check_number(self.name, f"the weight of {summand.loss.name}", summand.weight, minimum=0)
            readings = summand.loss.readings
            if not summand.outputs:
                continue
            if any(reading.output is not None for reading in readings) or not readings:
                raise ConfigurationError(
                    f"weighted_sum: the loss {summand.loss.name} says itself which outputs it reads: leave {summand.outputs} out"
                )
            if len(summand.outputs) != len(readings):
                raise ConfigurationError(
                    f"weighted_sum: the loss {summand.loss.name} reads {len(readings)} outputs, in order: give as many names, "
                    f"not {list(summand.outputs)}"
                )

    @property
    def readings(self) -> tuple[Reading, ...]:
        return tuple(reading for summand in self.summands for reading in summand.readings)

    @property
    def default_metrics(self) -> tuple[str, ...]:
        return self._compared.loss.default_metrics

    def bind(self, outputs: Sequence[str]) -> WeightedSum:
        return WeightedSum(tuple(replace(summand, loss=summand.loss.bind(outputs)) for summand in self.summands))

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        """Return the labels of all summands, each name once, with the values that every reader accepts.

        Raises:
            ConfigurationError: a loss rejects its predictions, or two losses read labels of one name as different things.
        """
        specs: dict[str, LabelSpec] = {}
        for summand, read in self._split(predictions):
            for spec in summand.loss.label_specs(read):
                name = summand.label_name(spec.name)
                named = replace(spec, name=name)
                specs[name] = _shared(specs[name], named, summand.loss) if name in specs else named
        return tuple(specs.values())

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        by_name = self._labels(predictions, labels)
        names = iter(self._term_names())
        terms = []
        for summand, read in self._split(predictions):
            name = next(names)
            summand_labels = [by_name[summand.label_name(spec.name)] for spec in summand.loss.label_specs(read)]
            for term in summand.loss.terms(read, summand_labels):
                nested = f"{name}:{term.name}" if term.name else name
                terms.append(term._replace(coefficient=summand.weight * term.coefficient, name=nested))
        return tuple(terms)

    def compared(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> Compared | None:
        """Return the input of the metrics from the first loss with default metrics, otherwise from the first loss."""
        by_name = self._labels(predictions, labels)
        for summand, read in self._split(predictions):
            if summand is self._compared:
                summand_labels = [by_name[summand.label_name(spec.name)] for spec in summand.loss.label_specs(read)]
                return summand.loss.compared(read, summand_labels)
        return None

    def options(self) -> dict[str, Any]:
        summands = [
            {"weight": summand.weight, "loss": summand.loss.options(), "outputs": list(summand.outputs)}
            for summand in self.summands
        ]
        return {"name": self.name, "losses": summands}

    @property
    def _compared(self) -> Summand:
        return next((summand for summand in self.summands if summand.loss.default_metrics), self.summands[0])

    def _split(self, predictions: Sequence[Tensor]) -> Iterator[tuple[Summand, list[Tensor]]]:
        remaining = iter(predictions)
        for summand in self.summands:
            yield summand, [next(remaining) for _ in summand.readings]

    def _labels(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> dict[str, Tensor]:
        return {spec.name: label for spec, label in zip(self.label_specs(predictions), labels, strict=True)}

    def _term_names(self) -> list[str]:
        """Return a name for each summand: its output, or its loss without one; both if that is not unique."""
        short = ["+".join(summand.outputs) or summand.loss.name for summand in self.summands]
        repeated = Counter(short)
        names = [
            f"{name}:{summand.loss.name}" if repeated[name] > 1 and summand.outputs else name
            for name, summand in zip(short, self.summands, strict=True)
        ]
        repeated = Counter(names)
        seen: Counter[str] = Counter()
        numbered = []
        for name in names:
            seen[name] += 1
            numbered.append(f"{name}:{seen[name]}" if repeated[name] > 1 else name)
        return numbered


def _shared(left: LabelSpec, right: LabelSpec, loss: Loss) -> LabelSpec:
    """Return the spec of a label that two losses read, with only the values that are valid for both."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        raise ConfigurationError(
            f"weighted_sum: the loss {loss.name} reads '{left.name}' as {_described(right)}, and another as {_described(left)}: "
            "give each the name of its output, so that each has labels of its own"
        )
    lower = [bound for bound in (left.minimum, right.minimum) if bound is not None]
    upper = [bound for bound in (left.maximum, right.maximum) if bound is not None]
    return replace(
        left,
        minimum=max(lower, default=None),
        maximum=min(upper, default=None),
        ignored=left.ignored if left.ignored == right.ignored else None,
    )


def _described(spec: LabelSpec) -> str:
    return f"{ir.DataType(spec.dtype).name} of shape {list(spec.shape)}"


def weighted_sum(losses: Mapping[str, Any] | Iterable[Any]) -> WeightedSum:
    """Return the weighted sum of losses.

    Args:
        losses: ``{output: loss}`` or ``{output: (weight, loss)}``; or a list of ``(weight, loss)``, ``(weight, loss, output)``. A
            loss is anything that ``get`` takes. An output is a name, or several names if the loss reads several.

    Raises:
        ConfigurationError: another kind of argument, a negative or non-numeric weight, or an unknown loss.
    """
    if isinstance(losses, Mapping):
        pairs = ((loss if isinstance(loss, tuple | list) else (1.0, loss), output) for output, loss in losses.items())
        return WeightedSum(tuple(_summand((*pair, output)) for pair, output in pairs))
    if isinstance(losses, str) or not isinstance(losses, Iterable):
        raise ConfigurationError(
            f"weighted_sum: give {{output: (weight, loss)}} or a list of (weight, loss, output), not {losses!r}"
        )
    return WeightedSum(tuple(_summand(entry) for entry in losses))


def _summand(entry: Any) -> Summand:
    if isinstance(entry, Summand):
        return entry
    if isinstance(entry, Mapping) and entry.keys() == {"weight", "loss", "outputs"}:
        entry = (entry["weight"], entry["loss"], entry["outputs"])
    if not isinstance(entry, tuple | list) or len(entry) not in (2, 3):
        raise ConfigurationError(f"weighted_sum: a summand is (weight, loss) or (weight, loss, output), not {entry!r}")
    weight, loss, outputs = (*entry, ())[:3]
    if outputs is not None and not isinstance(outputs, str | tuple | list):
        raise ConfigurationError(f"weighted_sum: an output is the name of one, not {outputs!r}")
    names = (outputs,) if isinstance(outputs, str) else tuple(outputs or ())
    if not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"weighted_sum: an output is the name of one, not {outputs!r}")
    return Summand(check_number("weighted_sum", f"the weight of {loss!r}", weight, minimum=0), get(loss), names)


Interpolation = Literal["linear", "nearest", "cubic"]
PLANE = 2
"""Number of axes for height and width, the last of a prediction ``[N, C, height, width]``."""


@dataclass(frozen=True, kw_only=True)
class Resized(Wrapping):
    """Another loss of the prediction ``[N, C, height, width]``, resized to the labels first.

    Segmentation models often output an eighth of a picture's height and width, but are trained at full size. The resizing is that
    of ``torch.nn.functional.interpolate(mode="bilinear", align_corners=False)``. Metrics read the resized prediction too; the
    exported model still returns the small one.

    Attributes:
        loss: loss of one prediction and one label whose last two axes are height and width.
        size: height and width of the labels; None resizes each batch to its own labels.
        interpolation: ``linear``, ``nearest`` or ``cubic``.
    """

    name = "resized"

    size: tuple[int, int] | None = None
    interpolation: Interpolation = "linear"

    def __post_init__(self) -> None:
        is_known = self.interpolation in get_args(Interpolation)
        require(is_known, self.name, "interpolation", self.interpolation, "'linear', 'nearest' or 'cubic'")
        if len(self.loss.readings) != 1:
            raise ConfigurationError(
                f"{self.name}: the loss {self.loss.name} reads {len(self.loss.readings)} outputs, and one prediction is resized: "
                "give a loss that reads one, such as cross_entropy or dice"
            )
        if getattr(self.loss, "class_axis", 1) != 1:
            raise ConfigurationError(f"{self.name}: the classes of {self.loss.name} must be along axis 1: leave class_axis out")
        if self.size is None:
            return
        sides = tuple(self.size) if isinstance(self.size, Sequence) and not isinstance(self.size, str) else ()
        if len(sides) != PLANE or not all(is_whole(side) and side > 0 for side in sides):
            raise ConfigurationError(f"{self.name}: size must be the height and the width of the labels, not {self.size!r}")
        object.__setattr__(self, "size", sides)

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        shape = floating_shape(self.name, predictions[0])
        if len(shape) != 4:
            raise ConfigurationError(
                f"{self.name}: the prediction '{predictions[0].name}' has shape {list(shape)}, and what is resized is "
                "[batch, classes, height, width]: name another output (outputs=...)"
            )
        specs = self.loss.label_specs(predictions)
        if len(specs) != 1 or specs[0].shape[-PLANE:] != shape[-PLANE:]:
            raise ConfigurationError(
                f"{self.name}: the labels of {self.loss.name} do not have the height and width of the prediction: give a loss "
                "of each position, such as cross_entropy or dice"
            )
        sides: Extents = self.size or ("label_height", "label_width")
        return tuple(replace(spec, shape=(*spec.shape[:-PLANE], *sides)) for spec in specs)

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        self.label_specs(predictions)
        return self.loss.terms([self._resized(predictions[0], labels[0])], labels)

    def compared(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> Compared | None:
        return self.loss.compared([self._resized(predictions[0], labels[0])], labels)

    def _resized(self, prediction: Tensor, label: Tensor) -> Tensor:
        builder = prediction.builder

        def emit() -> Tensor:
            assert label.rank is not None
            outer = builder.op("Shape", prediction, start=0, end=PLANE)
            sides = builder.op("Shape", label, start=label.rank - PLANE)
            sizes = builder.op("Concat", outer, sides, axis=0)
            assert prediction.shape is not None
            assert label.shape is not None
            dims = [*prediction.shape.dims[:PLANE], *label.shape.dims[-PLANE:]]
            how: dict[str, Any] = {"mode": self.interpolation, "coordinate_transformation_mode": "half_pixel"}
            if self.interpolation == "nearest":
                how |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
            return builder.op("Resize", prediction, None, None, sizes, shape=ir.Shape(dims), dtype=prediction.dtype, **how)

        return builder.once((type(self), self.interpolation, prediction.value, label.value), emit)


def resized(loss: LossLike, size: Sequence[int] | None = None, interpolation: Interpolation = "linear") -> Resized:
    """Return a loss of a prediction resized to its labels; see ``Resized``.

    Args:
        loss: anything that ``get`` takes, such as ``"cross_entropy"``.
        size: height and width of the labels; None leaves them open.
        interpolation: ``linear``, ``nearest`` or ``cubic``.
    """
    return Resized(loss=get(loss), size=None if size is None else tuple(size), interpolation=interpolation)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Standardized(Wrapping):
    """Another loss in units of the targets' standard deviation: of ``(x - mean) / std`` of prediction and target.

    The model's predictions, the data and the metrics keep their own units; the loss and its gradients are as large as for
    standardized targets.

    Attributes:
        loss: loss of one prediction and one target of its shape, such as ``mse`` or ``huber``.
        mean, std: of the targets, one number for each along their last axis, or one for all.
    """

    name = "standardized"

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.loss.readings) != 1 or self.loss.readings[0].activation is not None:
            raise ConfigurationError(
                f"{self.name}: targets are standardized for a loss of values, and {self.loss.name} is another: give one such as "
                "mse or huber"
            )
        for option in ("mean", "std"):
            given = getattr(self, option)
            numbers = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
            for number in numbers:
                check_number(self.name, option, number, **({"above": 0} if option == "std" else {}))
            object.__setattr__(self, option, tuple(map(float, numbers)))
        if len(self.mean) != len(self.std):
            raise ConfigurationError(f"{self.name}: {len(self.mean)} means and {len(self.std)} standard deviations: give as many")

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        specs = self.loss.label_specs(predictions)
        width = predictions[0].dimension(-1) if predictions[0].rank else None
        if len(self.mean) > 1 and width not in (None, len(self.mean)):
            raise ConfigurationError(
                f"{self.name}: the prediction '{predictions[0].name}' has {width} values, and there are {len(self.mean)} means: "
                "give one for each"
            )
        return specs

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        self.label_specs(predictions)
        return self.loss.terms([self._scaled(predictions[0])], [self._scaled(labels[0])])

    def compared(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> Compared | None:
        return self.loss.compared(predictions, labels)

    def _scaled(self, values: Tensor) -> Tensor:
        builder, dtype = values.builder, values.dtype.numpy()
        mean, std = (np.asarray(each if len(each) > 1 else each[0], dtype) for each in (self.mean, self.std))
        return (values - builder.constant(mean)) / builder.constant(std)


def standardized(loss: LossLike = "mse", *, mean: Sequence[float], std: Sequence[float]) -> Standardized:
    """Return a loss in units of the targets' standard deviation; see ``Standardized``.

    Args:
        loss: anything that ``get`` takes.
        mean, std: mean and standard deviation of each target.
    """
    return Standardized(loss=get(loss), mean=tuple(mean), std=tuple(std))
