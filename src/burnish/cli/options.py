"""Options that several commands share, and what they come to."""

from __future__ import annotations

import functools
import inspect
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from burnish.cli import launch
from burnish.cli.console import counted, errors, split
from burnish.cli.optimizer_options import (
    AccumulateOption,
    AverageOption,
    DecayOnOption,
    DecayOption,
    FreezeOption,
    GroupOption,
    LayerDecayOption,
    MomentumOption,
    OptimizerOption,
    RateOption,
    TransformOption,
    build_optimizer,
    with_updates,
)
from burnish.cli.schedule_options import CONSTANT
from burnish.errors import GradientError, ModelError, UntrainedWeightsWarning

if TYPE_CHECKING:
    from burnish.optim import Optimizer
    from burnish.program import Program

COMPILATION = "Compilation"
OPTIONS_NAMED = "--trainable says what trains, --outputs what the loss reads"
FIRST_SHARE = 0.1
"""From how much of an average being its first value on a line says so."""

ModelArgument = Annotated[
    Path, typer.Argument(metavar="MODEL", help="An ONNX file, or the folder of a compiled program.", show_default=False)
]
LossOption = Annotated[
    str,
    typer.Option(
        "--loss",
        help="Such as cross_entropy, mse or bce_with_logits; settings behind a colon (huber:delta=0.5); an .onnx file with the "
        "loss; or output:output=NAME where the model computes it.",
        rich_help_panel=COMPILATION,
    ),
]
ScheduleOption = Annotated[
    str,
    typer.Option(
        "--schedule",
        help="Learning rate over the steps, computed in the program: constant, cosine, linear, one_cycle or another name of "
        "docs/schedules.md; settings behind a colon (step:every=100).",
        rich_help_panel=COMPILATION,
    ),
]
WarmupOption = Annotated[
    int,
    typer.Option("--warmup", min=0, help="Steps of a linear rise of the learning rate first.", rich_help_panel=COMPILATION),
]
TrainableOption = Annotated[
    list[str] | None,
    typer.Option(
        "--trainable",
        metavar="PATTERN",
        help="Train only weights of this name or pattern, such as 'classifier.*'; may be given again.",
        rich_help_panel=COMPILATION,
    ),
]
HoldRowsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--hold-rows",
        metavar="NAME=ROWS",
        help="Leave rows of a weight as they are, such as that of padding in an embedding: 'emb.weight=0', or with commas "
        "between; may be given again.",
        rich_help_panel=COMPILATION,
    ),
]
NormOption = Annotated[
    list[str] | None,
    typer.Option(
        "--norm",
        metavar="POLICY",
        help="Batch normalization: auto (train, but frozen where none of a layer's parameters trains), train, frozen, "
        "frozen:all, sync, local, ghost:32 or renorm, or PATTERN=POLICY for some layers; may be given again.",
        rich_help_panel=COMPILATION,
    ),
]
MetricsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--metrics", help="Such as accuracy,top_5 or f1:macro; by default what fits the loss.", rich_help_panel=COMPILATION
    ),
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        "--precision",
        help="float32, or mixed precision: float16, or bfloat16 where the engine has kernels for it.",
        rich_help_panel=COMPILATION,
    ),
]
RecomputeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--recompute",
        metavar="WHAT",
        help="Compute activations again in the backward to save memory: layers, or a budget such as 1.5GB, either also for a "
        "batch, as in 1.5GB:batch=16 (by default the run's, else 1); or a pattern of node names, which may be given again.",
        rich_help_panel=COMPILATION,
    ),
]
OutputsOption = Annotated[
    str | None,
    typer.Option(
        "--outputs",
        metavar="NAME",
        help="The output that the loss reads, or several with commas between; by default the only one.",
        rich_help_panel=COMPILATION,
    ),
]
BatchOption = Annotated[
    str | None,
    typer.Option(
        "--batch",
        metavar="open",
        help="'--batch open' lets a model that was exported for one sample at a time take batches of any size; their size is not "
        "said here.",
        rich_help_panel=COMPILATION,
    ),
]
BindOption = Annotated[
    list[str] | None,
    typer.Option(
        "--bind",
        metavar="NAME=VALUE",
        help="Fix an input to a value, such as 'sr=16000' or 'state=0', and with it the branches that it decides; or an open "
        "dimension to an extent, such as 'sequence=576'; may be given again.",
        rich_help_panel=COMPILATION,
    ),
]

FoldOption = Annotated[
    bool,
    typer.Option(
        "--fold/--no-fold",
        help="In the exported model, fold normalization into the layers beside it; not where it is to be trained further.",
    ),
]


