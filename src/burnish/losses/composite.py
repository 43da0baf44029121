"""A weighted sum of losses, over one output of a model or over several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses.base import Compared, LabelSpec, Loss, Reading, Term
from burnish.losses.registry import get
from burnish.settings import PlainSettings
from burnish.validation import check_number


@dataclass(frozen=True)
class Summand(PlainSettings):
    """One loss of a sum.

    Attributes:
        weight: what it is multiplied by, 0 or more.
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
        """The name of one of its labels: the loss's own name for it, and then the output that it belongs to."""
        return f"{name}:{'+'.join(self.outputs)}" if self.outputs else name


@dataclass(frozen=True)
class WeightedSum(PlainSettings):
    """``sum of weight * loss``. Each loss is averaged by itself, over what it counts, and reported as ``loss:<name>``.

    Where a summand names its output, so are its labels: ``labels:<output>``. Summands that name none read the same output and
    share labels of one name.
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
        """Return the labels of all summands, each name once, with the values that are valid for all that read it.

        Raises:
            ConfigurationError: as each loss, or labels of one name that two losses read as different things.
        """
        specs: dict[str, LabelSpec] = {}
        for summand, read in self._split(predictions):
            for spec in summand.loss.label_specs(read):
                name = summand.label_name(spec.name)
                named = replace(spec, name=name)
                specs[name] = _shared(specs[name], named, summand.loss) if name in specs else named
        return tuple(specs.values())

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        """Emit the terms of every summand."""
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
        """Return what the first loss that has metrics of its own compares, else the first that compares anything."""
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
        """Return a name for each summand: that of its output, else that of its loss; both where one is not unique."""
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
    """Return a label that two losses read; a value is valid where it is so for both."""
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
        losses: ``{output: loss}`` or ``{output: (weight, loss)}``; or a list of ``(weight, loss)``, ``(weight, loss, output)``.
            A loss is whatever ``get`` takes; an output is a name, or several where the loss reads several.

    Raises:
        ConfigurationError: something else, a weight that is negative or no number, or a loss that there is not.
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
