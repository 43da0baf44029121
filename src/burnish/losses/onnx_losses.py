"""Losses that already exist in ONNX: an output of the model, or a separate graph."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor, model_proto, static_shape
from burnish.graph.annotations import marked_sample_axis
from burnish.graph.versions import keeps_meaning, oldest_opset, raise_opset
from burnish.importer import Source, load
from burnish.losses.base import (
    Compared,
    Extents,
    LabelSpec,
    LossBase,
    Reading,
    Reduction,
    Term,
    check_reduction,
    floating_shape,
    mean_or_sum,
    samples_of,
    sum_of,
)


@dataclass(frozen=True)
class OutputLoss(LossBase):
    """The loss that one of the model's own outputs holds. Its labels are inputs of the model.

    Attributes:
        output: name of the output: a scalar, or one number per sample or position, to be averaged.
        reduction: how the model computes a scalar: ``mean`` over the samples of the batch, or their ``sum``. It determines how
            the loss of a data set is added up from its batches.
    """

    name = "output"

    output: str
    reduction: Reduction = field(default="mean", kw_only=True)

    def __post_init__(self) -> None:
        check_reduction(self.name, self.reduction)
        if not isinstance(self.output, str):
            raise ConfigurationError(f"output: give the name of the output that is the loss, not {self.output!r}")

    @property
    def readings(self) -> tuple[Reading, ...]:
        return (Reading(self.output),)

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        floating_shape(self.name, predictions[0])
        return ()

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        (value,) = predictions
        shape = floating_shape(self.name, value)
        if all(extent == 1 for extent in shape):
            return (scalar_term(sum_of(value), _batch(value.builder), self.reduction),)
        return mean_or_sum(value, self.reduction)


@dataclass(frozen=True, kw_only=True)
class OnnxLoss(LossBase):
    """A loss given as an ONNX graph. Inputs named like outputs of the model read these; the others become labels.

    Attributes:
        content: the graph, as the bytes of an ONNX file.
        reduction: how its scalar output is computed: ``mean`` over the samples of the batch, or their ``sum``.
        read: its inputs that are outputs of the model; set by ``bind``.
    """

    name = "onnx"

    content: bytes
    reduction: Reduction = "mean"
    read: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_reduction(self.name, self.reduction)

    @cached_property
    def model(self) -> ir.Model:
        """The graph in canonical form.

        Raises:
            ModelError: the content is not a valid ONNX model.
            ConfigurationError: its output is not one floating-point scalar.
        """
        model = load(self.content)
        outputs = model.graph.outputs
        names = ", ".join(f"'{value.name}'" for value in outputs)
        if len(outputs) != 1:
            raise ConfigurationError(f"onnx: the loss graph has the outputs {names}: it must have one, the loss")
        shape = static_shape(outputs[0])
        if outputs[0].dtype is None or not outputs[0].dtype.is_floating_point() or shape is None or any(n != 1 for n in shape):
            raise ConfigurationError(
                f"onnx: the output {names} of the loss graph is {outputs[0].dtype} of shape {outputs[0].shape}, not a "
                "floating-point scalar: reduce it in the graph, and declare its shape []"
            )
        return model

    @property
    def readings(self) -> tuple[Reading, ...]:
        return tuple(Reading(name) for name in self.read)

    def bind(self, outputs: Sequence[str]) -> OnnxLoss:
        """Return the loss that reads the outputs of these names.

        Raises:
            ConfigurationError: it reads no output.
        """
        names = [value.name or "" for value in self.model.graph.inputs]
        read = tuple(name for name in names if name in outputs)
        if not read:
            listed = [", ".join(f"'{name}'" for name in group) or "none" for group in (names, outputs)]
            raise ConfigurationError(
                f"onnx: the loss graph reads {listed[0]}, and the outputs of the model are {listed[1]}: give an input of the "
                "loss graph the name of the output that it reads"
            )
        return replace(self, read=read)

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        """Return the inputs that are not outputs of the model. Dimensions that they share with an output are the model's.

        Raises:
            ConfigurationError: an output of the model differs in dtype or rank from the input of the loss graph.
        """
        dimensions: dict[str, int | str | None] = {}
        inputs = {value.name or "": value for value in self.model.graph.inputs}
        for name, prediction in zip(self.read, predictions, strict=True):
            shape = floating_shape(self.name, prediction)
            declared = _extents(inputs[name])
            if inputs[name].dtype != prediction.dtype or len(declared) != len(shape):
                raise ConfigurationError(
                    f"onnx: the loss graph reads '{name}' as {inputs[name].dtype} of shape {list(declared)}, and the model gives "
                    f"{prediction.dtype} of shape {list(shape)}: make them the same"
                )
            dimensions |= {symbol: extent for symbol, extent in zip(declared, shape, strict=True) if isinstance(symbol, str)}
        specs = []
        for name, value in inputs.items():
            if name not in self.read:
                assert value.dtype is not None
                shape = tuple(dimensions.get(extent, extent) if isinstance(extent, str) else extent for extent in _extents(value))
                specs.append(LabelSpec(name, value.dtype, shape))
        return tuple(specs)

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        specs = self.label_specs(predictions)
        inputs = dict(zip(self.read, predictions, strict=True)) | {
            spec.name: label for spec, label in zip(specs, labels, strict=True)
        }
        builder = predictions[0].builder
        value = sum_of(inlined(self.model, builder, inputs, "onnx: the loss graph")[0])
        samples = samples_of(predictions[0], value.dtype) if predictions[0].rank else None
        if any(each.shape is not None and marked_sample_axis(each) for each in builder.graph.inputs):
            samples = _batch(builder) or samples  # a prediction's first axis need not be the sample axis
        return (scalar_term(value, samples, self.reduction),)

    def compared(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> Compared | None:
        """Return prediction and label if there is one of each and metrics know the label's name, otherwise None."""
        names = [spec.name for spec in self.label_specs(predictions)]
        if len(predictions) != 1 or names not in (["labels"], ["targets"]):
            return None
        return super().compared(predictions, labels)

    def options(self) -> dict[str, Any]:
        return {"name": self.name, "model": base64.b64encode(self.content).decode(), "reduction": self.reduction}


