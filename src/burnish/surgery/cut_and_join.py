"""Truncation, concatenation and renaming of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import describe_node
from burnish.graph.uses import remove_unused
from burnish.graph.versions import keeps_meaning, oldest_opset
from burnish.importer import Source, load
from burnish.importer.opset import OLDEST_CANONICAL
from burnish.settings import suggestion


def truncate(source: Source, at: str | Sequence[str]) -> ir.Model:
    """Return the part of a model that computes the given values, such as a backbone without its head.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; not changed.
        at: names of values, or of nodes (for their first output).

    Returns:
        A canonical model with these values as outputs.

    Raises:
        ConfigurationError: there is no such value or node.
        ModelError: invalid ONNX model.
    """
    names = [at] if isinstance(at, str) else list(at)
    model = load(source)
    graph = model.graph
    values = {output.name or "": output for node in graph for output in node.outputs}
    nodes = {node.name or "": node for node in graph}
    if not names:
        raise ConfigurationError("truncate: at=[]: give the name of a value or node at least")
    chosen = []
    for name in names:
        value = values.get(name) or (nodes[name].outputs[0] if name in nodes else None)
        if value is None:
            raise ConfigurationError(
                f"truncate: the model computes no value '{name}', nor has it a node of this name{suggestion(name, values)}"
            )
        chosen.append(value)
    graph.outputs.clear()
    graph.outputs.extend(dict.fromkeys(chosen))
    remove_unused(model)
    return model


def append(source: Source, tail: Source, connect: Mapping[str, str] | None = None) -> ir.Model:
    """Return two models joined into one, in which the second reads outputs of the first.

    Names in the second model that clash get its graph's name, or ``tail``, as a prefix.

    Args:
        source: the first model; not changed.
        tail: the second model; not changed.
        connect: input of the second -> output of the first; by default equal names, or the only input and output. Outputs that
            the second model reads are no longer outputs.

    Returns:
        A canonical model.

    Raises:
        ConfigurationError: there is no such input or output, or dtypes or shapes differ.
        ModelError: one of the two is invalid.
    """
    first, second = load(source), load(tail)
    outputs = {value.name or "": value for value in first.graph.outputs}
    inputs = {value.name or "": value for value in second.graph.inputs}
    pairs = _connections(outputs, inputs, connect)
    for name, output in pairs.items():
        _check_fit(inputs[name], outputs[output])
    _settle_opsets(first, second)
    held = [[value for graph in model.graphs() for value in _values(graph)] for model in (first, second)]
    taken = {value.name for value in held[0]} | {node.name for node in first.graph}
    prefix = second.graph.name if second.graph.name and second.graph.name not in taken else "tail"
    connected = [inputs[name] for name in pairs]
    for item in (*held[1], *second.graph):
        if item.name in taken and item not in connected:
            item.name = f"{prefix}.{item.name}"
    for name, output in pairs.items():
        inputs[name].replace_all_uses_with(outputs[output], replace_graph_outputs=True)
    remaining = [
        value for value in second.graph.inputs if value.name not in pairs and value not in (inputs[name] for name in pairs)
    ]
    initializers, nodes = list(second.graph.initializers.values()), list(second.graph)
    results = list(second.graph.outputs)
    second.graph.outputs.clear()
    second.graph.inputs.clear()
    second.graph.initializers.clear()
    second.graph.remove(nodes)
    first.graph.inputs.extend(remaining)
    for value in initializers:
        first.graph.register_initializer(value)
    first.graph.extend(nodes)
    read = set(pairs.values())
    kept = [value for value in first.graph.outputs if (value.name or "") not in read]
    first.graph.outputs.clear()
    first.graph.outputs.extend([*kept, *results])
    remove_unused(first)
    return load(first)


def rename(source: Source, names: Mapping[str, str]) -> ir.Model:
    """Return a model with other names for inputs, outputs, initializers or nodes.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; not changed.
        names: present name -> new name.

    Returns:
        A canonical model.

    Raises:
        ConfigurationError: there is no such name, or a new name is taken.
        ModelError: invalid ONNX model.
    """
    model = load(source)
    items = {item.name or "": item for item in (*model.graph, *_values(model.graph))}
    for name, new in names.items():
        if name not in items:
            raise ConfigurationError(f"rename: the model has no '{name}'{suggestion(name, items)}")
        if not isinstance(new, str) or not new:
            raise ConfigurationError(f"rename: '{name}' cannot become {new!r}: give a name")
    kept = items.keys() - names.keys()
    if clash := next((new for new in names.values() if new in kept or list(names.values()).count(new) > 1), None):
        raise ConfigurationError(f"rename: the name '{clash}' is taken: choose another")
    for number, name in enumerate(names):
        items[name].name = f"renamed:{number}"  # temporary names, since two may be swapped
    for name, new in names.items():
        items[name].name = new
    return model


def _values(graph: ir.Graph) -> list[ir.Value]:
    computed = [output for node in graph for output in node.outputs]
    return [*graph.inputs, *graph.initializers.values(), *computed]


def _connections(
    outputs: Mapping[str, ir.Value], inputs: Mapping[str, ir.Value], connect: Mapping[str, str] | None
) -> dict[str, str]:
    if connect is None:
        connect = {name: name for name in inputs if name in outputs}
        if not connect and len(outputs) == 1 and len(inputs) == 1:
            connect = {next(iter(inputs)): next(iter(outputs))}
        if not connect:
            raise ConfigurationError(
                f"append: the inputs {', '.join(map(repr, inputs))} of the second model have no names of the outputs "
                f"{', '.join(map(repr, outputs))} of the first: say which reads which, with connect="
            )
    for name, output in connect.items():
        if name not in inputs:
            raise ConfigurationError(f"append: the second model has no input '{name}'{suggestion(name, inputs)}")
        if output not in outputs:
            raise ConfigurationError(f"append: the first model has no output '{output}'{suggestion(output, outputs)}")
    return dict(connect)


def _check_fit(wanted: ir.Value, given: ir.Value) -> None:
    if wanted.dtype != given.dtype:
        raise ConfigurationError(f"append: '{wanted.name}' is {wanted.dtype}, and '{given.name}' is {given.dtype}")
    if wanted.shape is None or given.shape is None:
        return
    pairs = zip(wanted.shape.dims, given.shape.dims, strict=False)
    differ = any(isinstance(one, int) and isinstance(other, int) and one != other for one, other in pairs)
    if len(wanted.shape.dims) != len(given.shape.dims) or differ:
        raise ConfigurationError(f"append: '{wanted.name}' has shape {wanted.shape}, and '{given.name}' has {given.shape}")


def _settle_opsets(first: ir.Model, second: ir.Model) -> None:
    """Make both models import the same opsets: the newest standard opset in which all nodes keep their meaning.

    Raises:
        ConfigurationError: there is none, or versions of another domain differ.
    """
    own, other = first.opset_imports[""], second.opset_imports[""]
    if own != other:
        candidates = range(max(own, other), OLDEST_CANONICAL - 1, -1)
        blockers = {opset: _changed(first, opset) or _changed(second, opset) for opset in candidates}
        opset = next((opset for opset, node in blockers.items() if node is None), None)
        if opset is None:
            node = next(node for node in blockers.values() if node is not None)
            raise ConfigurationError(
                f"append: the first model is of opset {own} and the second of {other}, and {describe_node(node)} means something "
                "else in the other one's: export both for the same"
            )
        for graph in (*first.graphs(), *second.graphs()):
            graph.opset_imports[""] = opset
    for domain, version in second.opset_imports.items():
        own = first.opset_imports.setdefault(domain, version)
        if own != version:
            raise ConfigurationError(
                f"append: the first model is of version {own} of '{domain}' and the second of {version}: export both for the same"
            )


def _changed(model: ir.Model, opset: int) -> ir.Node | None:
    declared = model.opset_imports[""]
    nodes = (node for node in model.graph.all_nodes() if node.domain == "")
    if opset >= declared:
        return next((node for node in nodes if not keeps_meaning(node, declared, opset)), None)
    return next((node for node in nodes if oldest_opset(node, declared, opset) > opset), None)
