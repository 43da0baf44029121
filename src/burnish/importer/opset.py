"""Upgrade of models from older opsets, change by change.

Each change of an operator between opset 7 and 18 has a function, registered for the new version, that rewrites a node of the
previous version. Nodes that it adds have the form of opset 18. Versions that only add types, or options that default to the old
meaning, need none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from burnish.errors import ModelError, UnsupportedOperatorError
from burnish.graph import SIXTEEN_BIT, attribute_value, constant_array, describe_node, replace_uses
from burnish.graph.protos import graphs_within
from burnish.graph.uses import is_used

Change = Callable[[ir.Node], None]

CHANGES: dict[tuple[str, int], Change] = {}
"""Operator and opset of a change -> its function."""


def change(version: int, *op_types: str) -> Callable[[Change], Change]:
    """Register the change of operators at an opset."""

    def register(rule: Change) -> Change:
        for op_type in op_types:
            CHANGES[op_type, version] = rule
        return rule

    return register


def _attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    attribute = node.attributes.pop(name, None)
    if attribute is None:
        return default
    if attribute.is_ref():
        raise UnsupportedOperatorError(
            f"{describe_node(node)} takes '{name}' from an attribute of a function of an older opset: "
            "export the model with functions inlined"
        )
    if attribute.type in (ir.AttributeType.INTS, ir.AttributeType.FLOATS):
        return list(attribute.value)
    return attribute.value


def _emit(before: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], **attributes: Any) -> ir.Value:
    node = ir.node(op_type, inputs, attributes)
    assert before.graph is not None
    before.graph.insert_before(before, node)
    return node.outputs[0]


def _emit_after(node: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], **attributes: Any) -> ir.Value:
    new = ir.node(op_type, inputs, attributes)
    assert node.graph is not None
    node.graph.insert_after(node, new)
    return new.outputs[0]


def _constant(before: ir.Node, array: np.ndarray) -> ir.Value:
    value = _emit(before, "Constant", [], value=ir.tensor(array))
    value.dtype = ir.DataType.from_numpy(array.dtype)
    value.shape = ir.Shape(array.shape)
    return value


def _integers(before: ir.Node, numbers: Sequence[int]) -> ir.Value:
    return _constant(before, np.asarray(numbers, dtype=np.int64))


def _scalar_like(before: ir.Node, number: float, like: ir.Value) -> ir.Value:
    if like.dtype is not None:
        return _constant(before, np.asarray(number, dtype=like.dtype.numpy()))
    return _emit(before, "CastLike", [_constant(before, np.asarray(number, dtype=np.float32)), like])


def _set_input(node: ir.Node, index: int, value: ir.Value | None) -> None:
    if index >= len(node.inputs):
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)


def _first(node: ir.Node) -> ir.Value:
    value = node.inputs[0]
    assert value is not None
    return value


def _take_over_uses(old: ir.Value, new: ir.Value, keep: ir.Node | None = None) -> None:
    """Replace ``old`` by ``new`` for all other nodes and graph outputs, including its name."""
    name, old.name = old.name, None
    new.name, new.type, new.shape = name, old.type, old.shape
    places = [(usage.node, usage.idx) for usage in old.uses() if usage.node is keep]
    replace_uses(old, new)
    for node, index in places:
        node.replace_input_with(index, old)


def _present(value: ir.Value | None) -> bool:
    return value is not None and is_used(value)


@change(9, "BatchNormalization")
def batch_normalization_over_channels(node: ir.Node) -> None:
    """Replace ``spatial=0``, a statistic per position: each position of each channel becomes a channel."""
    if _attribute(node, "spatial", 1) == 1:
        return
    if any(map(_present, node.outputs[1:])):
        raise UnsupportedOperatorError(
            f"{describe_node(node)} has spatial=0, a statistic for every position, and the model reads the statistics that it "
            "returns, which later opsets have for channels alone: remove these outputs, or export the model with spatial=1"
        )
    data, result = _first(node), node.outputs[0]
    node.replace_input_with(0, _emit(node, "Flatten", [data], axis=1))
    for index, operand in enumerate(node.inputs[1:5], start=1):
        if operand is not None:
            node.replace_input_with(index, _flattened(node, operand))
    node.resize_outputs(1)
    shape = _emit(node, "Shape", [data])
    _take_over_uses(result, restored := _emit_after(node, "Reshape", [result, shape]), keep=restored.producer())


def _flattened(node: ir.Node, operand: ir.Value) -> ir.Value:
    array = constant_array(operand) if operand.is_initializer() and len(operand.uses()) == 1 else None
    if array is None:
        return _emit(node, "Reshape", [operand, _integers(node, [-1])])
    operand.const_value = ir.Tensor(array.reshape(-1), name=operand.name)
    operand.shape = ir.Shape([array.size])
    return operand


@change(14, "BatchNormalization")
def batch_normalization_mode(node: ir.Node) -> None:
    """Set the mode, formerly implied by the number of outputs; outputs 3 and 4 were the batch's mean and population variance."""
    named = [output for output in node.outputs[1:] if output.name or _present(output)]
    saved = node.outputs[3:]
    if any(_present(output) for output in saved):
        for output, statistic in zip(saved, _batch_statistics(node), strict=False):
            if _present(output):
                _take_over_uses(output, statistic)
    if named:
        node.resize_outputs(3)
        for output, what in zip(node.outputs[1:], ("mean", "variance"), strict=True):
            output.name = output.name or f"{node.outputs[0].name}_running_{what}"  # later opsets have both or neither
        node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
    else:
        node.resize_outputs(1)


