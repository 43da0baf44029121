"""Models that hold training operators, as models that every runtime runs."""

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
    """Turn a model with training operators into one of standard operators that runtimes without training run.

    ``Gradient`` of ``ai.onnx.preview.training`` becomes the operators of the reverse pass, ``Adam``, ``Adagrad`` and ``Momentum``
    their formulas, batch normalization with ``training_mode=1`` the batch's statistics, and dropout in training mode draws its
    masks from ``seed``: the same ones in every run. Nothing else changes its mode. What a file has in bfloat16 is computed in
    float32, for which processors have kernels; inputs and outputs keep their dtype.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; left as it is.
        seed: of dropout masks whose node has no ``seed`` attribute; a signed 64-bit integer.
        target: the runtime that the graph is lowered for: a name, the TOML file of one (``burnish.targets``), or a
            ``burnish.targets.Target``.

    Returns:
        A model with the source's inputs and outputs, under their names.

    Raises:
        ModelError: the source is not a valid ONNX model, or one of these operators does not fit what it names.
        GradientError: a Gradient through an operator without one, or of a value that is not floating-point.
        UnsupportedOperatorError: an operator that the target does not run, such as a Gradient in a branch or loop body.
        ConfigurationError: an unknown target, or a seed that is no integer of 64 bits.
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
