"""Training and inference from one source graph: batch normalization and dropout are bound to a mode here.

A source exported in training mode and one exported in inference mode are specialized alike: what the exporter wrote in
``training_mode`` does not matter, only the mode asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError, ModelError
from burnish.graph import (
    Builder,
    Tensor,
    attribute_value,
    bodies,
    describe_node,
    remove_node,
    replace_node,
    replace_uses,
    replace_value,
)
from burnish.graph.inference import RANDOM_OPERATORS
from burnish.graph.stage import Pass, Stage, rewrite_graph
from burnish.graph.uses import is_used
from burnish.norms import (
    Auto,
    BatchStatistics,
    Frozen,
    NormPolicy,
    RunningVariance,
    Train,
    check_layer,
    computes_statistics,
    uses_the_batch,
)
from burnish.norms.training import RunningStatistics, bind_layers, is_branching, normalize, normalize_without_statistics
from burnish.operators import Operation, find_training_form
from burnish.operators.normalization.statistics import per_channel
from burnish.operators.recurrent_layer import lacks_kernel
from burnish.random import Numbered, Places, bernoulli, dropout, multinomial, normal, uniform
from burnish.random.keys import keys_in_bodies
from burnish.sample_axes import Analysis, numbered

# Runtimes without a kernel for these expand the standard's function body, whose variance is E[x²] - E[x]²: with a mean of a
# thousand standard deviations no digit of it is left.
EXPANDED_NAIVELY = frozenset({"GroupNormalization", "MeanVarianceNormalization"})

NORMALIZATION = frozenset({"BatchNormalization"})

IR_VERSION = 10
"""Of the models that hold graphs while they are bound; it says nothing of a graph."""

IN_A_BODY = Numbered(*[Places(problem="a branch or loop body draws for them")] * 2)


@dataclass(frozen=True)
class Training:
    """What the passes of TRAINING are told.

    Attributes:
        policies: the policy of each batch normalization node.
        statistics: takes the next value of each running statistic.
        key: the random key that is drawn from.
        drawing: the nodes of the graph that draw at random, in the order of their streams.
        places: where samples stand in what each of them draws.
    """

    policies: Mapping[ir.Node, NormPolicy]
    statistics: RunningStatistics
    key: ir.Value
    drawing: Sequence[ir.Node]
    places: Mapping[ir.Node, Numbered]


def batch_normalizations(graph: ir.Graph) -> list[ir.Node]:
    """The batch normalization nodes of a graph and of the branches in it, in its order.

    Those that compute the statistics they normalize with are none: they keep nothing, and do the same in every mode.
    """
    layers = []
    for node in graph:
        if node.op_type == "BatchNormalization" and node.domain == "":
            if not computes_statistics(node):
                layers.append(node)
        elif is_branching(node):
            layers += [layer for body in bodies(node) for layer in batch_normalizations(body)]
    return layers


def batch_normalizations_in_loops(graph: ir.Graph) -> list[ir.Node]:
    """The batch normalization nodes in loop bodies of a graph, which run any number of times in a step."""
    run_once = {*batch_normalizations(graph)}
    inside = (node for body in graph.subgraphs() for node in _nodes(body, NORMALIZATION) if node not in run_once)
    return [node for node in inside if not computes_statistics(node)]


def numbered_draws(graph: ir.Graph, data: Collection[str]) -> dict[ir.Node, Numbered]:
    """Return where samples stand in what each node draws, by which several workers draw those of their own.

    Args:
        graph: of standard operators; what others do with samples is not known. Draws in bodies are left out.
        data: the names of the inputs that are a batch.
    """
    drawing = _nodes(graph, RANDOM_OPERATORS)
    analysis = Analysis(graph, data) if drawing else None
    return {} if analysis is None else {node: numbered(analysis, node.outputs[0]) for node in drawing}


def bind_training(
    graph: ir.Graph,
    policies: Mapping[ir.Node, NormPolicy],
    running_variance: RunningVariance,
    key: ir.Value,
    step: Callable[[], ir.Value],
    places: Mapping[ir.Node, Numbered],
) -> dict[ir.Value, ir.Value]:
    """Specialize a graph to training, in place.

    Args:
        graph: the graph; its batch normalization nodes, and all that draw at random, are replaced. Batch normalization in loops
            is frozen.
        policies: the policy of each batch normalization node.
        running_variance: which batch variance enters the running variance.
        key: the random key that is drawn from; every node that draws has a stream of its own.
        step: gives the step counter, an int64 scalar; called only when a policy changes over training.
        places: what ``numbered_draws`` returns of the graph.

    Returns:
        For every running statistic that a step updates, its next value.

    Raises:
        ModelError: a layer whose operands do not hold one value per channel.
        ConfigurationError: a node in the body of an operator that numbers no iterations draws at random.
    """
    statistics = RunningStatistics(running_variance, policies, step)
    drawing = tuple(_nodes(graph, RANDOM_OPERATORS))
    TRAINING.run(ir.Model(graph, ir_version=IR_VERSION), Training(policies, statistics, key, drawing, places))
    return statistics.updated


def bind_inference(graph: ir.Graph) -> None:
    """Specialize a graph to inference, in place: running statistics, and no dropout.

    Other nodes that draw at random stay as they are: there is no key in inference, and the runtime draws as it likes.
    """
    INFERENCE.run(ir.Model(graph, ir_version=IR_VERSION), None)


def bind_frozen(graph: ir.Graph, key: ir.Value, step: Callable[[], ir.Value], data: Collection[str]) -> None:
    """Specialize a graph to inference that is differentiated, in place: running statistics, no dropout, and training forms.

    Args:
        graph, key, step: as for ``bind_training``; other nodes that draw at random draw from the key.
        data: as for ``numbered_draws``.
    """
    remove_dropout(graph)
    policies: dict[ir.Node, NormPolicy] = dict.fromkeys(batch_normalizations(graph), Frozen())
    bind_training(graph, policies, RunningVariance.ONNX, key, step, numbered_draws(graph, data))


def bind_as_exported(graph: ir.Graph) -> None:
    """Leave every node in the mode it was exported in, made differentiable, in place.

    Training-mode batch normalization exposes its statistics, and updates its running outputs by the standard's rule.
    """
    exported: dict[ir.Node, NormPolicy] = {
        node: Train()
        for body in (graph, *graph.subgraphs())
        for node in _nodes(body, NORMALIZATION)
        if attribute_value(node, "training_mode", 0)
    }
    statistics = RunningStatistics(RunningVariance.ONNX, exported)
    for node in exported:
        assert isinstance(node.graph, ir.Graph)
        _bind_batch_statistics(node.graph, node, Train(), statistics)
    put_training_forms(graph)


def put_training_forms(graph: ir.Graph, where: Callable[[ir.Node], bool] = lambda node: True) -> bool:
    """Replace, in bodies too, the operators that have a form of their own for training, if ``where`` holds for them."""
    changed = False
    for body in (graph, *graph.subgraphs()):
        body.opset_imports.update(graph.opset_imports)
        for node in list(body):
            rule = find_training_form(node, body.opset_imports[""])
            if rule is not None and where(node):
                form = rule(Operation(node, Builder(body, before=node)))
                if form is not None:
                    replace_node(node, form)
                    changed = True
    return changed


def use_running_statistics(graph: ir.Graph) -> bool:
    """Let each batch normalization, in bodies too, normalize with its running statistics."""
    layers = [node for body in (graph, *graph.subgraphs()) for node in _nodes(body, NORMALIZATION)]
    for node in layers:
        _bind_frozen(node)
    return bool(layers)


def remove_dropout(graph: ir.Graph) -> bool:
    """Replace each dropout, in bodies too, by what it reads."""
    dropouts = [node for body in (graph, *graph.subgraphs()) for node in _nodes(body, {"Dropout"})]
    for node in dropouts:
        _remove_dropout(node)
    return bool(dropouts)


def put_forms_that_keep_digits(graph: ir.Graph) -> bool:
    """Put the training forms of operators whose kernels lose digits in inference too, or that runtimes have no kernel for."""
    return put_training_forms(graph, lambda node: node.op_type in EXPANDED_NAIVELY or lacks_kernel(node))


def _bind_frozen(node: ir.Node) -> None:
    node.attributes.pop("training_mode", None)
    for output, running in zip(node.outputs[1:], node.inputs[3:5], strict=False):
        if running is not None:
            replace_uses(output, running)
    node.resize_outputs(1)


def _center(graph: ir.Graph, node: ir.Node) -> None:
    """Take the mean off before a frozen layer: a runtime's x * a + b loses digits when the mean is large."""
    builder = Builder(graph, before=node)
    x, mean = (builder.tensor(value) for index in (0, 3) if (value := node.inputs[index]) is not None)
    channels = mean.dimension(0)
    if x.rank is None or channels is None:
        return
    taken_off = builder.cast(mean, x.dtype)
    zeros = builder.constant(np.zeros(channels, mean.dtype.numpy()))
    node.replace_input_with(0, (x - per_channel(taken_off, x)).value)
    # A mean of more digits than x has leaves what x could not take off.
    node.replace_input_with(3, (zeros if mean.dtype == x.dtype else mean - builder.cast(taken_off, mean.dtype)).value)