def _batch_statistics(node: ir.Node) -> tuple[ir.Value, ir.Value]:
    """Return each channel's mean and population variance over the batch, in the data's dtype.

    16-bit data is summed in float32. The variance is that of x - mean, centred once more, so a mean far from zero loses no digits
    (Chan, Golub, LeVeque 1983).
    """
    data = _first(node)
    if data.shape is None:
        raise UnsupportedOperatorError(
            f"{describe_node(node)} gives its saved mean or variance, and the rank of its input '{data.name}' is not known: "
            "declare the shapes of the model's inputs"
        )
    dtype = data.dtype
    if dtype in SIXTEEN_BIT:
        data = _emit(node, "Cast", [data], to=int(ir.DataType.FLOAT))
    axes = _integers(node, [axis for axis in range(len(_first(node).shape or ())) if axis != 1])
    mean = _emit(node, "ReduceMean", [data, axes], keepdims=1)
    centred = _emit(node, "Sub", [data, mean])
    shift = _emit(node, "ReduceMean", [centred, axes], keepdims=1)
    deviation = _emit(node, "Sub", [centred, shift])
    variance = _emit(node, "ReduceMean", [_emit(node, "Mul", [deviation, deviation]), axes], keepdims=0)
    mean = _emit(node, "Squeeze", [_emit(node, "Add", [mean, shift]), axes])
    if dtype in SIXTEEN_BIT:
        assert dtype is not None
        mean, variance = (_emit(node, "Cast", [value], to=int(dtype)) for value in (mean, variance))
    return mean, variance


@change(9, "Scan")
def scan_without_batch(node: ir.Node) -> None:
    """Refuse Scan of opset 8, which had a batch axis."""
    raise UnsupportedOperatorError(
        f"{describe_node(node)} is a Scan of opset 8, whose batch axis later opsets do not have: export the model with opset 9 "
        "or later"
    )


@change(9, "Upsample")
def upsample_scales(node: ir.Node) -> None:
    scales = _attribute(node, "scales", [])
    _set_input(node, 1, _constant(node, np.asarray(scales, dtype=np.float32)))


@change(10, "Upsample")
def upsample_is_resize(node: ir.Node) -> None:
    node.op_type = "Resize"
    # Later changes of this node apply to its new operator.
    if not isinstance(node.attributes.get("mode"), ir.Attr):
        node.attributes["mode"] = ir.AttrString("mode", "nearest")


@change(11, "Resize")
def resize_coordinates(node: ir.Node) -> None:
    """Convert Resize of opset 10, with asymmetric coordinates; nearest rounds down to enlarge and up to reduce.

    If both may occur, on two axes or for scales known only at run time, it becomes two nodes, enlarging first.
    """
    data, scales = _first(node), node.inputs[1]
    array = constant_array(scales)
    mode = attribute_value(node, "mode", "nearest")
    node.attributes["coordinate_transformation_mode"] = ir.AttrString("coordinate_transformation_mode", "asymmetric")
    node.attributes["nearest_mode"] = ir.AttrString("nearest_mode", "floor")
    _set_input(node, 2, scales)
    _set_input(node, 1, None)
    if mode != "nearest" or (array is not None and (array >= 1).all()):
        return
    if array is None or not (array <= 1).all():
        enlarged = _emit(
            node,
            "Resize",
            [data, None, _bounded(node, scales, array, np.maximum)],
            mode="nearest",
            coordinate_transformation_mode="asymmetric",
            nearest_mode="floor",
        )
        enlarged.type = data.type
        node.replace_input_with(0, enlarged)
        node.replace_input_with(2, _bounded(node, scales, array, np.minimum))
    node.attributes["nearest_mode"] = ir.AttrString("nearest_mode", "ceil")


