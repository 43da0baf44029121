"""Compute the gradient of any ONNX graph, as a graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import onnx_ir as ir

from burnish.autodiff import differentiate
from burnish.errors import ConfigurationError, GradientError
from burnish.graph import FLOATING, SIXTEEN_BIT, Builder, Names, Tensor, garbage_kept, zeros_like
from burnish.graph.shapes import has_sixteen_bit_values
from burnish.importer import Bind, Source, check_constant_sizes, load, refuse_gradients
from burnish.modes import bind_as_exported
from burnish.rewriting.change_dtypes import cast_for_readers, compute_in_float32, order_of
from burnish.rewriting.simulate_quantization import refuse_lost_gradients, simulate_quantization
from burnish.rewriting.stages import RECOGNIZED, RECOGNIZED_IN_MODE, RECOGNIZED_TO_TRAIN, STANDARD, Lowering
from burnish.settings import nearest
from burnish.targets import TargetLike, target_of

PREFIX = "grad:"


@garbage_kept()
def grad(
    source: Source, wrt: str | Sequence[str], of: str | None = None, *, bind: Bind = None, target: TargetLike = "onnxruntime"
) -> ir.Model:
    """Differentiate an output of a model with respect to inputs or initializers.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; not modified. Every node stays in the mode in which it was
            exported.
        wrt: names of floating-point inputs or initializers.
        of: name of the output; by default the only one.
        bind: {input: value}: inputs fixed to a value, which the gradient model does not have (``burnish.load``).
        target: runtime that the graph is lowered for: a name, a TOML file (``burnish.targets``), or a ``burnish.targets.Target``.

    Returns:
        A model of standard operators. Its inputs are those of the source, and ``cotangent:<of>`` (dtype and shape of the output)
        unless the output is a scalar. Its outputs are those of the source, and ``grad:<name>`` (dtype and shape of the value) for
        every name of ``wrt``. A gradient is zero if the output does not depend on the value. Values in float16 or bfloat16 are
        computed in float32 and rounded at the end: inputs, outputs, gradients and weights keep their dtypes.

        The gradient of a gradient is named after both: the gradient of ``grad:x`` with respect to ``y`` is ``grad:x:y``. If the
        source already has a value of that name, as after ``grad`` of another output, it is ``grad:<name>:of:<of>``. An existing
        input ``cotangent:<of>`` is used again.

    Raises:
        ConfigurationError: a name does not exist, is not floating-point, or its gradient is in the model already.
        ModelError: a constant would take more memory than reading the model may.
        UnsupportedOperatorError: the model contains a Gradient operator.
        GradientError: an operator between ``wrt`` and ``of`` has no gradient.
    """
    runtime = target_of(target)
    model = differentiated(source, wrt, of, bind=bind)
    STANDARD.run(model, Lowering(runtime))
    return model


def differentiated(source: Source, wrt: str | Sequence[str], of: str | None = None, *, bind: Bind = None) -> ir.Model:
    """Return the result of ``grad`` before lowering: with semantic operators and unused nodes."""
    names = _names(wrt)
    model = _load_recognized(source, names, bind)
    refuse_gradients(model, "burnish.grad")
    graph = model.graph
    output_names = [value.name or "" for value in graph.outputs]
    chosen = _choose_output(output_names, of)
    with _held_variable(model, names):
        bind_as_exported(graph)
        RECOGNIZED_IN_MODE.run(model, None)
    builder = Builder(graph)
    values = {value.name or "": value for value in (*graph.inputs, *graph.initializers.values())}
    operands = [_operand(name, values) for name in names]
    output = next(value for value in graph.outputs if value.name == chosen)
    if not isinstance(output.type, ir.TensorType):
        raise ConfigurationError(f"of: the output '{chosen}' is {output.type}, and only tensors are differentiated")
    if output.dtype not in FLOATING:
        raise ConfigurationError(f"of: the output '{chosen}' is {output.dtype}, and only floating-point values have gradients")
    try:
        stopped = simulate_quantization(graph, operands)
        # An output of the model may have been replaced.
        output = next(value for value in graph.outputs if value.name == chosen)
        refuse_lost_gradients(stopped, operands, output)
        gradients = differentiate(builder, {output: _cotangent(builder, output)}, operands)
    except GradientError as error:
        raise GradientError(error.problem, "wrt=[...] says with respect to what, of='...' which output") from error
    names_in_use = Names.of(graph)
    for name, operand in zip(names, operands, strict=True):
        gradient = gradients[operand] or zeros_like(builder.tensor(operand))
        value = gradient.value
        if value.is_graph_input() or value.is_graph_output() or value.is_initializer():
            value = builder.op("Identity", gradient).value
        value.name = _gradient_name(name, chosen, names_in_use)
        graph.outputs.append(value)
    return model


def _names(wrt: str | Sequence[str]) -> list[str]:
    names = [wrt] if isinstance(wrt, str) else list(dict.fromkeys(wrt)) if isinstance(wrt, Iterable) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"wrt must be the name of an input or initializer, or a list of such names, not {wrt!r}")
    return names


def _load_recognized(source: Source, names: Sequence[str], bind: Bind) -> ir.Model:
    model = load(source, bind=bind)
    check_constant_sizes(model)
    with _held_variable(model, names):
        RECOGNIZED.run(model, None)
        RECOGNIZED_TO_TRAIN.run(model, None)
    return _in_float32(model, names)


@contextmanager
def _held_variable(model: ir.Model, names: Collection[str]) -> Iterator[None]:
    """Hide the values of these initializers: a constant that becomes an attribute would have no gradient."""
    tensors = {value: value.const_value for name, value in model.graph.initializers.items() if name in names}
    for value in tensors:
        value.const_value = None
    try:
        yield
    finally:
        for value, tensor in tensors.items():
            value.const_value = tensor


def _in_float32(model: ir.Model, names: Collection[str]) -> ir.Model:
    """Make a sixteen-bit model compute in float32, in place; inputs, outputs, weights and ``names`` keep their dtypes."""
    if not has_sixteen_bit_values(model):
        return model
    graph = model.graph
    # By value, not by name: an initializer that is also an output gives its name to the rounded output.
    tensors = {value: (name, value.const_value) for name, value in graph.initializers.items() if value.dtype in SIXTEEN_BIT}
    compute_in_float32(model, keep_outputs=True)
    order = order_of(graph)
    for value, (name, tensor) in tensors.items():
        if tensor is not None and value.uses() and (name in names or len(tensor.shape)):
            value.const_value, value.type = tensor, ir.TensorType(tensor.dtype)
            cast_for_readers(graph, value, ir.DataType.FLOAT, order)
    return model


def _choose_output(names: Sequence[str], of: str | None) -> str:
    listed = ", ".join(f"'{name}'" for name in names)
    if of is None:
        if len(names) != 1:
            raise ConfigurationError(f"the model has the outputs {listed}: say which one to differentiate with of=...")
        return names[0]
    if of not in names:
        raise ConfigurationError(f"of: the model has no output '{of}'; it has {listed}")
    return of


def _operand(name: str, values: dict[str, ir.Value]) -> ir.Value:
    value = values.get(name)
    if value is None:
        raise ConfigurationError(f"wrt: the model has no input or initializer '{name}'; did you mean {nearest(name, values)}?")
    if not isinstance(value.type, ir.TensorType):
        raise ConfigurationError(f"wrt: '{name}' is {value.type}, and only tensors have gradients")
    if value.dtype not in FLOATING:
        raise ConfigurationError(f"wrt: '{name}' is {value.dtype}, and only floating-point values have gradients")
    return value


def _gradient_name(name: str, of: str, names_in_use: Names) -> str:
    short = f"{of}:{name}" if of.startswith(PREFIX) else f"{PREFIX}{name}"
    names = (short, f"{short}:of:{of}")
    free = next((candidate for candidate in names if candidate not in names_in_use), None)
    if free is None:
        raise ConfigurationError(
            f"wrt: the model has values of the names '{names[0]}' and '{names[1]}' already: take the gradient of '{of}' "
            f"with respect to '{name}' from there, or rename them"
        )
    return free


def _cotangent(builder: Builder, output: ir.Value) -> Tensor:
    """Return 1 for a scalar output, else a graph input, which is added if it does not exist."""
    if output.shape is not None and len(output.shape) == 0:
        assert output.dtype is not None
        return builder.scalar(1.0, output.dtype)
    name = f"cotangent:{output.name}"
    present = next((value for value in builder.graph.inputs if value.name == name), None)
    if present is not None:
        return builder.tensor(present)
    shape = None if output.shape is None else ir.Shape(output.shape.dims)
    cotangent = ir.Value(name=name, type=output.type, shape=shape)
    builder.graph.inputs.append(cotangent)
    return builder.tensor(cotangent)
