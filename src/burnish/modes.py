"""Training and inference graphs from one source graph: binds batch normalization and dropout to a mode.

The exporter's ``training_mode`` attribute is ignored: only the requested mode counts.
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

# Runtimes without a kernel for these expand the standard's function body, which computes the variance as E[x²] - E[x]². If the
# mean is a thousand standard deviations, no digit of that is correct.
EXPANDED_NAIVELY = frozenset({"GroupNormalization", "MeanVarianceNormalization"})

NORMALIZATION = frozenset({"BatchNormalization"})

IR_VERSION = 10
"""IR version of the temporary models that hold the graphs; without effect on them."""

IN_A_BODY = Numbered(*[Places(problem="a branch or loop body draws for them")] * 2)


@dataclass(frozen=True)
class Training:
    """Context of the passes of TRAINING.

    Attributes:
        policies: the policy of each batch normalization node.
        statistics: collects the updated running statistics.
        key: the random key.
        drawing: random nodes of the graph, in the order of their streams.
        places: positions of the samples in each random draw.
    """

    policies: Mapping[ir.Node, NormPolicy]
    statistics: RunningStatistics
    key: ir.Value
    drawing: Sequence[ir.Node]
    places: Mapping[ir.Node, Numbered]


def batch_normalizations(graph: ir.Graph) -> list[ir.Node]:
    """Return the batch normalization nodes of a graph and its branches, in graph order.

    Nodes that compute the statistics they normalize with are left out: they have no state and act the same in every mode.
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
    """Return the batch normalization nodes in loop bodies, which run any number of times per step."""
    run_once = {*batch_normalizations(graph)}
    inside = (node for body in graph.subgraphs() for node in _nodes(body, NORMALIZATION) if node not in run_once)
    return [node for node in inside if not computes_statistics(node)]


def numbered_draws(graph: ir.Graph, data: Collection[str]) -> dict[ir.Node, Numbered]:
    """Return the positions of samples in each random draw, so that each worker can draw the numbers of its own samples.

    Args:
        graph: a graph of standard operators. Draws in subgraphs are ignored.
        data: names of the inputs with a batch axis.
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
        graph: the graph. Batch normalization and random nodes are replaced; batch normalization in loops is frozen.
        policies: the policy of each batch normalization node.
        running_variance: the kind of batch variance that updates the running variance.
        key: the random key; every random node gets its own stream.
        step: returns the step counter, an int64 scalar; called only if a policy depends on the step.
        places: the result of ``numbered_draws``.

    Returns:
        The next value of each running statistic that a step updates.

    Raises:
        ModelError: a layer whose operands do not hold one value per channel.
        ConfigurationError: a random node in a subgraph whose operator does not count iterations.
    """
    statistics = RunningStatistics(running_variance, policies, step)
    drawing = tuple(_nodes(graph, RANDOM_OPERATORS))
    TRAINING.run(ir.Model(graph, ir_version=IR_VERSION), Training(policies, statistics, key, drawing, places))
    return statistics.updated


def bind_inference(graph: ir.Graph) -> None:
    """Specialize a graph to inference, in place: use running statistics and remove dropout.

    Other random nodes stay: inference has no key, so the runtime draws as it likes.
    """
    INFERENCE.run(ir.Model(graph, ir_version=IR_VERSION), None)


def bind_frozen(graph: ir.Graph, key: ir.Value, step: Callable[[], ir.Value], data: Collection[str]) -> None:
    """Specialize a graph to differentiable inference, in place: running statistics, no dropout, and training forms.

    Args:
        graph, key, step: as for ``bind_training``; random nodes other than dropout use the key.
        data: as for ``numbered_draws``.
    """
    remove_dropout(graph)
    policies: dict[ir.Node, NormPolicy] = dict.fromkeys(batch_normalizations(graph), Frozen())
    bind_training(graph, policies, RunningVariance.ONNX, key, step, numbered_draws(graph, data))


def bind_as_exported(graph: ir.Graph) -> None:
    """Keep every node in its exported mode but make it differentiable, in place.

    Training-mode batch normalization exposes its batch statistics and updates its running outputs by the standard's rule.
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
    """Replace operators, in subgraphs too, by their training forms if ``where`` is true for them."""
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
    """Make each batch normalization, in subgraphs too, use its running statistics."""
    layers = [node for body in (graph, *graph.subgraphs()) for node in _nodes(body, NORMALIZATION)]
    for node in layers:
        _bind_frozen(node)
    return bool(layers)


def remove_dropout(graph: ir.Graph) -> bool:
    """Replace each dropout, in subgraphs too, by its input."""
    dropouts = [node for body in (graph, *graph.subgraphs()) for node in _nodes(body, {"Dropout"})]
    for node in dropouts:
        _remove_dropout(node)
    return bool(dropouts)


def put_forms_that_keep_digits(graph: ir.Graph) -> bool:
    """Use training forms in inference too if an operator's kernel loses digits or runtimes have none for it."""
    return put_training_forms(graph, lambda node: node.op_type in EXPANDED_NAIVELY or lacks_kernel(node))


def _bind_frozen(node: ir.Node) -> None:
    node.attributes.pop("training_mode", None)
    for output, running in zip(node.outputs[1:], node.inputs[3:5], strict=False):
        if running is not None:
            replace_uses(output, running)
    node.resize_outputs(1)


def _center(graph: ir.Graph, node: ir.Node) -> None:
    """Subtract the mean before a frozen layer: runtimes compute x * a + b, which loses digits if the mean is large."""
    builder = Builder(graph, before=node)
    x, mean = (builder.tensor(value) for index in (0, 3) if (value := node.inputs[index]) is not None)
    channels = mean.dimension(0)
    if x.rank is None or channels is None:
        return
    taken_off = builder.cast(mean, x.dtype)
    zeros = builder.constant(np.zeros(channels, mean.dtype.numpy()))
    node.replace_input_with(0, (x - per_channel(taken_off, x)).value)
    # If the mean has more digits than x, subtract the remainder in the layer.
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
    bind_layers(model.graph, context.policies, context.statistics, _bind_layer)
    return bool(context.policies)


def _draw_from_keys(model: ir.Model, context: Training) -> bool:
    """Draw dropout masks and random numbers from the key; subgraphs get a separate key in each iteration."""
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
    """Bind, in place, the layers without a policy: layers in loops and layers that compute their own statistics."""
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
    """Replace a random operator by numbers drawn from the key, which overrides its ``seed`` attribute."""
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
"""Stage that makes a training graph: batch normalization by its policies, and random numbers from a key."""

INFERENCE: Stage[None] = Stage(
    "INFERENCE",
    (rewrite_graph(use_running_statistics), rewrite_graph(remove_dropout), rewrite_graph(put_forms_that_keep_digits)),
    settles=False,
)
"""Stage that makes an inference graph: running statistics and no dropout. The runtime draws other random numbers."""
