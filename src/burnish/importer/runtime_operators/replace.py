"""Type inference and replacement of runtime-specific operators in a model.

ONNX Runtime's tools write some of them in the domain ``""``, in opsets in which the standard lacks them.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from burnish.errors import BurnishError, ModelError
from burnish.graph import Builder, Tensor, bodies, constant_array, describe_node, infer_outputs, replace_node
from burnish.graph.annotations import DEPARTURES
from burnish.graph.inference import operator_schema
from burnish.graph.protos import graphs_within
from burnish.graph.uses import copy_of
from burnish.importer.opset import OLDEST_CANONICAL
from burnish.importer.runtime_operators.registry import RUNTIME_DOMAIN, Results, find_rewrite
from burnish.operators import Operation

STANDARD_NAMES = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})
"""Operators of ONNX Runtime that its tools write in the domain ``""``."""


def hide_runtime_nodes(proto: onnx.ModelProto) -> None:
    """Move such nodes to the runtime's domain, in place, so that the checker of ONNX ignores them."""
    for body in (proto, *proto.functions):
        imports = {imported.domain: imported.version for imported in body.opset_import}
        graph = proto.graph if isinstance(body, onnx.ModelProto) else body
        moved = False
        for node in (node for inside in graphs_within(graph) for node in inside.node):
            if node.op_type in STANDARD_NAMES and node.domain == "" and not _is_standard(node.op_type, imports.get("")):
                node.domain = RUNTIME_DOMAIN
                moved = True
        if moved and RUNTIME_DOMAIN not in imports:
            body.opset_import.append(onnx.helper.make_opsetid(RUNTIME_DOMAIN, 1))


def move_runtime_nodes(model: ir.Model) -> bool:
    """Move such nodes of a model to the runtime's domain, in place."""
    changed = False
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for body in bodies:
        opset_imports = model.opset_imports if isinstance(body, ir.Graph) else body.opset_imports
        for node in body.all_nodes():
            if node.op_type in STANDARD_NAMES and node.domain == "" and not _is_standard(node.op_type, opset_imports.get("")):
                node.domain = RUNTIME_DOMAIN
                opset_imports.setdefault(RUNTIME_DOMAIN, 1)
                changed = True
    return changed


def _is_standard(op_type: str, opset: int | None) -> bool:
    return operator_schema(op_type, onnx.defs.onnx_opset_version() if opset is None else opset) is not None


_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
UNROUNDED = {"DynamicQuantizeLSTM": "inference does not round what it reads and what it remembers, as the file does in each step"}
"""Operators that the runtime computes less precisely than their replacement, and how they differ."""
_SMALL = 64
"""Largest constant that a trial contains, in elements: axes and lengths, not weights."""


def declare_runtime_outputs(model: ir.Model) -> bool:
    """Set, in place, dtype and shape of outputs of operators with a rewrite, which the standard's inference does not know.

    For a model of any opset. Each node is rewritten in a separate graph, and the inferred types are copied. Other nodes are
    inferred one by one, in order. Models without such operators stay unchanged.
    """
    has_any = any(find_rewrite(node) is not None for node in model.graph.all_nodes())
    if has_any:
        _declare(model.graph)
    return has_any


def _declare(graph: ir.Graph) -> None:
    for node in graph:
        for body in bodies(node):
            _declare(body)
        if find_rewrite(node) is not None:
            for output, result in zip(node.outputs, _tried(node, graph.opset_imports[""]), strict=False):
                if result is not None and result.value.type is not None:
                    output.type, output.shape = result.value.type, result.shape
        elif node.op_type in ("If", "Loop") and node.domain == "":
            _declare_of_bodies(node)
        elif any(output.type is None or output.shape is None for output in node.outputs):
            _infer(node, graph)


def _declare_of_bodies(node: ir.Node) -> None:
    returned = [body.outputs[node.op_type == "Loop" :] for body in bodies(node)]
    carried = len(node.outputs) if node.op_type == "If" else len(node.inputs) - 2
    for index, output in enumerate(node.outputs):
        values = [outputs[index] for outputs in returned]
        output.type = output.type or values[0].type
        shapes = [value.shape.dims for value in values if value.shape is not None]
        if output.shape is None and len({len(dims) for dims in shapes}) == 1 and len(shapes) == len(values):
            is_sure = node.op_type == "If"
            dims = [each[0] if is_sure and len(set(each)) == 1 else None for each in zip(*shapes, strict=True)]
            output.shape = ir.Shape(dims if index < carried else [None, *dims])


