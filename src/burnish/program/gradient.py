"""The gradient of any ONNX graph, as a graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from burnish.autodiff import differentiate
from burnish.errors import ConfigurationError, GradientError
from burnish.graph import FLOATING, Builder, Tensor, zeros_like
from burnish.importer import Source, load, refuse_gradients
from burnish.lowering import TARGETS, check_allowed, lower_semantic_operators, settle_opset
from burnish.modes import bind_as_exported
from burnish.passes import recognize_normalization, recognize_training_normalization, remove_unused
from burnish.settings import nearest


def grad(source: Source, wrt: str | Sequence[str], of: str | None = None, *, target: str = "onnxruntime") -> ir.Model:
    """Differentiate an output of a model with respect to inputs or initializers.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; left as it is. Every node stays in the mode it was
            exported in.
        wrt: names of floating-point inputs or initializers.
        of: name of the output; by default the only one.
        target: the runtime that the graph is lowered for.

    Returns:
        A model of standard operators: the source's inputs, and ``cotangent:<of>`` (dtype and shape of the output) unless the
        output is a scalar; the source's outputs, and ``grad:<name>`` (dtype and shape of the value) for every name of ``wrt``.
        The gradient of something the output does not depend on is zeros.

    Raises:
        ConfigurationError: a name the model does not have, or one that is not floating-point.
        UnsupportedOperatorError: the model holds a Gradient itself.
        GradientError: an operator between ``wrt`` and ``of`` has no gradient.
    """
    if target not in TARGETS:
        raise ConfigurationError(f"target: unknown '{target}'; choose among {', '.join(map(repr, TARGETS))}")
    names = _names(wrt)
    model = _load_recognized(source, names)
    refuse_gradients(model, "burnish.grad")
    graph = model.graph
    output_names = [value.name or "" for value in graph.outputs]
    chosen = _choose_output(output_names, of)
    bind_as_exported(graph)
    builder = Builder(graph)
    values = {value.name or "": value for value in (*graph.inputs, *graph.initializers.values())}
    operands = [_operand(name, values) for name in names]
    output = next(value for value in graph.outputs if value.name == chosen)
    if output.dtype not in FLOATING:
        raise ConfigurationError(f"of: the output '{chosen}' is {output.dtype}, and only floating-point values have gradients")
    try:
        gradients = differentiate(builder, {output: _cotangent(builder, output)}, operands)
    except GradientError as error:
        raise GradientError(error.problem, "wrt=[...] says with respect to what, of='...' which output") from error
    for name, operand in zip(names, operands, strict=True):
        gradient = gradients[operand] or zeros_like(builder.tensor(operand))
        value = gradient.value
        if value.is_graph_input() or value.is_graph_output() or value.is_initializer():
            value = builder.op("Identity", gradient).value
        value.name = f"grad:{name}"
        graph.outputs.append(value)
    lower_semantic_operators(model)
    remove_unused(model)
    settle_opset(model, TARGETS[target])
    check_allowed(model, TARGETS[target])
    return model


def _names(wrt: str | Sequence[str]) -> list[str]:
    """The names that ``wrt`` gives, each once."""
    names = [wrt] if isinstance(wrt, str) else list(dict.fromkeys(wrt)) if isinstance(wrt, Iterable) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"wrt must be the name of an input or initializer, or a list of such names, not {wrt!r}")
    return names


def _load_recognized(source: Source, names: Sequence[str]) -> ir.Model:
    model = recognize_training_normalization(recognize_normalization(load(source)))
    known = {value.name for value in (*model.graph.inputs, *model.graph.initializers.values())}
    # A constant inside the pieces of a layer, such as an epsilon, is gone with them.
    return model if known.issuperset(names) else load(source)


def _choose_output(names: Sequence[str], of: str | None) -> str:
    known = ", ".join(f"'{name}'" for name in names)
    if of is None:
        if len(names) != 1:
            raise ConfigurationError(f"the model has the outputs {known}: say which one to differentiate with of=...")
        return names[0]
    if of not in names:
        raise ConfigurationError(f"of: the model has no output '{of}'; it has {known}")
    return of


def _operand(name: str, values: dict[str, ir.Value]) -> ir.Value:
    value = values.get(name)
    if value is None:
        raise ConfigurationError(f"wrt: the model has no input or initializer '{name}'; did you mean {nearest(name, values)}?")
    if value.dtype not in FLOATING:
        raise ConfigurationError(f"wrt: '{name}' is {value.dtype}, and only floating-point values have gradients")
    return value


def _cotangent(builder: Builder, output: ir.Value) -> Tensor:
    """1 for a scalar output, else a new graph input."""
    if output.shape is not None and len(output.shape) == 0:
        assert output.dtype is not None
        return builder.scalar(1.0, output.dtype)
    shape = None if output.shape is None else ir.Shape(output.shape.dims)
    cotangent = ir.Value(name=f"cotangent:{output.name}", type=output.type, shape=shape)
    builder.graph.inputs.append(cotangent)
    return builder.tensor(cotangent)