def _bind_batch_statistics(graph: ir.Graph, node: ir.Node, policy: BatchStatistics, statistics: RunningStatistics) -> None:
    check_layer(node)
    for output, replacement in zip(node.outputs, normalize(Builder(graph, before=node), node, policy, statistics), strict=False):
        replace_value(output, replacement.value)
    remove_node(node)


def _bind_layer(graph: ir.Graph, node: ir.Node, policy: NormPolicy, statistics: RunningStatistics) -> None:
    assert not isinstance(policy, Auto), "an automatic policy is settled before a graph is bound"
    if isinstance(policy, BatchStatistics):
        _bind_batch_statistics(graph, node, policy, statistics)
    else:
        _bind_frozen(node)
        _center(graph, node)


def _bind_normalization(model: ir.Model, context: Training) -> bool:
    """Bind the layers that a policy is for."""
    bind_layers(model.graph, context.policies, context.statistics, _bind_layer)
    return bool(context.policies)


def _draw_from_keys(model: ir.Model, context: Training) -> bool:
    """Draw dropout masks and random numbers from the key, in bodies from one of their own for each iteration."""
    places = dict(context.places)
    drawing = [(node, context.key) for node in context.drawing]
    for body, inside in keys_in_bodies(model.graph, context.key, RANDOM_OPERATORS):
        for node in _nodes(body, RANDOM_OPERATORS):
            drawing.append((node, inside))
            places[node] = IN_A_BODY
    for stream, (node, key) in enumerate(drawing):
        bind = _bind_dropout if node.op_type == "Dropout" else _bind_draw
        assert isinstance(node.graph, ir.Graph)
        bind(node.graph, node, key, stream, places[node])
    return bool(drawing)


