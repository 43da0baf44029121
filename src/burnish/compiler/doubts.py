"""What of a model is perhaps not what was meant to train, as sentences that say what to do."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import onnx_ir as ir

from burnish.graph import describe_node
from burnish.importer import (
    computed_ahead,
    folded_layers,
    lost_parameters,
    of_unknown_origin,
    perhaps_copied,
    perhaps_learned_scalars,
    perhaps_merged,
    perhaps_shared,
    shared_statistics,
)
from burnish.norms import uses_the_batch
from burnish.sample_axes import mixing_nodes

STATISTICS = frozenset("Cast Div Identity Mul Pow ReduceMean ReduceSum Reshape Squeeze Sub Unsqueeze".split())
"""Operators that a mean and a variance are computed by."""
SHOWN = 3
"""How many of several weights a sentence names."""


def find_doubts(model: ir.Model, trainable: Collection[str], is_frozen: bool, takes_all: bool) -> Iterator[str]:
    """Give a sentence for each doubt about the weights that train.

    Weights train as one and were perhaps several, or as two and were one; batch normalization was folded into layers that train;
    scalars that were perhaps parameters stay as they are; what was computed from parameters, or from what else, trains in their
    place; layers share running statistics; parameters are not in the model.

    Args:
        model: a canonical model.
        trainable: the weights that train.
        is_frozen: whether the user asked for normalization by fixed statistics, which is what folding leaves.
        takes_all: whether the user left it open what trains.
    """
    if several := [f"'{name}' ({count} layers)" for name, count in perhaps_merged(model).items() if name in trainable]:
        yield (
            f"weights of one value that several layers read train as one: {_first(several)}. Where these were parameters of "
            "their own, export the model again without an optimizer of graphs that merges equal tensors, for example with "
            "torch.onnx.export(..., dynamo=True, optimize=False)"
        )
    if pairs := [f"'{name}' of '{table}'" for name, table in perhaps_copied(model).items() if {name, table} & {*trainable}]:
        yield (
            f"a weight holds the same numbers as a table that rows are taken of, and trains apart from it: {_first(pairs)}. "
            "Where the two were one parameter, export the model again so that it stays one, for example with "
            "torch.onnx.export(..., dynamo=True), or with do_constant_folding=False"
        )
    if pairs := [f"'{name}' and '{first}'" for name, first in perhaps_shared(model).items() if {name, first} & {*trainable}]:
        yield (
            f"weights of two layers hold the same numbers, and train apart: {_first(pairs)}. Where the layers share a parameter, "
            "export the model again with do_constant_folding=False, so that it stays one"
        )
    folded = [f"'{weight}'" for weight, bias in folded_layers(model).items() if {weight, bias} & {*trainable}]
    if folded and not is_frozen:
        layers = "a layer that trains" if len(folded) == 1 else f"{len(folded)} layers that train"
        yield (
            f"batch normalization was folded into {layers} when the model was exported, and is not trained: "
            f"{_first(folded)}. Export the model again with it kept (torch.onnx.export(..., dynamo=True, optimize=False); "
            "burnish export ... --no-fold), or put new layers in (burnish.surgery.insert). Where it is meant to stay fixed, say "
            "so with norm='frozen'"
        )
    if not is_frozen and (several := [f"'{name}' ({count} layers)" for name, count in shared_statistics(model).items()]):
        yield (
            "layers of batch normalization with scales or biases of their own read the same running statistics, and each updates "
            f"them in its turn: {_first(several)}. Give each layer statistics of its own, or keep them fixed with norm='frozen'"
        )
    yield from _of_notes(model, trainable, takes_all)
    if takes_all and (unknown := [repr(name) for name in of_unknown_origin(model)]):
        yield (
            "weights train of which the file does not say what they were: the exporter computed them from parameters or buffers, "
            f"or they were numbers: {_first(unknown)}. Export the model again with do_constant_folding=False, or with "
            "torch.onnx.export(..., dynamo=True, optimize=False); or say what trains (trainable=[...])"
        )
    if takes_all and (scalars := perhaps_learned_scalars(model)):
        named = _first([f"'{name}'" for name in scalars])
        yield (
            f"scalars count as constants, and these stay as they are: {named}. Where they were parameters, train them by name: "
            f"trainable=['*', '{scalars[0]}']"
        )


def mixing_doubts(predictions: Collection[ir.Value]) -> Iterator[str]:
    """Give a sentence where predictions of one sample depend on the others of its batch.

    Args:
        predictions: the values of a canonical model that the loss reads.
    """
    graph = next((value.graph for value in predictions), None)
    mixing = [] if graph is None else mixing_nodes(graph, predictions)
    mixing = [each for each in mixing if not _is_of_normalization(each.node)]
    if mixing:
        nodes, name, axis = _first([describe_node(each.node) for each in mixing]), mixing[0].input, mixing[0].axis
        which = "the first axis" if axis == 0 else f"axis {axis}"
        yield (
            f"what the model computes of a sample depends on the others of its batch, for {which} of the input '{name}' is that "
            f"of the samples, and these nodes work along it: {nodes}. Where that is not meant, say which axis is "
            "(sample_axis=..., --sample-axis), or say it in the model (dim=..., batch_first=True, a transposition in place of a "
            "reshape), and export it again"
        )


def _is_of_normalization(node: ir.Node) -> bool:
    """Whether a node computes nothing but statistics for batch normalization, which is meant to work over all samples."""
    pending = list(node.outputs)
    while pending:
        value = pending.pop()
        if value.is_graph_output():
            return False
        for reader, index in value.uses():
            if reader.op_type == "BatchNormalization" and uses_the_batch(reader):
                if index not in (3, 4):
                    return False
            elif reader.domain == "" and reader.op_type in STATISTICS:
                pending.extend(reader.outputs)
            else:
                return False
    return True


def _of_notes(model: ir.Model, trainable: Collection[str], takes_all: bool) -> Iterator[str]:
    """Give the doubts that follow from what PyTorch's exporter noted of the module's parameters."""
    again = "export the model again with torch.onnx.export(..., dynamo=True, optimize=False)"
    computed = [
        f"'{name}' of {_first([repr(parameter) for parameter in parameters])}"
        for name, parameters in computed_ahead(model).items()
        if name in trainable
    ]
    if computed:
        yield (
            "the exporter computed weights from parameters of the module, and they train in the place of these: "
            f"{_first(computed)}. To train the parameters themselves, {again}"
        )
    if takes_all and (lost := [f"'{name}'" for name in lost_parameters(model.graph)]):
        yield (
            f"the exporter merged parameters of the module with others, or left them out, and they do not train: {_first(lost)}. "
            f"To train them, {again}"
        )


def _first(texts: Sequence[str]) -> str:
    return ", ".join(texts[:SHOWN]) + (f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else "")
