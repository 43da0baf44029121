"""The options of ``burnish.compile``, each declared once for Python, the command line and files of options.

Nothing heavy is imported here: the check of an option is imported when the option is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from burnish.errors import ConfigurationError
from burnish.options import Options, option
from burnish.settings import is_natural_text, read_whole, split
from burnish.untrusted_files import read_json
from burnish.validation import is_whole

if TYPE_CHECKING:
    from burnish import losses, metrics, optim
    from burnish.compiler.cached_features import CachedFeatures
    from burnish.compiler.selection import HoldRows, Trainable
    from burnish.compiler.sparse_tables import SparseOption
    from burnish.importer import Bind
    from burnish.norms import NormPolicy
    from burnish.rewriting.precision import Precision
    from burnish.rewriting.recompute_request import Recompute, RecomputeOption
    from burnish.sample_axes import AskedAxes
    from burnish.targets import TargetLike


DEFAULT_LOSS = "cross_entropy"
STEPS_PER_EPOCH = "steps_per_epoch"


def read_tables(texts: list[str]) -> str | list[str]:
    """Return ``auto`` if it is the only text, and anything else as patterns."""
    return "auto" if texts == ["auto"] else texts


def read_recompute(texts: list[str]) -> str | list[str] | None:
    """Return ``layers`` or a budget unchanged, and anything else as patterns."""
    if len(texts) != 1:
        return texts or None
    what = texts[0].partition(":")[0]
    return texts[0] if what[:1].isdigit() or what == "layers" else texts


def read_batch(text: str) -> str:
    """Return the value of ``--batch``.

    Raises:
        ConfigurationError: it is not ``open``, but for example a number of samples.
    """
    if text != "open":
        raise ConfigurationError(
            f"--batch {text}: the only choice is 'open', for a model that was exported for one sample at a time; how many "
            "samples a batch of training has is --batch-size"
        )
    return text


def read_sample_axis(texts: list[str]) -> int | dict[str, int | None] | None:
    """Return the value of ``--sample-axis``: an axis for all inputs, or one for each; None if there is no text.

    Raises:
        ConfigurationError: a text is neither an axis nor a name with one, or names an input twice.
    """
    if len(texts) == 1 and is_natural_text(texts[0]):
        return int(texts[0])
    axes: dict[str, int | None] = {}
    for text in texts:
        name, separator, axis = text.rpartition("=")
        if not separator or not name or not (is_natural_text(axis) or axis.lower() == "none"):
            raise ConfigurationError(
                f"--sample-axis {text}: write NAME=AXIS, such as 'x=1', 'grid=none' for an input without samples, or one number "
                "for all inputs"
            )
        if name in axes:
            raise ConfigurationError(f"--sample-axis {text}: '{name}' has an axis already: give it once")
        axes[name] = int(axis) if is_natural_text(axis) else None
    return axes or None


def read_bind(texts: list[str]) -> dict[str, Any]:
    """Return the values that inputs are fixed to: parsed as JSON if possible, else as text.

    Raises:
        ConfigurationError: a text is not a name with a value, or names an input twice.
    """
    bound: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name or not value:
            raise ConfigurationError(f"--bind {text}: write NAME=VALUE, such as 'sr=16000' or 'state=0'")
        if name in bound:
            raise ConfigurationError(f"--bind {text}: '{name}' is fixed to a value already: give it once")
        try:
            bound[name] = read_json(value.lower() if value.lower() in ("true", "false") else value)
        except ValueError:
            bound[name] = value
    return bound


def read_held_rows(texts: list[str]) -> dict[str, list[int]]:
    """Return the rows to hold, by weight name.

    Raises:
        ConfigurationError: a text is not a name with rows.
    """
    held: dict[str, list[int]] = {}
    for text in texts:
        name, separator, rows = text.rpartition("=")
        try:
            numbers = [read_whole(row) for row in rows.split(",")]
        except ValueError:
            numbers = []
        if not separator or not name or not numbers:
            raise ConfigurationError(f"--hold-rows {text}: write NAME=ROWS, such as 'emb.weight=0' or 'emb.weight=0,1'")
        held.setdefault(name, []).extend(numbers)
    return held


def read_outputs(outputs: str) -> str | list[str]:
    """Return a single name as a string, several as a list."""
    return split([outputs]) if "," in outputs else outputs


def read_metrics(texts: list[str]) -> list[str]:
    """Return metrics as ``burnish.metrics.get`` takes them. A comma separates metrics, and also the settings of one metric."""
    names: list[str] = []
    for part in split(texts):
        if names and "=" in part and ":" not in part.partition("=")[0]:
            names[-1] += ("," if ":" in names[-1] else ":") + part
        else:
            names.append(part)
    return names


def read_norms(texts: list[str]) -> str | dict[str, str]:
    """Return a policy name, or {pattern: policy}.

    Raises:
        ConfigurationError: there are several policies without patterns.
    """
    parts = split(texts)
    if not parts:
        return "auto"
    from burnish.norms import POLICIES

    settings = {setting for name in POLICIES for setting in POLICIES.takes(name)}
    values: list[str] = []
    for part in parts:
        # A comma separates policies, and also the settings of one policy.
        if values and ":" in values[-1] and part.partition("=")[0].strip() in settings:
            values[-1] += f",{part}"
        else:
            values.append(part)
    policies = {}
    for value in values:
        pattern, separator, policy = value.partition("=")
        if not separator or value.partition(":")[0] in POLICIES:
            if len(values) == 1:
                return value
            separator = ""
        if not separator or not pattern or not policy:
            raise ConfigurationError(f"'{value}': with several --norm, each is PATTERN=POLICY, such as 'stem*=frozen'")
        policies[pattern] = policy
    return policies


def _checked_loss(loss: Any) -> Any:
    from burnish import losses

    is_name = isinstance(loss, str) and not loss.endswith(".onnx")  # a graph is read once the model is known
    return losses.get(loss) if is_name else loss


def _checked_optimizer(optimizer: Any) -> Any:
    from burnish import optim

    return optim.get(optimizer)


def _checked_norm(norm: Any) -> Any:
    from burnish.norms import get

    for policy in norm.values() if isinstance(norm, Mapping) else [norm] if isinstance(norm, str) else ():
        get(policy)
    return norm


def _checked_metrics(requested: Any) -> Any:
    from burnish import metrics

    if not isinstance(requested, Iterable):
        raise ConfigurationError(f"metrics must be None, or a list of names or objects of burnish.metrics, not {requested!r}")
    resolved = {metric.name: metric for metric in map(metrics.get, [requested] if isinstance(requested, str) else requested)}
    for metric in resolved.values():
        # A program stores its metrics by name and looks them up when it is opened.
        if not metrics.is_known(metric):
            raise ConfigurationError(
                f"metrics: burnish.metrics.METRICS does not lead from '{metric.name}' to this metric, and a program finds those "
                f"that it was compiled with there: enter METRICS['{metric.name.partition(':')[0]}'] = {type(metric).__name__}"
            )
    return tuple(resolved.values())


def _checked_precision(precision: Any) -> Any:
    from burnish.rewriting.precision import get

    return get(precision)


def _checked_running_variance(rule: Any) -> Any:
    from burnish.norms import RunningVariance

    rules = [each.value for each in RunningVariance]
    if rule not in rules:
        choice = ", ".join(f"'{each}'" for each in rules)
        raise ConfigurationError(f"running_variance: unknown rule '{rule}'; choose among {choice}")
    return rule


def _checked_recompute(asked: Any) -> Any:
    from burnish.rewriting.recompute_request import get

    return get(asked)


def _checked_steps(steps: Any) -> Any:
    if not is_whole(steps) or steps < 1:
        raise ConfigurationError(f"steps_per_epoch={steps!r}: give a whole number of 1 or more")
    return steps


def _checked_target(target: Any) -> Any:
    from burnish.targets import target_of

    return target_of(target)


@dataclass(frozen=True, kw_only=True)
class CompileOptions(Options):
    """Options of compilation. Values are checked here as far as possible without the model.

    Args:
        example_inputs, dynamic_shapes: for a module: the inputs to call it with, and its open axes (``burnish.load``). A module
            also determines what trains (``requires_grad``), which rows are held (``padding_idx``) and what each batch
            normalization does (``train()``, ``eval()``, ``momentum``); ``trainable``, ``hold_rows`` and ``norm`` override these.
        loss: a name in ``burnish.losses.LOSSES``, with settings after a colon (``huber:delta=0.5``); an object of
            ``burnish.losses``; or an ONNX graph (path, ``ModelProto`` or ``onnx_ir.Model``) whose inputs have the names of the
            model's outputs, or else are labels.
        optimizer: a name in ``burnish.optim.OPTIMIZERS``, with settings after a colon (``rmsprop:centered=true``), or an object
            of ``burnish.optim``.
        trainable: names, shell-style patterns, or a predicate over (name, array). None trains every weight, or only the adapters
            if the model has any (``burnish.surgery.lora``).
        hold_rows: {initializer name: rows of axis 0, counted from 0} that training does not change in any bit, whatever the
            optimizer: ``{"embedding.weight": [0]}`` for the row of ``nn.Embedding(padding_idx=0)``, which no file names.
        sparse: embedding tables that keep only the gradients of the rows that a batch reads; a step then reads and writes no
            other rows of the table or of the optimizer's state. None: no table. ``auto``: each table that only Gather reads, on
            axis 0, if the resulting weights are the same (SGD without momentum, Adagrad, row-wise Adagrad; no weight decay).
            Names or patterns: these tables, even if the optimizer moves rows without a gradient (momentum, Adam, weight decay);
            such rows miss that until a batch reads them.
        norm: policy of batch normalization layers, or {pattern: policy}: ``auto`` (``train``, but ``frozen`` if none of the
            layer's parameters trains), ``train``, ``frozen`` (scale and bias train), ``frozen:all`` (they do not train either),
            ``sync``, ``ghost:<size>``, ``renorm``, or an object of ``burnish.norms``. Settings follow a colon, with commas
            between: ``train:momentum=cumulative``.
        metrics: names or objects of ``burnish.metrics``; by default accuracy if the loss is over class indices.
        outputs: the output that the loss reads, or several in order; any other value of the model is possible, by name. By
            default all outputs, or all floating-point ones, if their number fits. A final activation that the loss applies itself
            (cross-entropy: Softmax) is skipped, in any spelling.
        output: the output of a model that computes its loss itself, in place of ``loss``; its labels are inputs of the model.
        precision: ``float32``: computes in the model's dtypes, and in float32 instead of float16 or bfloat16. ``float16`` or
            ``bfloat16``: mixed precision, with products in sixteen bits; or its settings (``burnish.MixedPrecision``). Weights
            that train are always float32. ``predict`` and exports keep the model's dtypes.
        running_variance: ``onnx`` (population variance) or ``pytorch`` (unbiased); by default PyTorch's for a model that PyTorch
            exported, else the standard's.
        recompute: activations that are recomputed in the backward pass instead of kept; gradients keep their bits. None: no
            activations. ``layers``: all but the values between segments of the network. A budget in bytes for the planned peak of
            the step (a number, or ``1.5GB``): as few as fit it. Or patterns of nodes. A batch size to plan for follows a colon:
            ``1.5GB:batch=16``.
        memory: limit of a step's memory on ONNX Runtime: the state (twice if it is updated), the batch, and all intermediate
            values; a number of bytes or ``64MB``, for a batch of one, or ``64MB:batch=16``. As few activations as possible are
            recomputed. The planned step is run in a separate process if the system reports its memory (Linux).
        cached_features: end of a frozen backbone whose results are computed once for each sample: the name of a value, or of a
            node (its first output); several names; or ``auto``, right before the first layer that trains. ``step``, ``grad`` and
            ``evaluate`` then take these values, by name, in place of the inputs that they are computed from, and a graph
            ``features`` computes them (``Session.features``). The backbone's weights become constants, also in ``predict``, and
            are not part of the state. A ``Trainer`` computes the features before the first epoch. Nothing before them may train,
            draw random numbers (Dropout), or normalize by the batch.
        batch: None: batches have the extents of the model's inputs. ``open``: a model that was exported at batch 1 trains on
            batches of any size (``burnish.load`` says which inputs hold samples).
        sample_axis: axis of the model's inputs that holds the samples of a batch. Data sets always have axis 0; loaders,
            ``Trainer``, ``evaluate`` and ``predict`` over data sets move the axis there and back, and ``Session.step`` takes the
            model's own layout. None: inferred from a name such as ``batch`` or from the nodes. An integer holds for all inputs;
            {input: axis} for each, with None for an input that has no samples and is the same for all: ``{"x": 1, "grid":
            None}``. For a module it also opens these axes, unless ``dynamic_shapes`` does.
        bind: {input: value}: inputs fixed to a value, which the program and its exports do not have: ``{"sr": 16000, "state":
            0}`` (``burnish.load`` lists the possible values). An If that they decide becomes its branch.
        steps_per_epoch: number of training steps per epoch, for a quantized model whose observed ranges freeze after a number of
            epochs.
        target: runtime that the graphs are lowered for: a name, a TOML file (``burnish.targets``), or a
            ``burnish.targets.Target``, such as that of an engine.
        verify: for a module: run it and its exported graph, and compare the results (``burnish.load``). False skips that.
    """

    example_inputs: Any = option(None)
    dynamic_shapes: Any = option(None)
    loss: losses.LossLike = option(
        DEFAULT_LOSS,
        check=_checked_loss,
        help="Loss, such as cross_entropy, mse or huber:delta=0.5, an .onnx file, or output:output=NAME.",
        is_common=True,
    )
    optimizer: str | optim.Optimizer = option("sgd", check=_checked_optimizer)
    trainable: Trainable = option(
        None,
        help="Train only weights of this name or pattern, such as 'classifier.*'; repeatable.",
        shown_default="every weight",
        metavar="PATTERN",
        several=True,
        read=split,
    )
    hold_rows: HoldRows = option(
        None,
        help="Keep rows of a weight as they are, such as the padding row of an embedding: 'emb.weight=0'; repeatable.",
        metavar="NAME=ROWS",
        several=True,
        read=read_held_rows,
    )
    sparse: SparseOption = option(
        None,
        help="Update only the rows of an embedding table that a batch reads: auto, or a name or pattern; repeatable.",
        metavar="TABLE",
        several=True,
        read=read_tables,
    )
    norm: str | NormPolicy | Mapping[str, str | NormPolicy] = option(
        "auto",
        check=_checked_norm,
        help="Policy of batch normalization: auto, train, frozen, sync, ghost:32, renorm, or PATTERN=POLICY; repeatable.",
        metavar="POLICY",
        several=True,
        read=read_norms,
    )
    metrics: Sequence[str | metrics.Metric] | None = option(
        None,
        check=_checked_metrics,
        help="Metrics, such as accuracy,top_5 or f1:macro.",
        shown_default="those that fit the loss",
        several=True,
        read=read_metrics,
    )
    outputs: str | Sequence[str] | None = option(
        None,
        help="Output that the loss reads, or several with commas between.",
        shown_default="the only one",
        metavar="NAME",
        read=read_outputs,
    )
    output: str | None = option(None)
    precision: Precision = option(
        "float32",
        check=_checked_precision,
        help="Precision of training: float32, or mixed with float16 or bfloat16.",
    )
    running_variance: str | None = option(None, check=_checked_running_variance)
    recompute: RecomputeOption | Recompute = option(
        None,
        check=_checked_recompute,
        help="Compute activations again to save memory: layers, a budget such as 1.5GB, or a pattern of nodes; repeatable.",
        metavar="WHAT",
        several=True,
        read=read_recompute,
    )
    memory: str | int | None = option(
        None,
        help="Upper limit of a step's memory on ONNX Runtime, such as 64MB or 64MB:batch=16.",
        metavar="BYTES",
    )
    cached_features: CachedFeatures = option(
        None,
        help="Compute the results of a frozen backbone once per sample: auto, or the name of a value or node.",
        metavar="WHERE",
        read=read_outputs,
    )
    batch: str | None = option(
        None,
        help="Let a model that was exported for one sample at a time take batches of any size.",
        metavar="open",
        read=read_batch,
    )
    sample_axis: AskedAxes = option(
        None,
        help="Axis of an input that holds the samples, such as 'x=1', or 'grid=none' for no samples; repeatable.",
        shown_default="as the file says",
        metavar="NAME=AXIS",
        several=True,
        read=read_sample_axis,
    )
    bind: Bind = option(
        None,
        help="Fix an input to a value ('sr=16000') or an open dimension to an extent ('sequence=576'); repeatable.",
        metavar="NAME=VALUE",
        several=True,
        read=read_bind,
    )
    steps_per_epoch: int | None = option(None, check=_checked_steps)
    target: TargetLike = option("onnxruntime", check=_checked_target)
    verify: bool = option(True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output is not None and self.loss != DEFAULT_LOSS:
            raise ConfigurationError(
                f"loss and output: the model computes its loss as '{self.output}', so leave loss out, or output"
            )
        if self.memory is not None:
            if self.recompute is not None:
                raise ConfigurationError(
                    "memory and recompute are both given: memory chooses what is computed again; leave one out"
                )
            from burnish.compiler.memory_limit import read_limit

            read_limit(self.memory)

    def for_batch(self, size: int | None) -> CompileOptions:
        """Return the same options with memory savings planned for this batch size, unless they name one; None changes nothing."""
        recompute, memory = self.recompute, self.memory
        if size is None or (recompute is None and memory is None):
            return self
        from burnish.rewriting.recompute_request import Recompute

        if isinstance(recompute, Recompute) and recompute.budget is not None and recompute.batch is None:
            recompute = replace(recompute, batch=size)
        if isinstance(memory, str) and ":" not in memory:
            memory = f"{memory}:batch={size}"
        return replace(self, recompute=recompute, memory=memory)
