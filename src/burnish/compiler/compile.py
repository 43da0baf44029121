"""Compilation: a source model, a loss and an optimizer become the six graphs of a program.

The first call imports the compiler: a process that opens a saved program never loads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from burnish.graph import garbage_kept

if TYPE_CHECKING:
    from burnish import losses, metrics, optim
    from burnish.compiler.cached_features import CachedFeatures
    from burnish.compiler.selection import HoldRows, Trainable
    from burnish.compiler.sparse_tables import SparseOption
    from burnish.importer import Bind, Source
    from burnish.norms import NormPolicy
    from burnish.program.inference import Inference
    from burnish.program.program import Program
    from burnish.rewriting.precision import Precision
    from burnish.rewriting.recompute_request import RecomputeOption
    from burnish.sample_axes import AskedAxes
    from burnish.targets import TargetLike


@garbage_kept()
def compile(
    source: Source,
    *,
    example_inputs: Any = None,
    dynamic_shapes: Any = None,
    loss: losses.LossLike = "cross_entropy",
    optimizer: str | optim.Optimizer = "sgd",
    trainable: Trainable = None,
    norm: str | NormPolicy | Mapping[str, str | NormPolicy] = "auto",
    metrics: Sequence[str | metrics.Metric] | None = None,
    precision: Precision = "float32",
    outputs: str | Sequence[str] | None = None,
    output: str | None = None,
    running_variance: str | None = None,
    recompute: RecomputeOption = None,
    memory: str | int | None = None,
    hold_rows: HoldRows = None,
    sparse: SparseOption = None,
    cached_features: CachedFeatures = None,
    batch: str | None = None,
    sample_axis: AskedAxes = None,
    bind: Bind = None,
    steps_per_epoch: int | None = None,
    target: TargetLike = "onnxruntime",
    verify: bool = True,
) -> Program:
    """Compile a model into a training program of standard ONNX graphs.

    Args:
        source: path, bytes, ``onnx.ModelProto``, ``onnx_ir.Model`` or ``torch.nn.Module``; left as it is.
        example_inputs, dynamic_shapes: of a module: what it is called with, and which axes are open (``burnish.load``). A module
            also says what trains (``requires_grad``), which rows are held (``padding_idx``) and what each batch normalization
            does (``train()``, ``eval()``, ``momentum``): ``trainable``, ``hold_rows`` and ``norm`` may say otherwise.
        loss: a name out of ``burnish.losses.LOSSES``, with settings behind a colon (``huber:delta=0.5``); an object of
            ``burnish.losses``; or an ONNX graph (path, ``ModelProto`` or ``onnx_ir.Model``) whose inputs are named as the model's
            outputs, or else are labels.
        optimizer: a name out of ``burnish.optim.OPTIMIZERS``, with settings behind a colon (``rmsprop:centered=true``), or an
            object of ``burnish.optim``.
        trainable: None trains every weight, of a model with adapters (``burnish.surgery.lora``) these alone; else names,
            shell-style patterns, or a predicate over (name, array).
        norm: policy of batch normalization layers, or {pattern: policy}: ``auto`` (``train``, but ``frozen`` where none of the
            layer's parameters trains), ``train``, ``frozen`` (scale and bias train), ``frozen:all`` (they do not either),
            ``sync``, ``ghost:<size>``, ``renorm``, or an object of ``burnish.norms``.
            Settings come behind a colon, with commas between: ``train:momentum=cumulative``.
        metrics: names or objects of ``burnish.metrics``; by default accuracy where the loss is over class indices.
        precision: ``float32``: computed in the dtypes of the model, and in float32 what it has in float16 or bfloat16.
            ``float16`` or ``bfloat16``: mixed precision, products in sixteen bits; or its settings (``burnish.MixedPrecision``).
            Weights that train are float32 always. ``predict`` and exports stay in the dtypes of the model.
        outputs: the output the loss reads, or the outputs in order where it reads several; any other value of the model will
            do, by its name. By default all outputs, or all floating-point ones, if there are as many. A final activation that
            the loss applies itself (cross-entropy: Softmax) is stepped over, however it is written.
        output: the output of a model that computes its loss itself, in place of ``loss``; its labels are inputs of the model.
        running_variance: ``onnx`` (population variance) or ``pytorch`` (unbiased); by default PyTorch's for a model that
            PyTorch exported, the standard's for any other.
        recompute: None keeps every activation that the backward reads. Else activations are computed again in the backward, and
            gradients keep their bits: ``layers`` (only what passes between segments of the network is kept), a budget in bytes
            for the step's planned peak (a number, or ``1.5GB``; as little as fits is computed again), or patterns of nodes. A
            batch size to plan for comes behind a colon: ``1.5GB:batch=16``.
        memory: the most that a step may take on ONNX Runtime: the state, twice where it is updated, the batch, and all values
            between; a number of bytes or ``64MB``, for a batch of one, or ``64MB:batch=16``. As little as fits is computed again.
            What is planned is run, in a process of its own, where the system tells how much memory that takes (Linux).
        hold_rows: {initializer name: rows of axis 0, counted from 0} that training leaves as they are, bit for bit, whatever the
            optimizer: ``{"embedding.weight": [0]}`` for the row of ``nn.Embedding(padding_idx=0)``, which no file names.
        sparse: which embedding tables keep the gradient of the rows that a batch reads alone: a step then reads and writes no
            other rows, of the table or of the optimizer's state. None: no table. ``auto``: each that Gather alone reads, on axis
            0, where the weights come out the same (SGD without momentum, Adagrad, row-wise Adagrad; no weight decay). Names or
            patterns: these, also where the optimizer moves rows without a gradient (momentum, Adam, weight decay), which then
            miss that until a batch reads them.
        cached_features: where a frozen backbone ends, whose results are computed once for each sample: the name of a value, or of
            a node, whose first output is meant; several names; or ``auto``, right before what trains. ``step``, ``grad`` and
            ``evaluate`` then take these values, by their names, in place of the inputs that they are computed from, and a graph
            ``features`` computes them (``Session.features``); its weights are constants, in ``predict`` too, and no state. A
            ``Trainer`` computes the features before the first epoch. Nothing before them may train, draw at random (Dropout),
            or normalize by the batch.
        batch: None: batches have the extents that the model gives its inputs. ``open``: a model that was exported at batch 1
            trains on batches of any size (``burnish.load`` says which inputs hold samples).
        sample_axis: along which axis of the model's inputs the samples of a batch stand. Data sets have them along axis 0,
            always; loaders, ``Trainer``, ``evaluate`` and ``predict`` over data sets move them there and back, and
            ``Session.step`` takes the model's own layout. None: the model tells, by a name such as ``batch`` or by what its nodes
            do. An integer holds for all inputs; {input: axis} for each, and None there means that the input has no samples, and
            is the same for all: ``{"x": 1, "grid": None}``. Of a module it also says which axes are open, unless
            ``dynamic_shapes`` does.
        bind: {input: value}: inputs that are fixed to a value, and that the program and its exports do not have:
            ``{"sr": 16000, "state": 0}`` (``burnish.load`` says what it may be). An If that they decide becomes its branch.
        steps_per_epoch: of the training, for a quantized model whose observed ranges stay after a number of epochs.
        target: the runtime that the graphs are lowered for: a name, the TOML file of one (``burnish.targets``), or a
            ``burnish.targets.Target``, such as that of an engine.
        verify: of a module: run it beside its graph when it is exported, and compare (``burnish.load``). False skips that.

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
    from burnish.compiler.from_model import program_from

    return program_from(
        source,
        example_inputs=example_inputs,
        dynamic_shapes=dynamic_shapes,
        verify=verify,
        loss=loss,
        optimizer=optimizer,
        trainable=trainable,
        norm=norm,
        metrics=metrics,
        precision=precision,
        outputs=outputs,
        output=output,
        running_variance=running_variance,
        recompute=recompute,
        memory=memory,
        hold_rows=hold_rows,
        sparse=sparse,
        cached_features=cached_features,
        batch=batch,
        sample_axis=sample_axis,
        bind=bind,
        steps_per_epoch=steps_per_epoch,
        target=target,
    )


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
    from burnish.compiler.from_model import inference_from

    return inference_from(
        source,
        loss=loss,
        metrics=metrics,
        outputs=outputs,
        sample_axis=sample_axis,
        target=target,
    )
