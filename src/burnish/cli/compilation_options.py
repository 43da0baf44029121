"""Options of compilation and adapters, and the compiled program."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from burnish.cli import launch
from burnish.cli.console import errors
from burnish.cli.data_options import TextOptions
from burnish.cli.optimizer_options import COMPILATION, OptimizerOptions
from burnish.cli.option_groups import OptionGroup, declared_option
from burnish.compiler.options import CompileOptions
from burnish.errors import BurnishError, GradientError, ModelError, UntrainedWeightsWarning

if TYPE_CHECKING:
    import onnx_ir as ir

    from burnish.program import Program


SETTINGS = ("rank", "alpha", "variant", "dropout", "rslora")
IA3 = "ia3"
FORMS = {
    "kept": "the model, with its adapters beside its weights",
    "apart": "the model; ONNX Runtime gives it the adapters in the .onnx_adapter beside it",
    "inputs": "the model; its adapters are inputs, with their values in the .safetensors beside it",
    "peft": "the adapters, as PEFT reads them",
}
"""Descriptions of the exported files with adapters that are not merged."""


@dataclass(frozen=True)
class AdapterOptions(OptionGroup):
    """Adapters next to frozen layers."""

    panel: ClassVar = "Adapters"
    adapter: Annotated[
        str | None,
        typer.Option(
            "--adapter",
            metavar="VARIANT",
            help="Train adapters beside frozen layers: lora, dora or ia3.",
        ),
    ] = None
    rank: Annotated[int | None, typer.Option("--rank", min=1, help="Rank of lora and dora.", show_default="8")] = None
    alpha: Annotated[
        float | None,
        typer.Option("--alpha", help="Strength of lora and dora: they are scaled by alpha / rank.", show_default="the rank"),
    ] = None
    lora: Annotated[
        str | None,
        typer.Option(
            "--lora",
            metavar="SETTINGS",
            help="Adapters in one text, such as rank=8,alpha=16,variant=dora,dropout=0.1,rslora=true.",
        ),
    ] = None
    lora_layers: Annotated[
        list[str] | None,
        typer.Option(
            "--lora-layers",
            "--adapter-layers",
            metavar="PATTERN",
            help="Layers with adapters, by name or pattern, such as '*.query'; repeatable.",
            show_default="every matrix and convolution",
        ),
    ] = None
    adapter_from: Annotated[
        Path | None,
        typer.Option(
            "--adapter-from",
            metavar="FOLDER",
            help="Continue with adapters in a folder of PEFT, or a .safetensors of diffusers or kohya.",
        ),
    ] = None
    save_adapters: Annotated[
        list[str] | None,
        typer.Option(
            "--save-adapters",
            metavar="FORM",
            help="Also write the adapters alone: apart (.onnx_adapter), inputs, kept or peft; repeatable.",
        ),
    ] = None

    def settings(self) -> dict[str, Any] | None:
        """Return the settings for ``burnish.surgery.lora``, or None if it adds nothing.

        Raises:
            typer.BadParameter: settings cannot be read, or contradict each other.
        """
        self._check()
        if self.adapter is not None:
            numbers = {"rank": self.rank, "alpha": self.alpha}
            chosen = {name: number for name, number in numbers.items() if number is not None}
            return {"variant": self.adapter, **chosen, "patterns": self.lora_layers or None}
        if self.lora is None:
            return None
        return {**_read(self.lora), "patterns": self.lora_layers or None}

    def source(self) -> Mapping[str, Any] | Path | None:
        """Return the adapters for ``burnish.finetune``: settings, or the PEFT folder; None for no adapters."""
        settings = self.settings()
        return self.adapter_from if settings is None else settings

    def put_beside(self, model: Path) -> ir.Model | Path:
        """Return a model with its adapters, or the path itself without adapters."""
        from burnish import surgery

        settings = self.settings()
        if settings is not None:
            return surgery.lora(model, **settings)
        return model if self.adapter_from is None else surgery.load_peft(model, self.adapter_from)

    def _check(self) -> None:
        from burnish.settings import suggestion

        ways = [name for name in ("adapter", "lora", "adapter_from") if getattr(self, name) is not None]
        if len(ways) > 1:
            first, second = (f"--{name.replace('_', '-')}" for name in ways[:2])
            raise typer.BadParameter(f"{first} and {second} both say which adapters there are: give one of them")
        if self.lora_layers and ways not in (["adapter"], ["lora"]):
            raise typer.BadParameter(
                "--lora-layers says beside which layers adapters stand: give --lora too, such as rank=8, or --adapter lora"
            )
        for name in ("rank", "alpha"):
            if getattr(self, name) is None:
                continue
            if self.adapter is None:
                raise typer.BadParameter(f"--{name} is that of an --adapter: give --adapter lora too")
            if self.adapter == IA3:
                raise typer.BadParameter(f"--{name}: an ia3 scales what a layer gives, and has none: leave it out")
        for form in self.save_adapters or []:
            if form not in FORMS:
                raise typer.BadParameter(f"--save-adapters {form}{suggestion(form, FORMS)}: give {', '.join(FORMS)}")


def _read(text: str) -> dict[str, Any]:
    from burnish.errors import ConfigurationError
    from burnish.settings import read_settings, suggestion

    try:
        _, settings = read_settings("--lora", f"lora:{text}")
    except ConfigurationError as error:
        raise typer.BadParameter(str(error).replace("'lora:", "'")) from error
    for name in settings:
        if name not in SETTINGS:
            known = ", ".join(SETTINGS)
            raise typer.BadParameter(f"--lora has no setting '{name}'{suggestion(name, SETTINGS)}; it has {known}")
    return settings


LANGUAGE_LOSS = "cross_entropy:class_axis=-1"
LANGUAGE_METRICS = ("accuracy", "perplexity")
OPTIONS_NAMED = "--trainable says what trains, --outputs what the loss reads"

ModelArgument = Annotated[
    Path, typer.Argument(metavar="MODEL", help="An ONNX file, or the folder of a compiled program.", show_default=False)
]
BatchOption = Annotated[str | None, declared_option(CompileOptions, "batch", COMPILATION)]
SampleAxisOption = Annotated[list[str] | None, declared_option(CompileOptions, "sample_axis")]
BindOption = Annotated[list[str] | None, declared_option(CompileOptions, "bind", COMPILATION)]


@dataclass(frozen=True)
class Compilation(OptionGroup):
    """Options of compilation."""

    panel: ClassVar = COMPILATION
    options: CompileOptions = CompileOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    adapters: AdapterOptions = AdapterOptions()

    def program(
        self, model: Path, batch_size: int | None = None, target: str = "onnxruntime", steps_per_epoch: int | None = None
    ) -> Program:
        """Compile a model at a constant rate, or load a program from its folder.

        Args:
            model: an ONNX file, or the folder of a program, which is not compiled again.
            batch_size: batch size of the steps, if known.
            target: runtime to compile for.
            steps_per_epoch: steps per epoch of the training, if known.

        Raises:
            typer.BadParameter: options contradict each other, or options of compilation are given for a program.
            BurnishError: an error of compilation.
        """
        if is_program(model):
            return self._load(model)
        options = replace(
            self.options.for_batch(batch_size),
            optimizer=self.optimizer.built(),
            target=target,
            steps_per_epoch=steps_per_epoch,
        )
        from burnish.compiler.compile import compiled
        from burnish.graph import garbage_kept

        with options_named(), untrained_weights_named(), garbage_kept():
            return compiled(self.adapters.put_beside(model), options)

    def _load(self, folder: Path) -> Program:
        if self.named:
            raise typer.BadParameter(
                f"{self.first_named} says how a model is compiled, and '{folder}' is a program that is compiled already: leave "
                "it out, or give the ONNX file that it was made from"
            )
        from burnish.program import Program

        return Program.load(folder)


def is_program(source: Path) -> bool:
    """True for a compiled program: its folder, or an ONNX file from ``compile`` or ``export --training``.

    Raises:
        ModelError: the path is the folder of a run, which has a program.
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
    """True if an ONNX file with this time of change has a program; files that are not models are rejected on loading."""
    from burnish.training.trained_model import holds_program

    with suppress(BurnishError):
        return holds_program(file)
    return False


@contextmanager
def options_named() -> Iterator[None]:
    """Make errors of missing gradients name options of the command line instead of Python's."""
    try:
        yield
    except GradientError as error:
        raise GradientError(error.problem, OPTIONS_NAMED) from error


@contextmanager
def untrained_weights_named() -> Iterator[None]:
    """Print untrained weights, on the first worker, with options of the command line; other warnings pass through."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UntrainedWeightsWarning)
        yield
    for warning in caught:
        if not isinstance(warning.message, UntrainedWeightsWarning):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        elif launch.other_rank() is None:
            errors().print(f"warning: {warning.message.problem} ({OPTIONS_NAMED})", style="yellow")


def for_language(compilation: Compilation, options: TextOptions) -> Compilation:
    """Return the compilation options with the loss and metrics of a language model, unless they are given."""
    if options.task not in ("masked", "causal"):
        return compilation
    chosen: dict[str, Any] = {} if "loss" in compilation.named else {"loss": LANGUAGE_LOSS}
    if "metrics" not in compilation.named:
        chosen["metrics"] = LANGUAGE_METRICS
    return replace(compilation, options=replace(compilation.options, **chosen))
