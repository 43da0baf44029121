"""The recognition passes together: those for every graph of a program, and those for its training graph alone."""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph.uses import is_used
from burnish.rewriting.recognize_gelu import recognize_gelu
from burnish.rewriting.recognize_group_normalization import hold_group_normalization_constants, recognize_group_normalization
from burnish.rewriting.recognize_layer_normalization import recognize_layer_normalization
from burnish.rewriting.recognize_probabilities import recognize_probabilities
from burnish.rewriting.recognize_rms_normalization import OPSET as RMS_OPSET
from burnish.rewriting.recognize_rms_normalization import recognize_rms_normalization


def recognize_normalization(model: ir.Model) -> ir.Model:
    """Replace, in place, what an exporter wrote out in pieces by the standard's operators: normalization layers, GELU,
    Softmax and Sigmoid.

    Only by those that runtimes have kernels for: LayerNormalization, Gelu, and RMSNormalization in a model of opset 23 or later.
    An older model is not raised to opset 23 for it: ONNX Runtime has no CPU kernels for what some operators became in opset 22.

    Args:
        model: a canonical model (``burnish.importer.load``).

    Returns:
        The same model, for the same outputs; parameters keep their names, and constants that are read no more are gone.
    """
    initializers = model.graph.initializers
    unread = {name for name, value in initializers.items() if not value.uses()}
    recognize_layer_normalization(model)
    recognize_gelu(model)
    recognize_probabilities(model)
    hold_group_normalization_constants(model)
    if model.opset_imports[""] >= RMS_OPSET:
        recognize_rms_normalization(model)
    for name, value in list(initializers.items()):
        if not is_used(value) and name not in unread:
            del initializers[name]
    return model


def recognize_training_normalization(model: ir.Model) -> ir.Model:
    """Replace, in place, also what gets a form of its own in a training graph: group and RMS normalization.

    The opset may be raised for them; they are gone when the graph is bound to training.

    Returns:
        The same model, for the same outputs; parameters keep their names.
    """
    recognize_group_normalization(model)
    recognize_rms_normalization(model)
    return model