@dataclass(frozen=True)
class Compilation:
    """How a model is compiled, as the command line says it: an option for each field, by ``takes_compilation``.

    ``given`` is none of them: the options that the command line has, where others are at their defaults.
    """

    loss: LossOption = "cross_entropy"
    optimizer: OptimizerOption = "sgd"
    lr: RateOption = None
    schedule: ScheduleOption = CONSTANT
    warmup: WarmupOption = 0
    momentum: MomentumOption = None
    weight_decay: DecayOption = None
    decay_on: DecayOnOption = "all"
    transform: TransformOption = None
    group: GroupOption = None
    freeze: FreezeOption = None
    layer_decay: LayerDecayOption = None
    accumulate: AccumulateOption = 1
    average: AverageOption = None
    trainable: TrainableOption = None
    hold_rows: HoldRowsOption = None
    norm: NormOption = None
    metrics: MetricsOption = None
    outputs: OutputsOption = None
    precision: PrecisionOption = "float32"
    recompute: RecomputeOption = None
    batch: BatchOption = None
    bind: BindOption = None
    given: tuple[str, ...] = ()

    def program(self, model: Path, batch_size: int | None = None) -> Program:
        """Compile a model, at a constant rate, or load a program from its folder.

        Args:
            model: an ONNX file, or the folder of a program, which stays as it was compiled.
            batch_size: of the steps, where it is known.

        Raises:
            typer.BadParameter: options that contradict each other, or options of compilation for a program.
            BurnishError: what compilation raises.
        """
        if is_program(model):
            return self._load(model)
        optimizer = self.whole_optimizer()
        policies = norms(self.norm or [])
        from burnish.compiler.compile import compile

        with options_named(), untrained_weights_named():
            return compile(
                model,
                loss=self.loss,
                optimizer=optimizer,
                trainable=split(self.trainable) if self.trainable else None,
                norm=policies,
                metrics=metric_names(self.metrics) if self.metrics else None,
                outputs=read_outputs(self.outputs),
                precision=self.precision,
                recompute=read_recompute(self.recompute or [], batch_size),
                hold_rows=read_held_rows(self.hold_rows or []),
                batch=read_batch(self.batch),
                bind=read_bind(self.bind or []),
            )

    def whole_optimizer(self) -> Optimizer:
        """The optimizer with what goes around it.

        Raises:
            typer.BadParameter, ConfigurationError: as ``build_optimizer`` and ``with_updates``.
        """
        optimizer = build_optimizer(self.optimizer, self.lr, self.momentum, self.weight_decay)
        return with_updates(
            optimizer,
            transforms=self.transform or [],
            groups=self.group or [],
            frozen=split(self.freeze or []),
            decay_on=self.decay_on,
            layer_decay=self.layer_decay,
            average=self.average,
            accumulate=self.accumulate,
        )

    def _load(self, folder: Path) -> Program:
        if self.given:
            option = f"--{self.given[0].replace('_', '-')}"
            raise typer.BadParameter(
                f"{option} says how a model is compiled, and '{folder}' is a program that is compiled already: leave it out, or "
                "give the ONNX file that it was made from"
            )
        from burnish.program import Program

        return Program.load(folder)


def is_program(source: Path) -> bool:
    """Whether a path is the folder of a compiled program.

    Raises:
        ModelError: it is the folder of a run, which holds one.
    """
    from burnish.formats.folder import MANIFEST

    if not source.is_dir():
        return False
    if (source / "checkpoints").is_dir() and (source / "program").is_dir():
        raise ModelError(
            f"'{source}' is the folder of a run: go on with the run by its own command and --resume, begin another in its state "
            f"with the model and --start-from {source}, or give the model that it has trained, '{source / 'tuned.onnx'}'"
        )
    return (source / MANIFEST).is_file()