def _bounded(before: ir.Node, scales: ir.Value | None, array: np.ndarray | None, bound: np.ufunc) -> ir.Value:
    """Return scales of at least 1 (``np.maximum``) or at most 1 (``np.minimum``); ``array`` if they are constant."""
    if array is not None:
        return _constant(before, bound(array, 1).astype(np.float32))
    one = _constant(before, np.asarray(1, dtype=np.float32))
    return _emit(before, "Max" if bound is np.maximum else "Min", [scales, one])


@change(13, "Resize")
def resize_optional_inputs(node: ir.Node) -> None:
    """Omit unused inputs, which were empty tensors, and rename one coordinate mode."""
    for index in (1, 2):
        array = constant_array(node.inputs[index]) if index < len(node.inputs) else None
        if array is not None and array.size == 0:
            node.replace_input_with(index, None)
    mode = node.attributes.get("coordinate_transformation_mode")
    if mode is None or mode.value != "tf_half_pixel_for_nn":
        return
    nearest = node.attributes.get("nearest_mode")
    if nearest is None or nearest.value != "floor":
        raise UnsupportedOperatorError(
            f"{describe_node(node)} has the coordinates 'tf_half_pixel_for_nn' with a nearest_mode other than 'floor', which "
            "later opsets do not have: export the model with opset 13 or later"
        )
    # floor((i + 0.5) / s) = floor(((i + 0.5) / s - 0.5) + 0.5)
    node.attributes["coordinate_transformation_mode"] = ir.AttrString("coordinate_transformation_mode", "half_pixel")
    node.attributes["nearest_mode"] = ir.AttrString("nearest_mode", "round_prefer_ceil")


@change(10, "Dropout")
def dropout_mask_is_bool(node: ir.Node) -> None:
    """Convert a mask with the dtype of the data."""
    if len(node.outputs) < 2:
        return
    mask = node.outputs[1]
    dtype = _first(node).dtype or ir.DataType.FLOAT
    if _present(mask):
        cast = _emit_after(node, "Cast", [mask], to=int(dtype))
        assert cast.producer() is not None
        _take_over_uses(mask, cast, keep=cast.producer())
    mask.dtype = ir.DataType.BOOL


@change(12, "Dropout")
def dropout_ratio_input(node: ir.Node) -> None:
    """Make the ratio an input; the mode, an input in later opsets, stays the default: inference."""
    _set_input(node, 1, _constant(node, np.asarray(_attribute(node, "ratio", 0.5), dtype=np.float32)))


@change(11, "Clip")
def clip_bounds(node: ir.Node) -> None:
    lower, upper = _attribute(node, "min"), _attribute(node, "max")
    for index, bound in ((1, lower), (2, upper)):
        if bound is not None:
            _set_input(node, index, _scalar_like(node, bound, _first(node)))


@change(11, "Pad")
def pad_inputs(node: ir.Node) -> None:
    _set_input(node, 1, _integers(node, _attribute(node, "pads")))
    value = _attribute(node, "value", 0.0)
    if value != 0.0:
        _set_input(node, 2, _scalar_like(node, value, _first(node)))


@change(11, "Scatter")
def scatter_elements(node: ir.Node) -> None:
    node.op_type = "ScatterElements"


_REDUCTIONS = [f"Reduce{name}" for name in "L1 L2 LogSum LogSumExp Max Mean Min Prod SumSquare".split()]


@change(10, "Slice")
@change(10, "TopK")
@change(13, "Split", "Squeeze", "Unsqueeze", "ReduceSum")
@change(18, *_REDUCTIONS)
def integer_inputs(node: ir.Node) -> None:
    """Make integer attributes inputs."""
    names = {"Slice": ("starts", "ends", "axes"), "TopK": ("k",), "Split": ("split",)}.get(node.op_type, ("axes",))
    for index, name in enumerate(names, start=1):
        numbers = _attribute(node, name)
        if numbers not in (None, []):
            _set_input(node, index, _integers(node, numbers if isinstance(numbers, list) else [numbers]))


@change(18, "Split")
def split_count(node: ir.Node) -> None:
    if len(node.inputs) < 2 or node.inputs[1] is None:
        node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))