def _freeze_others(graph: ir.Graph, policies: Container[ir.Node]) -> bool:
    """Bind the layers that no policy is for, in place: those in loops, and those that compute their statistics."""
    changed = False
    for body in (graph, *graph.subgraphs()):
        for node in _nodes(body, NORMALIZATION):
            if node in policies:
                continue
            changed = True
            body.opset_imports.update(graph.opset_imports)
            if body is graph and uses_the_batch(node):
                replace_node(node, normalize_without_statistics(Builder(graph, before=node), node))
                continue
            _bind_frozen(node)
            _center(body, node)
    return changed


def _nodes(graph: ir.Graph, op_types: Container[str]) -> list[ir.Node]:
    return [node for node in graph if node.op_type in op_types and node.domain == ""]


def _bind_dropout(graph: ir.Graph, node: ir.Node, key: ir.Value, stream: int, places: Numbered) -> None:
    builder = Builder(graph, before=node)
    if len(node.outputs) > 1 and is_used(node.outputs[1]):
        raise ConfigurationError(
            f"{describe_node(node)}: its mask is read by the model, and a mask drawn from a key has no such output; "
            "remove the use of the mask from the model"
        )
    x = builder.tensor(node.inputs[0])  # type: ignore[arg-type]
    given = node.inputs[1] if len(node.inputs) > 1 else None
    ratio: Tensor | float = 0.5 if given is None else builder.tensor(given)
    if isinstance(ratio, Tensor) and ratio.array is not None:
        if ratio.array.size != 1 or not 0.0 <= ratio.array.item() <= 1.0:
            raise ModelError(
                f"{describe_node(node)}: a dropout ratio is one number between 0 and 1, not {ratio.array.tolist()}; correct "
                "it in the model"
            )
        ratio = float(ratio.array.item())
    replace_value(node.outputs[0], dropout(builder, x, ratio, builder.tensor(key), stream, places).value)
    remove_node(node)