def _infer(node: ir.Node, graph: ir.Graph) -> None:
    declared = [(output.type, output.shape) for output in node.outputs]
    try:
        infer_outputs(node, graph.opset_imports)
    except BurnishError:
        return  # inference of the whole model reports the problem
    for output, (type_, shape) in zip(node.outputs, declared, strict=True):
        output.type, output.shape = output.type or type_, output.shape or shape


def _tried(node: ir.Node, opset: int) -> tuple[Tensor | None, ...]:
    if any(value is not None and value.dtype is None for value in node.inputs):
        return ()
    operands = [None if value is None else _stand_in(value, index) for index, value in enumerate(node.inputs)]
    copy = copy_of(node, operands)
    inputs = [operand for operand in operands if operand is not None]
    trial = ir.Graph(inputs, copy.outputs, nodes=[copy], opset_imports={node.domain: 1, "": max(opset, OLDEST_CANONICAL)})
    copy.name = node.name
    try:
        return _as_tuple(_rewritten(copy, trial))
    except BurnishError:
        if all(output.type is not None for output in node.outputs):
            return ()
        raise


def _stand_in(value: ir.Value, index: int) -> ir.Value:
    operand = ir.Value(name=f"operand{index}", type=value.type, shape=value.shape)
    array = constant_array(value) if value.shape is not None and _is_small(value.shape) else None
    operand.const_value = None if array is None else ir.Tensor(array)
    return operand


def _is_small(shape: ir.Shape) -> bool:
    return all(isinstance(extent, int) and extent <= _SMALL for extent in shape) and len(shape) < 2


def replace_runtime_operators(model: ir.Model) -> bool:
    """Replace, in place, runtime-specific operators that have a rewrite; return True if there were any.

    For a model of opset 18 or newer with inferred dtypes and shapes and named nodes. Includes graphs nested in nodes.

    Raises:
        ModelError: a node's attributes and operands do not fit together.
    """
    replaced: set[str] = set()
    for graph in list(model.graphs()):
        for node in list(graph):
            results = _rewritten(node, graph) if find_rewrite(node) is not None else None
            if results is not None:
                replaced.add(node.domain)
                if node.op_type in UNROUNDED:
                    told = f"{describe_node(node)} is read as a layer of floating-point numbers: {UNROUNDED[node.op_type]}"
                    DEPARTURES.set(model.graph, (*(DEPARTURES.get(model.graph) or ()), told))
                main = _main_node(node, results)
                replace_node(node, results)
                if main is not None:
                    main.name = node.name
                    main.metadata_props.update(node.metadata_props)
    for domain in replaced - {""} - {node.domain for node in model.graph.all_nodes()}:
        for graph in model.graphs():
            graph.opset_imports.pop(domain, None)
    return bool(replaced)


def _main_node(node: ir.Node, results: Results) -> ir.Node | None:
    """Return the replacement node that gets the name of the original, used for layer names: its product, else the last.

    None if nothing is computed.
    """
    operands, emitted = {value for value in node.inputs if value is not None}, dict[ir.Node, None]()
    pending = [tensor.value for tensor in reversed(_as_tuple(results)) if tensor is not None]
    while pending:
        value = pending.pop()
        producer = None if value in operands else value.producer()
        if producer is not None and producer not in emitted:
            emitted[producer] = None
            pending.extend(operand for operand in producer.inputs if operand is not None)
    products = [each for each in emitted if each.op_type in _PRODUCTS]
    return products[0] if len(products) == 1 else next(iter(emitted), None)


def _rewritten(node: ir.Node, graph: ir.Graph) -> Results:
    rule = find_rewrite(node)
    assert rule is not None
    try:
        return rule(Operation(node, Builder(graph, before=node)))
    except BurnishError:
        raise
    except Exception as error:  # no schema was available to check the node
        raise ModelError(
            f"{describe_node(node)} lacks an input or an attribute that its operator needs, or has some that do not fit: "
            "export the model again"
        ) from error


def _as_tuple(results: Results) -> tuple[Tensor | None, ...]:
    return results if isinstance(results, tuple) else (results,)
