"""Compilation: a source model, a loss and an optimizer become the six graphs of a program.

The first call imports the compiler: a process that opens a saved program never loads it.
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
        source: path, bytes, ``onnx.ModelProto``, ``onnx_ir.Model`` or ``torch.nn.Module``; left as it is.

    Returns:
        The program; nothing is run.

    Warns:
        ObjectiveWarning: the loss reads what it is not made for, such as probabilities where it applies a Softmax itself; what
            the model computes of a sample depends on the others of its batch; or what exported the model merged weights, made
            two of one, folded batch normalization into layers that train, or left scalars that look like parameters, and do not
            train unless ``trainable`` names them.
        DenseGradientWarning: ``sparse`` asks for a table whose every row a step reads and writes all the same, with the reason.
        UntrainedWeightsWarning: no gradient reaches weights that ``trainable`` selects, and the optimizer does not freeze: an
            operator such as Round or ArgMax stands in the way, they are integers, or the loss does not depend on them.

    Raises:
        ModelError: the source is not a valid ONNX model.
        ConfigurationError: an option does not fit the model; the model leaves open which axis holds the samples; or no step fits
            ``memory``, with what takes it and what would help.
        GradientError: an operator between a trained weight and the loss has no gradient.
        UnsupportedOperatorError: an operator cannot be trained or lowered as it stands, or cannot take several samples where the
            batch is to be opened.
    """
    return compiled(source, options)


def compiled(source: Source, options: CompileOptions) -> Program:
    """Compile a model with options that are there as an object; see ``compile``, which takes them as keyword arguments."""
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
    """Compile a model to predict and to be evaluated with. Nothing is differentiated: any model that a runtime runs will do.

    Args:
        source, metrics, outputs, sample_axis, target: as ``compile`` takes them.
        loss: the same; None leaves the graph ``evaluate`` out.

    Warns:
        ObjectiveWarning: the loss reads what it is not made for, or samples of a batch are mixed, as in ``compile``.

    Raises:
        ModelError, ConfigurationError, UnsupportedOperatorError: as ``compile``.
    """
    from burnish.compiler.link import link_inference
    from burnish.compiler.prepare import prepare_inference

    options = CompileOptions(
        loss=DEFAULT_LOSS if loss is None else loss, metrics=metrics, outputs=outputs, sample_axis=sample_axis, target=target
    )
    model = prepare_inference(source, options, evaluates=loss is not None)
    return link_inference(model, options, evaluates=loss is not None)
