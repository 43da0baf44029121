"""Options that say how a model is compiled, and the program they come to."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from burnish.cli import launch
from burnish.cli.adapter_options import AdapterOptions
from burnish.cli.console import errors
from burnish.cli.optimizer_options import COMPILATION, OptimizerOptions
from burnish.cli.option_groups import OptionGroup, declared_option
from burnish.compiler.options import CompileOptions
from burnish.errors import BurnishError, GradientError, ModelError, UntrainedWeightsWarning

if TYPE_CHECKING:
    from burnish.program import Program

OPTIONS_NAMED = "--trainable says what trains, --outputs what the loss reads"

ModelArgument = Annotated[
    Path, typer.Argument(metavar="MODEL", help="An ONNX file, or the folder of a compiled program.", show_default=False)
]
BatchOption = Annotated[str | None, declared_option(CompileOptions, "batch", COMPILATION)]
SampleAxisOption = Annotated[list[str] | None, declared_option(CompileOptions, "sample_axis")]
BindOption = Annotated[list[str] | None, declared_option(CompileOptions, "bind", COMPILATION)]


@dataclass(frozen=True)
class Compilation(OptionGroup):
    """How a model is compiled."""

    panel: ClassVar = COMPILATION
    options: CompileOptions = CompileOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    adapters: AdapterOptions = AdapterOptions()

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
        options = replace(
            self.options.for_batch(batch_size),
            optimizer=self.optimizer.built(),
            target=target,
            steps_per_epoch=steps_per_epoch,
        )
        from burnish.compiler.from_model import program_from
        from burnish.graph import garbage_kept

        with options_named(), untrained_weights_named(), garbage_kept():
            return program_from(self.adapters.put_beside(model), options)

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