def scalar_term(value: Tensor, samples: Tensor | None, reduction: str) -> Term:
    """Return the term of a loss that is one scalar for the whole batch."""
    one = value.builder.scalar(1.0, value)
    if reduction == "sum" or samples is None:
        return Term(value, one, of_batch=reduction != "sum")
    samples = value.builder.cast(samples, value.dtype)
    return Term(value * samples, samples)


def _batch(builder: Builder) -> Tensor | None:
    """Emit the number of samples, from the first symbolic sample axis of an input; None if no input has one."""
    for value in builder.graph.inputs:
        axis = None if value.shape is None else marked_sample_axis(value)
        if axis is not None and not isinstance(value.shape[axis], int):  # type: ignore[index]  # it has axes
            return samples_of(builder.tensor(value), ir.DataType.INT64, axis)
    return None


def _extents(value: ir.Value) -> Extents:
    if value.shape is None:
        raise ConfigurationError(
            f"onnx: the input '{value.name}' of the loss graph declares no shape, not even its rank: give it one, in which any "
            "dimension may be symbolic"
        )
    return tuple(extent if isinstance(extent, int) else extent.value for extent in value.shape.dims)


def from_onnx(model: Source, *, reduction: Reduction = "mean") -> OnnxLoss:
    """Return a loss given as an ONNX graph; see ``OnnxLoss``.

    Args:
        model: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``, with the loss as its only output, a scalar.
        reduction: how that output is computed, ``mean`` over the samples or their ``sum``.

    Raises:
        ModelError: the model is not a valid ONNX model.
        ConfigurationError: its output is not one floating-point scalar.
    """
    canonical = load(model)
    loss = OnnxLoss(content=model_proto(canonical).SerializeToString(deterministic=True), reduction=reduction)
    loss.model  # noqa: B018  it is read, and what is wrong with it named, now
    return loss


def from_options(*, model: str, reduction: Reduction = "mean") -> OnnxLoss:
    """Return the loss that ``OnnxLoss.options`` describes."""
    return OnnxLoss(content=base64.b64decode(model), reduction=reduction)


def inlined(model: ir.Model, builder: Builder, inputs: Mapping[str, Tensor], what: str) -> tuple[Tensor, ...]:
    """Emit a copy of a model's nodes that reads ``inputs`` instead of the model's own; its initializers become constants.

    Args:
        model: a canonical model; it is not changed.
        builder: builder of the graph, which declares the model's opset if that is newer and a node needs it.
        inputs: a tensor for each input of the model, by name.
        what: name of the model in errors, such as ``onnx: the loss graph``.

    Returns:
        The model's outputs, in order.

    Raises:
        ConfigurationError: an operator has another meaning in the graph's opset.
    """
    copy = model.clone()
    theirs, ours = copy.opset_imports[""], builder.opset
    nodes = copy.graph.all_nodes()
    if theirs <= ours:
        changed = next((node for node in nodes if not keeps_meaning(node, theirs, ours)), None)
    else:
        changed = next((node for node in nodes if oldest_opset(node, theirs, ours) > ours), None)
    if changed is not None and not (theirs > ours and raise_opset(builder.graph, theirs)):
        raise ConfigurationError(
            f"{what} is of opset {theirs} and the model of opset {ours}, and {changed.op_type} changed between "
            "them: export both with the same opset"
        )
    outputs = list(copy.graph.outputs)
    copy.graph.outputs.clear()
    replaced = {value: inputs[value.name or ""] for value in copy.graph.inputs}
    for value in copy.graph.initializers.values():
        assert value.const_value is not None
        replaced[value] = builder.constant(value.const_value.numpy())
    for value, tensor in replaced.items():
        value.replace_all_uses_with(tensor.value)
    for node in list(copy.graph):
        copy.graph.remove(node)
        # Names of the model may collide with those of the graph.
        node.name = None
        for value in node.outputs:
            value.name = None
        builder.graph.append(node)
        builder.graph.opset_imports.setdefault(node.domain, copy.opset_imports.get(node.domain, 1))
    return tuple(replaced.get(output) or builder.tensor(output) for output in outputs)


output = OutputLoss
