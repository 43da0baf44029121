"""Convert models with training operators into models that every runtime runs."""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import TRAINING_DOMAIN
from burnish.importer import Source, load
from burnish.modes import bind_as_exported
from burnish.random import check_seed
from burnish.rewriting.draw_dropout import draw_dropout
from burnish.rewriting.expand_gradients import expand_gradients
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators
from burnish.rewriting.stages import STANDARD, Lowering
from burnish.targets import TargetLike, target_of


def lower(source: Source, *, seed: int = 0, target: TargetLike = "onnxruntime") -> ir.Model:
    """Turn a model with training operators into one of standard operators, for runtimes without training.

    ``Gradient`` of ``ai.onnx.preview.training`` becomes the operators of the reverse pass; ``Adam``, ``Adagrad`` and ``Momentum``
    become their formulas; batch normalization with ``training_mode=1`` uses the statistics of the batch; dropout in training mode
    draws its masks from ``seed``, the same ones in every run. All other nodes keep their mode. Values in bfloat16 are computed in
    float32, because processors have kernels for it; inputs and outputs keep their dtype.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; not modified.
        seed: seed for dropout masks of nodes without the attribute ``seed``; a signed 64-bit integer.
        target: runtime that the graph is lowered for: a name, a TOML file (``burnish.targets``), or a ``burnish.targets.Target``.

    Returns:
        A model with the inputs and outputs of the source, under the same names.

    Raises:
        ModelError: the source is not a valid ONNX model, or a training operator does not fit the values that it names.
        GradientError: a Gradient through an operator without a gradient, or of a value that is not floating-point.
        UnsupportedOperatorError: the target does not run an operator, such as a Gradient in a branch or loop body.
        ConfigurationError: the target is unknown, or the seed is not a 64-bit integer.
    """
    runtime = target_of(target)
    check_seed(seed)
    model = load(source)
    draw_dropout(model, seed)
    bind_as_exported(model.graph)
    lower_semantic_operators(model, domains=(TRAINING_DOMAIN,))
    expand_gradients(model)
    STANDARD.run(model, Lowering(runtime, in_float32=True))
    return model