def was_given(context: typer.Context, name: str) -> bool:
    """Whether the command line has an option, where it may be at its default otherwise."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def takes_compilation(*left_out: str, only: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options in the place of its parameter ``compilation``: the fields of ``Compilation``.

    Args:
        left_out: all fields but these.
        only: these fields alone.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        fields = inspect.signature(Compilation, eval_str=True).parameters
        taken = [name for name in fields if name != "given" and name not in left_out and (not only or name in only)]
        options = {name: fields[name] for name in taken}
        parameters: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
            parameters += options.values() if name == "compilation" else [parameter]

        takes_context = any(parameter.name == "context" for parameter in parameters)
        if not takes_context:
            parameters.insert(0, inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))

        @functools.wraps(command)
        def expanded(**given: Any) -> None:
            context = given["context"] if takes_context else given.pop("context")
            named = tuple(name for name in options if was_given(context, name))
            compilation = Compilation(**{name: given.pop(name) for name in options}, given=named)
            command(**given, compilation=compilation)

        # Typer reads a command's options from these two, and calls it with names alone.
        expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        expanded.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
        return expanded

    return decorate


def read_recompute(given: list[str], batch_size: int | None = None) -> str | list[str] | None:
    """Return ``layers`` or a budget as it is, and anything else as patterns; a budget without a batch is for ``batch_size``."""
    if len(given) != 1:
        return given or None
    what, _, setting = given[0].partition(":")
    if what[:1].isdigit():
        return given[0] if setting or batch_size is None else f"{what}:batch={batch_size}"
    return given[0] if what == "layers" else given


def read_batch(given: str | None) -> str | None:
    """Return what ``--batch`` says.

    Raises:
        typer.BadParameter: another word than ``open``, such as a number of samples.
    """
    if given not in (None, "open"):
        raise typer.BadParameter(
            f"--batch {given}: the only choice is 'open', for a model that was exported for one sample at a time; how many "
            "samples a batch of training has is --batch-size"
        )
    return given


def read_bind(given: list[str]) -> dict[str, Any]:
    """Return the values that inputs are fixed to: JSON where they can be read as such, else text.

    Raises:
        typer.BadParameter: what is no name with a value, or a name that is given twice.
    """
    bound: dict[str, Any] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or not name or not value:
            raise typer.BadParameter(f"--bind {text}: write NAME=VALUE, such as 'sr=16000' or 'state=0'")
        if name in bound:
            raise typer.BadParameter(f"--bind {text}: '{name}' is fixed to a value already: give it once")
        try:
            bound[name] = json.loads(value.lower() if value.lower() in ("true", "false") else value)
        except json.JSONDecodeError:
            bound[name] = value
    return bound


def read_held_rows(given: list[str]) -> dict[str, list[int]]:
    """Return the rows to hold by the name of their weight.

    Raises:
        typer.BadParameter: what is no name with rows.
    """
    held: dict[str, list[int]] = {}
    for value in given:
        name, separator, rows = value.rpartition("=")
        try:
            numbers = [int(row) for row in rows.split(",")]
        except ValueError:
            numbers = []
        if not separator or not name or not numbers:
            raise typer.BadParameter(f"--hold-rows {value}: write NAME=ROWS, such as 'emb.weight=0' or 'emb.weight=0,1'")
        held.setdefault(name, []).extend(numbers)
    return held


def planned_line(program: Program, batch: int | None = None) -> str:
    """Return what a step is planned to need, and what it would need if nothing were computed again."""
    batch = batch or planned_batch(program)
    peak = program.planned_peak(batch)
    saved = f", {_size(peak.without_recompute)} without recomputation" if program.options.get("recompute") else ""
    return f"planned peak of a step at batch {batch}: {_size(peak.bytes)}{saved}"


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"


def planned_batch(program: Program) -> int:
    """The batch that recomputation was planned for, else 1."""
    from burnish.passes import recompute_request

    requested = recompute_request.get(program.options.get("recompute"))
    return requested.batch or 1 if requested else 1


def read_outputs(outputs: str | None) -> str | list[str] | None:
    """Return one name as it is, several as a list."""
    return outputs if outputs is None or "," not in outputs else split([outputs])


@contextmanager
def options_named() -> Iterator[None]:
    """Let a missing gradient name the options of the command line in place of Python's."""
    try:
        yield
    except GradientError as error:
        raise GradientError(error.problem, OPTIONS_NAMED) from error


@contextmanager
def untrained_weights_named() -> Iterator[None]:
    """Let the first worker print which weights will not train, in the options of the command line; other warnings stay."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UntrainedWeightsWarning)
        yield
    for warning in caught:
        if not isinstance(warning.message, UntrainedWeightsWarning):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        elif launch.other_rank() is None:
            errors().print(f"warning: {warning.message.problem} ({OPTIONS_NAMED})", style="yellow", markup=False)


def export_line(path: Path, what: str, steps: int, program: Program, fold: bool, parameters: str | None) -> str:
    """Return what is said of an exported model; that its batch normalization is gone, or its average young, where that is so."""
    from burnish import optim
    from burnish.program import Role

    line = f"{path}: {what} after {counted(steps, 'step')}"
    if fold and program.signature["predict"].inputs_of(Role.STATISTIC):
        line += "; batch normalization is folded: to train it further, export with --no-fold"
    first = optim.share_of_first(optim.get(program.options["optimizer"]), steps) if parameters is not None else 0.0
    if first > FIRST_SHARE:
        line += (
            f"; {first:.0%} of the average is still the weights before training: take more steps, a smaller decay, or "
            "bias_correction=true, or export with --no-average"
        )
    return line


def metric_names(given: list[str]) -> list[str]:
    """Return metrics as ``burnish.metrics.get`` takes them: a comma stands between metrics, and between the settings of one."""
    names: list[str] = []
    for part in split(given):
        if names and "=" in part and ":" not in part.partition("=")[0]:
            names[-1] += ("," if ":" in names[-1] else ":") + part
        else:
            names.append(part)
    return names


def norms(given: list[str]) -> str | dict[str, str]:
    """Return a policy name, or {pattern: policy}.

    Raises:
        typer.BadParameter: several policies without patterns.
    """
    parts = split(given)
    if not parts:
        return "auto"
    from burnish.norms import POLICIES

    settings = {setting for name in POLICIES for setting in POLICIES.takes(name)}
    values: list[str] = []
    for part in parts:
        # A comma stands between policies, and between the settings of one.
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
            raise typer.BadParameter(f"'{value}': with several --norm, each is PATTERN=POLICY, such as 'stem*=frozen'")
        policies[pattern] = policy
    return policies
