"""Options that say how a model is compiled, and the program they come to."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from burnish.cli import launch
from burnish.cli.adapter_options import AdapterOptions
from burnish.cli.compilation_values import (
    read_batch,
    read_bind,
    read_held_rows,
    read_memory,
    read_metrics,
    read_norms,
    read_outputs,
    read_recompute,
    read_sample_axis,
)
from burnish.cli.console import errors, split
from burnish.cli.optimizer_options import OptimizerOptions
from burnish.cli.option_groups import OptionGroup
from burnish.cli.schedule_options import CONSTANT
from burnish.errors import BurnishError, GradientError, ModelError, UntrainedWeightsWarning

if TYPE_CHECKING:
    from burnish.program import Program

COMPILATION = "Compilation"
OPTIONS_NAMED = "--trainable says what trains, --outputs what the loss reads"

ModelArgument = Annotated[
    Path, typer.Argument(metavar="MODEL", help="An ONNX file, or the folder of a compiled program.", show_default=False)
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
SampleAxisOption = Annotated[
    list[str] | None,
    typer.Option(
        "--sample-axis",
        metavar="NAME=AXIS",
        help="Which axis of an input holds the samples of a batch, if the file does not say: 'x=1', or 'grid=none' for one that "
        "is the same for all samples; a number alone for all inputs; may be given again. Data have samples along axis 0.",
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


@dataclass(frozen=True)
class Compilation(OptionGroup):
    """How a model is compiled."""

    panel: ClassVar = COMPILATION
    loss: Annotated[
        str,
        typer.Option(
            "--loss",
            help="Such as cross_entropy, mse or bce_with_logits; settings behind a colon (huber:delta=0.5); an .onnx file with "
            "the loss; or output:output=NAME where the model computes it.",
        ),
    ] = "cross_entropy"
    optimizer: OptimizerOptions = OptimizerOptions()  # noqa: RUF009  # it is frozen
    schedule: Annotated[
        str,
        typer.Option(
            "--schedule",
            help="Learning rate over the steps, computed in the program: constant, cosine, linear, one_cycle or another name of "
            "docs/schedules.md; settings behind a colon (step:every=100).",
        ),
    ] = CONSTANT
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Steps of a linear rise of the learning rate first.")] = 0
    trainable: Annotated[
        list[str] | None,
        typer.Option(
            "--trainable",
            metavar="PATTERN",
            help="Train only weights of this name or pattern, such as 'classifier.*'; may be given again.",
        ),
    ] = None
    hold_rows: Annotated[
        list[str] | None,
        typer.Option(
            "--hold-rows",
            metavar="NAME=ROWS",
            help="Leave rows of a weight as they are, such as that of padding in an embedding: 'emb.weight=0', or with commas "
            "between; may be given again.",
        ),
    ] = None
    sparse: Annotated[
        list[str] | None,
        typer.Option(
            "--sparse",
            metavar="TABLE",
            help="Update the rows of embedding tables alone that a batch reads: auto, each for which that is exact, or "
            "a table by its name or pattern; may be given again.",
        ),
    ] = None
    norm: Annotated[
        list[str] | None,
        typer.Option(
            "--norm",
            metavar="POLICY",
            help="Batch normalization: auto (train, but frozen where none of a layer's parameters trains), train, frozen, "
            "frozen:all, sync, local, ghost:32 or renorm, or PATTERN=POLICY for some layers; may be given again.",
        ),
    ] = None
    metrics: Annotated[
        list[str] | None, typer.Option("--metrics", help="Such as accuracy,top_5 or f1:macro; by default what fits the loss.")
    ] = None
    outputs: Annotated[
        str | None,
        typer.Option(
            "--outputs",
            metavar="NAME",
            help="The output that the loss reads, or several with commas between; by default the only one.",
        ),
    ] = None
    precision: Annotated[
        str,
        typer.Option(
            "--precision", help="float32, or mixed precision: float16, or bfloat16 where the engine has kernels for it."
        ),
    ] = "float32"
    recompute: Annotated[
        list[str] | None,
        typer.Option(
            "--recompute",
            metavar="WHAT",
            help="Compute activations again in the backward to save memory: layers, or a budget such as 1.5GB, either also for a "
            "batch, as in 1.5GB:batch=16 (by default the run's, else 1); or a pattern of node names, which may be given again.",
        ),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="BYTES",
            help="The most that a step may take on ONNX Runtime, state included, such as 64MB or 64MB:batch=16 (by default the "
            "run's batch, else 1): computes as little again as fits, or says what is missing.",
        ),
    ] = None
    cached_features: Annotated[
        str | None,
        typer.Option(
            "--cached-features",
            metavar="WHERE",
            help="Compute what a frozen backbone makes of each sample once, and train from there: auto, right before what "
            "trains, or the name of a value or node; several with commas between.",
        ),
    ] = None
    batch: BatchOption = None
    sample_axis: SampleAxisOption = None
    bind: BindOption = None
    adapters: AdapterOptions = AdapterOptions()  # noqa: RUF009  # it is frozen

    def program(
        self, model: Path, batch_size: int | None = None, target: str = "onnxruntime", steps_per_epoch: int | None = None
    ) -> Program:
        """Compile a model, at a constant rate, or load a program from its folder.

        Args:
            model: an ONNX file, or the folder of a program, which stays as it was compiled.
            batch_size: of the steps, where it is known.
            target: the runtime that it is compiled for.
            steps_per_epoch: of the training, where it is known.

        Raises:
            typer.BadParameter: options that contradict each other, or options of compilation for a program.
            BurnishError: what compilation raises.
        """
        if is_program(model):
            return self._load(model)
        optimizer = self.optimizer.built()
        policies = read_norms(self.norm or [])
        from burnish.compiler.compile import compile

        with options_named(), untrained_weights_named():
            return compile(
                self.adapters.put_beside(model),
                loss=self.loss,
                optimizer=optimizer,
                trainable=split(self.trainable) if self.trainable else None,
                norm=policies,
                metrics=read_metrics(self.metrics) if self.metrics else None,
                outputs=read_outputs(self.outputs),
                precision=self.precision,
                recompute=read_recompute(self.recompute or [], batch_size),
                memory=read_memory(self.memory, batch_size),
                hold_rows=read_held_rows(self.hold_rows or []),
                sparse=self.sparse and ("auto" if self.sparse == ["auto"] else self.sparse),
                cached_features=read_outputs(self.cached_features),
                batch=read_batch(self.batch),
                sample_axis=read_sample_axis(self.sample_axis or []),
                bind=read_bind(self.bind or []),
                steps_per_epoch=steps_per_epoch,
                target=target,
            )

    def _load(self, folder: Path) -> Program:
        if self.named:
            raise typer.BadParameter(
                f"{self.first_named} says how a model is compiled, and '{folder}' is a program that is compiled already: leave "
                "it out, or give the ONNX file that it was made from"
            )
        from burnish.program import Program

        return Program.load(folder)


def is_program(source: Path) -> bool:
    """Whether a path is a compiled program: its folder, or an ONNX file that ``compile`` or ``export --training`` wrote.

    Raises:
        ModelError: it is the folder of a run, which holds one.
    """
    from burnish.files.folder import MANIFEST

    if not source.is_dir():
        return source.is_file() and _holds_program(source, source.stat().st_mtime_ns)
    if (source / "checkpoints").is_dir() and (source / "program").is_dir():
        raise ModelError(
            f"'{source}' is the folder of a run: go on with the run by its own command and --resume, begin another in its state "
            f"with the model and --start-from {source}, or give the model that it has trained, '{source / 'tuned.onnx'}'"
        )
    return (source / MANIFEST).is_file()


@functools.lru_cache(maxsize=4)
def _holds_program(file: Path, changed: int) -> bool:
    """Whether an ONNX file that was changed at a time holds a program; a file that is no model is refused where it is loaded."""
    from burnish.training.trained_model import holds_program

    with suppress(BurnishError):
        return holds_program(file)
    return False


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
            errors().print(f"warning: {warning.message.problem} ({OPTIONS_NAMED})", style="yellow")
