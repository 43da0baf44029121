"""A loss that reads a smaller, or larger, prediction than its labels are: the prediction is resized to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses.base import Compared, Extents, LabelSpec, Term, Wrapping, floating_shape
from burnish.losses.registry import LossLike, get
from burnish.validation import is_whole, require

Interpolation = Literal["linear", "nearest", "cubic"]
PLANE = 2
"""Axes of the height and the width of a prediction ``[N, C, height, width]``, counted from the end."""


@dataclass(frozen=True, kw_only=True)
class Resized(Wrapping):
    """Another loss of the prediction ``[N, C, height, width]``, which is resized to the labels first.

    Segmentation models often give an eighth of the height and width of a picture, and are trained at full size. Resized as
    ``torch.nn.functional.interpolate(mode="bilinear", align_corners=False)`` does it. Metrics read the resized prediction too;
    the model that is exported stays as it was, and gives the small one.

    Attributes:
        loss: of one prediction and one label that has its height and width as the last two axes.
        size: height and width of the labels; None leaves them open, and each batch is resized to its own.
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
        """Return the labels of the loss, with the height and width that they have here.

        Raises:
            ConfigurationError: as the loss, or a prediction that is not ``[N, C, height, width]``.
        """
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
        """Emit the terms of the loss, of the resized prediction."""
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
    """Return a loss whose prediction is resized to its labels; see ``Resized``.

    Args:
        loss: whatever ``get`` takes, such as ``"cross_entropy"``.
        size: height and width of the labels; None leaves them open.
        interpolation: ``linear``, ``nearest`` or ``cubic``.
    """
    return Resized(loss=get(loss), size=None if size is None else tuple(size), interpolation=interpolation)  # type: ignore[arg-type]
