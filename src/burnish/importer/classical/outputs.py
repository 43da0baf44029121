"""Outputs of classifiers: class labels, and ZipMap, a dictionary per row of scores.

ZipMap is removed when a file is read and restored when it is written, since a graph of tensors cannot hold it and it computes
nothing. In between, the output is the tensor of scores.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import Names, constant_array
from burnish.graph.annotations import CLASS_NUMBERS, CLASSES, ZIP_MAPS
from burnish.graph.uses import origin_of, producer_of
from burnish.importer.classical.inference import CLASSICAL_DOMAIN
from burnish.untrusted_files import UNREADABLE

_PASSES = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})


def note_class_labels(model: ir.Model) -> None:
    """Record a classifier's class names in the metadata, in place, unless they are there.

    Labels are gathered from constant texts or integers at the index of the largest score; the integers 0, 1, 2, ... are no names.
    """
    if CLASSES.is_on(model):
        return
    for output in model.graph.outputs:
        labels = _labels(output)
        if labels is None:
            continue
        if labels.dtype.kind in "iu":
            if np.array_equal(labels, np.arange(labels.size)):
                continue
            CLASS_NUMBERS.set(model, labels.tolist())
            names = [str(label) for label in labels.tolist()]
        else:
            names = [label.decode() if isinstance(label, bytes) else str(label) for label in labels.tolist()]
        CLASSES.set(model, names)
        return


def _labels(output: ir.Value) -> np.ndarray | None:
    node = producer_of(origin_of(output, _PASSES), "Gather")
    if node is None or None in node.inputs:
        return None
    table, index = (origin_of(value, _PASSES) for value in node.inputs if value is not None)
    array = constant_array(table)
    if producer_of(index, "ArgMax", "Greater") is None or array is None or array.dtype.kind not in "iuSUO":
        return None
    return array.reshape(-1)


def without_zip_maps(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a proto with final ZipMaps replaced by Identity and recorded in the metadata; the same proto if there are none."""
    if not any(map(_is_zip_map, proto.graph.node)):
        return proto
    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    outputs = {value.name: value for value in changed.graph.output}
    maps: dict[str, dict[str, Any]] = {}
    for node in changed.graph.node:
        if not _is_zip_map(node) or node.output[0] not in outputs:
            continue
        attributes = {attribute.name: _texts(onnx.helper.get_attribute_value(attribute)) for attribute in node.attribute}
        maps[node.output[0]] = attributes
        node.op_type, node.domain = "Identity", ""
        node.ClearField("attribute")
        columns = max(map(len, attributes.values()), default=0)
        kind = onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [None, columns or None])
        outputs[node.output[0]].type.CopyFrom(kind)
    infos = [value for value in changed.graph.value_info if value.name not in maps]
    changed.graph.ClearField("value_info")
    changed.graph.value_info.extend(infos)
    onnx.helper.set_model_props(changed, {**_metadata(changed), ZIP_MAPS.key: ZIP_MAPS.write(maps)})
    return changed


def number_zip_maps(model: ir.Model, output: str, classes: int) -> None:
    """Let the exported dictionaries of an output have this many classes, named by number, in place.

    Keys that were texts become texts of the numbers.
    """
    maps = _maps(model.metadata_props.get(ZIP_MAPS.key, "{}"))
    for name, labels in maps.get(output, {}).items():
        if isinstance(labels, list) and len(labels) != classes:
            maps[output][name] = [str(number) if name == "classlabels_strings" else number for number in range(classes)]
            ZIP_MAPS.set(model, maps)


def _maps(text: str) -> dict[str, dict[str, Any]]:
    try:
        return {str(output): dict(attributes) for output, attributes in ZIP_MAPS.read(text).items()}
    except UNREADABLE as error:
        raise ModelError(
            f"the model's metadata '{ZIP_MAPS.key}' cannot be read ({error!r}): export the model again, or remove that entry"
        ) from error


def restore_zip_maps(proto: onnx.ModelProto) -> None:
    """Restore, in place, each ZipMap from ``without_zip_maps``, and remove the metadata entry."""
    metadata = _metadata(proto)
    if ZIP_MAPS.key not in metadata:
        return
    maps = _maps(metadata.pop(ZIP_MAPS.key))
    onnx.helper.set_model_props(proto, metadata)
    graph = proto.graph
    values = (name for node in graph.node for name in (*node.input, *node.output))
    names, node_names = Names([*values, *(value.name for value in graph.output)]), Names(node.name for node in graph.node)
    restored = False
    for output in graph.output:
        if output.name not in maps or output.type.tensor_type.elem_type != onnx.TensorProto.FLOAT:
            continue
        scores = names.take(f"{output.name}:scores")
        for node in graph.node:
            for field in (node.input, node.output):
                field[:] = [scores if name == output.name else name for name in field]
        attributes = maps[output.name]
        graph.node.append(
            onnx.helper.make_node(
                "ZipMap", [scores], [output.name], name=node_names.take("ZipMap"), domain=CLASSICAL_DOMAIN, **attributes
            )
        )
        key = onnx.TensorProto.STRING if "classlabels_strings" in attributes else onnx.TensorProto.INT64
        entry = onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [])
        output.type.CopyFrom(onnx.helper.make_sequence_type_proto(onnx.helper.make_map_type_proto(key, entry)))
        restored = True
    if restored and not any(imported.domain == CLASSICAL_DOMAIN for imported in proto.opset_import):
        proto.opset_import.append(onnx.helper.make_opsetid(CLASSICAL_DOMAIN, 1))


def _is_zip_map(node: onnx.NodeProto) -> bool:
    return node.op_type == "ZipMap" and node.domain == CLASSICAL_DOMAIN


def _metadata(proto: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in proto.metadata_props}


def _texts(value: Any) -> Any:
    return [item.decode() if isinstance(item, bytes) else item for item in value]