def _bind_draw(graph: ir.Graph, node: ir.Node, key: ir.Value, stream: int, places: Numbered) -> None:
    """Put numbers drawn from the key in the place of a random operator; its ``seed`` attribute gives way to the key."""
    builder = Builder(graph, before=node)
    words, source = builder.tensor(key), node.inputs[0] if node.inputs else None
    declared = attribute_value(node, "dtype", None)
    if source is not None:
        like = builder.tensor(source)
    else:
        like = builder.op("ConstantOfShape", builder.integers(attribute_value(node, "shape", ())))
    own = like.dtype if node.op_type in ("RandomUniformLike", "RandomNormalLike", "Bernoulli") else None
    dtype = ir.DataType(declared) if declared is not None else own
    if node.op_type == "Multinomial":
        samples = attribute_value(node, "sample_size", 1)
        drawn = multinomial(builder, words, stream, like, samples, dtype or ir.DataType.INT32, places)
    elif node.op_type == "Bernoulli":
        drawn = bernoulli(builder, words, stream, like, dtype or like.dtype, places)
    elif node.op_type.startswith("RandomUniform"):
        low, high = attribute_value(node, "low", 0.0), attribute_value(node, "high", 1.0)
        drawn = uniform(builder, words, stream, like, dtype or ir.DataType.FLOAT, low, high, places)
    else:
        mean, scale = attribute_value(node, "mean", 0.0), attribute_value(node, "scale", 1.0)
        drawn = normal(builder, words, stream, like, dtype or ir.DataType.FLOAT, mean, scale, places)
    replace_value(node.outputs[0], drawn.value)
    remove_node(node)


def _remove_dropout(node: ir.Node) -> None:
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    data = node.inputs[0]
    assert data is not None
    if len(node.outputs) > 1 and is_used(node.outputs[1]):
        builder = Builder(graph, before=node)
        everything = builder.op("Expand", builder.constant(np.asarray(True)), builder.op("Shape", builder.tensor(data)))
        replace_value(node.outputs[1], everything.value)
    replace_value(node.outputs[0], data)
    remove_node(node)


TRAINING: Stage[Training] = Stage(
    "TRAINING",
    (
        Pass("bind_normalization", _bind_normalization),
        Pass("freeze_other_normalization", lambda model, context: _freeze_others(model.graph, context.policies)),
        Pass("draw_from_keys", _draw_from_keys),
        rewrite_graph(put_training_forms),
    ),
    settles=False,
)
"""A graph becomes that of a training step: batch normalization by its policies, and random numbers from a key."""

INFERENCE: Stage[None] = Stage(
    "INFERENCE",
    (rewrite_graph(use_running_statistics), rewrite_graph(remove_dropout), rewrite_graph(put_forms_that_keep_digits)),
    settles=False,
)
"""A graph becomes that of inference: running statistics, and no dropout. Other nodes draw as the runtime likes."""
