"""Compile a source model, a loss and an optimizer into the six graphs of a program.

The compiler itself is imported at the first call: a process that opens a saved program never loads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from burnish.compiler.options import DEFAULT_LOSS, CompileOptions
from burnish.graph import garbage_kept
from burnish.options import takes

if TYPE_CHECKING:
    from burnish import losses, metrics
    from burnish.importer import Source
    from burnish.program.program import Inference, Program
    from burnish.sample_axes import AskedAxes
    from burnish.targets import TargetLike


@takes(CompileOptions)
def compile(source: Source, options: CompileOptions) -> Program:
    """Compile a model into a training program of standard ONNX graphs.

    Args:
        source: path, bytes, ``onnx.ModelProto``, ``onnx_ir.Model`` or ``torch.nn.Module``; not modified.

    Returns:
        The program; nothing is run.

    Warns:
        ObjectiveWarning: the loss does not fit its input, such as probabilities for a loss that applies a Softmax itself; the
            results for a sample depend on the other samples of its batch; or the exporter merged weights, split one into two,
            folded batch normalization into layers that train, or left scalars that look like parameters and train only if
            ``trainable`` names them.
        DenseGradientWarning: ``sparse`` selects a table, but a step still reads and writes all of its rows; the warning gives the
            reason.
        UntrainedWeightsWarning: no gradient reaches weights that ``trainable`` selects and the optimizer does not freeze: an
            operator such as Round or ArgMax blocks it, they are integers, or the loss does not depend on them.

    Raises:
        ModelError: the source is not a valid ONNX model.
        ConfigurationError: an option does not fit the model; the sample axis is ambiguous; or no step fits ``memory`` (the
            message lists the largest parts and remedies).
        GradientError: an operator between a trained weight and the loss has no gradient.
        UnsupportedOperatorError: an operator cannot be trained or lowered, or cannot take several samples if ``batch="open"``.
    """
    return compiled(source, options)


def compiled(source: Source, options: CompileOptions) -> Program:
    """Compile a model with options given as an object; ``compile`` takes them as keyword arguments."""
    from burnish.compiler.differentiate import differentiate
    from burnish.compiler.link import link
    from burnish.compiler.prepare import prepare

    with garbage_kept():
        model = prepare(source, options)
        drafts = differentiate(model, options)
        return link(drafts, options)


@garbage_kept()
def compile_inference(
    source: Source,
    *,
    loss: losses.LossLike | None = None,
    metrics: Sequence[str | metrics.Metric] | None = None,
    outputs: str | Sequence[str] | None = None,
    sample_axis: AskedAxes = None,
    target: TargetLike = "onnxruntime",
) -> Inference:
    """Compile a model for prediction and evaluation only. Nothing is differentiated, so any model that the runtime runs will do.

    Args:
        source, metrics, outputs, sample_axis, target: as for ``compile``.
        loss: as for ``compile``; None leaves out the graph ``evaluate``.

    Warns:
        ObjectiveWarning: the loss does not fit its input, or the samples of a batch are mixed, as for ``compile``.

    Raises:
        ModelError, ConfigurationError, UnsupportedOperatorError: as for ``compile``.
    """
    from burnish.compiler.link import link_inference
    from burnish.compiler.prepare import prepare_inference

    options = CompileOptions(
        loss=DEFAULT_LOSS if loss is None else loss, metrics=metrics, outputs=outputs, sample_axis=sample_axis, target=target
    )
    model = prepare_inference(source, options, evaluates=loss is not None)
    return link_inference(model, options, evaluates=loss is not None)