@change(13, "Softmax", "LogSoftmax", "Hardmax")
def normalize_one_axis(node: ir.Node) -> None:
    """Normalize rows of the input as a matrix split before ``axis``."""
    data = _first(node)
    axis = int(_attribute(node, "axis", 1))
    rank = None if data.shape is None else len(data.shape)
    # With axis equal to the rank, forbidden since opset 11, every row is one element.
    if axis == -1 or axis + 1 == rank:
        node.attributes["axis"] = ir.AttrInt64("axis", -1)
        return
    shape = _emit(node, "Shape", [data])
    node.replace_input_with(0, _emit(node, "Flatten", [data], axis=axis))
    node.attributes["axis"] = ir.AttrInt64("axis", -1)
    output = node.outputs[0]
    restored = _emit_after(node, "Reshape", [output, shape])
    _take_over_uses(output, restored, keep=restored.producer())
    output.type, output.shape = data.type, None


@change(16, "RoiAlign")
def roi_align_coordinates(node: ir.Node) -> None:
    """Set the old default of the coordinates."""
    if "coordinate_transformation_mode" not in node.attributes:
        mode = ir.AttrString("coordinate_transformation_mode", "output_half_pixel")
        node.attributes["coordinate_transformation_mode"] = mode


OLDEST_READ = 7
OLDEST_CANONICAL = 18


def check_opset(model: ir.Model) -> None:
    """Raise ModelError for an opset before 7 or newer than that of the installed ``onnx``."""
    newest = onnx.defs.onnx_opset_version()
    imports = [model.opset_imports, *(function.opset_imports for function in model.functions.values())]
    if "" not in model.opset_imports:
        versions = [imported[""] for imported in imports if "" in imported]
        model.opset_imports[""] = max(versions, default=OLDEST_CANONICAL)
    for imported in imports:
        opset = imported.get("", newest)
        if opset < OLDEST_READ:
            raise ModelError(
                f"the model is of opset {opset}, and burnish reads {OLDEST_READ} to {newest}: export it again, or convert it "
                "with onnx.version_converter"
            )
        if opset > newest:
            raise ModelError(
                f"the model is of opset {opset}, and the installed onnx {onnx.__version__} knows {newest} at most: "
                "update onnx, or export the model with an older opset"
            )


def declare_opset(model: ir.Model) -> bool:
    """Declare the model's opset in every body, in place: builders ask the graph for it."""
    declared = model.opset_imports[""]
    silent = [graph for graph in model.graphs() if graph.opset_imports.get("") != declared]
    for graph in silent:
        graph.opset_imports[""] = declared
    return bool(silent)


def upgrade_opset(model: ir.Model) -> bool:
    """Upgrade a model below opset 18 to 18, in place; return True if it was.

    Raises:
        UnsupportedOperatorError: an old operator has no equivalent in the new opset.
    """
    opset = model.opset_imports[""]
    target = max(opset, OLDEST_CANONICAL)
    upgrade_graph(model.graph, opset, target)
    model.opset_imports[""] = target
    declare_opset(model)
    # Upgraded graphs may use types that older files cannot declare; ir_version 8 came with opset 15 to 18.
    model.ir_version = max(model.ir_version, 8)
    return opset < target


def upgrade_graph(graph: ir.Graph, opset: int, target: int) -> None:
    """Upgrade, in place, the nodes of a graph and its subgraphs to a newer opset, change by change."""
    if opset >= target:
        return
    for node in list(graph.all_nodes()):
        if node.domain != "":
            continue
        for version in range(opset + 1, target + 1):
            change = CHANGES.get((node.op_type, version))
            if change is not None:
                change(node)


def normalize_proto_domains(proto: onnx.ModelProto) -> None:
    """Rename the domain ``ai.onnx`` to ``""`` in a proto, in place, for the checker."""
    for imported in (*proto.opset_import, *(imported for function in proto.functions for imported in function.opset_import)):
        if imported.domain == "ai.onnx":
            imported.domain = ""
    for node in (node for graph in graphs_within(proto.graph, *proto.functions) for node in graph.node):
        if node.domain == "ai.onnx":
            node.domain = ""


def normalize_domains(model: ir.Model) -> bool:
    """Rename an imported domain ``"ai.onnx"`` to ``""``, in place, as ``onnx_ir`` does in nodes.

    Raises:
        ModelError: the model imports both names, in different versions.
    """
    changed = False
    for imports in (model.opset_imports, *(function.opset_imports for function in model.functions.values())):
        spelled_out = imports.pop("ai.onnx", None)
        changed |= spelled_out is not None
        if spelled_out is not None and imports.setdefault("", spelled_out) != spelled_out:
            raise ModelError(
                f"the model imports the standard operators in two versions: '' {imports['']} and 'ai.onnx' {spelled_out}. "
                "Export it again with one opset"
            )
    return changed
