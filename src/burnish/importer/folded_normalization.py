"""Layers into which batch normalization was folded, as far as what wrote the file says so."""

from __future__ import annotations

import re

import onnx_ir as ir

from burnish.graph.uses import producer_of

FOLDED = "burnish.folded_normalization"
"""The note of a node into which burnish folded a batch normalization: its name."""

_RULES = "pkg.onnxscript.rewriter.rule_name"
_RULE = "FuseBatchNormInto"
_COMPUTED_AHEAD = re.compile(r"onnx::Conv_\d+")
"""What PyTorch's older exporter calls the operands of a convolution that it computed; parameters keep their own names."""
_RUNTIME_PREFIX = "ConvBnFusion_"
_TENSORFLOW_BIAS = re.compile(r".*(/batchnorm/sub|_bias_fused_bn)(:0)?")
"""The bias that TensorFlow's graph optimizer leaves of Keras' layer, beta - mean * scale, and what tf2onnx calls its own."""
_AUTHORS_WHO_FOLD = frozenset({"Ultralytics"})
_LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def folded_layers(model: ir.Model) -> dict[str, str]:
    """Return the layers that hold a folded batch normalization: weight's name -> bias's name, empty where there is none.

    Known are the files of both exporters of PyTorch, TensorFlow, tf2onnx, ONNX Runtime's optimizer, Ultralytics and burnish. Of a
    file that says nothing nothing is said: a network that was built without normalization looks the same. A layer that is
    followed by batch normalization has got a new one since.

    Args:
        model: a canonical model.
    """
    author = model.metadata_props.get("author")
    layers: dict[str, str] = {}
    for node in model.graph.all_nodes():
        if node.domain != "" or node.op_type not in _LAYERS or len(node.inputs) < 2 or _is_normalized(node):
            continue
        names = [_initializer(value) for value in node.inputs[1:3]]
        if names[0] and (says_folded(node) or _is_named_so(names) or _is_of_author(node, names, author)):
            layers[names[0]] = names[1] if len(names) > 1 else ""
    return layers


def says_folded(node: ir.Node) -> bool:
    """Whether a note at a node says that a batch normalization was folded into it."""
    return FOLDED in node.metadata_props or _RULE in node.metadata_props.get(_RULES, "")


def _is_named_so(names: list[str]) -> bool:
    computed = all(_COMPUTED_AHEAD.fullmatch(name) for name in names)
    if len(names) != 2:
        return False
    return computed or all(name.startswith(_RUNTIME_PREFIX) for name in names) or bool(_TENSORFLOW_BIAS.fullmatch(names[1]))


def _is_of_author(node: ir.Node, names: list[str], author: str | None) -> bool:
    """Whether a convolution has the bias of one that was folded, in a file of those who fold all before they export."""
    return author in _AUTHORS_WHO_FOLD and node.op_type == "Conv" and len(names) == 2 and bool(names[1])


def _initializer(value: ir.Value | None) -> str:
    """The name of an operand that is an initializer, or one that is transposed; else nothing."""
    while value is not None and (producer := producer_of(value, "Transpose", "Identity", "Reshape")) is not None:
        value = producer.inputs[0]
    return value.name or "" if value is not None and value.is_initializer() else ""


def _is_normalized(node: ir.Node) -> bool:
    return any(user.op_type == "BatchNormalization" for user in node.outputs[0].consumers())
