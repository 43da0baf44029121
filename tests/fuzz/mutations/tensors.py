"""Tensors of other dims, dtypes, lengths and elements, and initializers in other places."""

from __future__ import annotations

from random import Random

from onnx import ModelProto, TensorProto, helper

from fuzz.mutations.payloads import changed_tensor
from fuzz.mutations.places import graphs, tensors_of
from fuzz.mutations.registry import mutation
from fuzz.values import integer


@mutation(7)
def change_tensor(random: Random, model: ModelProto) -> str | None:
    tensors = tensors_of(model)
    if not tensors:
        return None
    tensor = random.choice(tensors)
    return f"tensor {tensor.name[:40]!r}: {changed_tensor(random, tensor)}"


@mutation(3)
def change_initializers(random: Random, model: ModelProto) -> str | None:
    """One goes, comes twice, comes into another graph, or is an input or output as well."""
    graph = random.choice(graphs(model))
    if not graph.initializer:
        return None
    index = random.randrange(len(graph.initializer))
    tensor = graph.initializer[index]
    match random.randrange(6):
        case 0:
            del graph.initializer[index]
            return f"initializer {index} goes"
        case 1:
            graph.initializer.add().CopyFrom(tensor)
            return f"initializer {tensor.name[:40]!r} comes twice"
        case 2:
            random.choice(graphs(model)).initializer.add().CopyFrom(tensor)
            return f"initializer {tensor.name[:40]!r} comes into another graph"
        case 3:
            kind = tensor.data_type if random.random() < 0.5 else TensorProto.FLOAT
            graph.input.append(helper.make_tensor_value_info(tensor.name, kind, [integer(random)]))
            return f"initializer {tensor.name[:40]!r} is an input too"
        case 4:
            graph.output.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
            return f"initializer {tensor.name[:40]!r} is an output too"
    sparse = graph.sparse_initializer.add()
    sparse.values.CopyFrom(tensor)
    sparse.dims.extend(tensor.dims)
    return f"initializer {tensor.name[:40]!r} is sparse too"
