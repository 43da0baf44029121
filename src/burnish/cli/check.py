"""``burnish check``: test if a model can train with right gradients, or forecast its fine-tuning on data."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.table import Table

from burnish.cli.compilation_options import Compilation, ModelArgument, is_program
from burnish.cli.console import cell, counted, echo, errors, output, print_error, what_trains
from burnish.cli.data_options import Pixels, TextOptions, read_extents
from burnish.cli.option_groups import COMMON, OptionGroup, declared_option, takes_options, values_of
from burnish.cli.train_options import Data
from burnish.errors import BurnishError, EngineError, GradientError
from burnish.finetuning.options import AUTO, FinetuneOptions, TuningOptions
from burnish.options import declarations
from burnish.training.trainer_options import RunOptions

if TYPE_CHECKING:
    from burnish.comparison import GradientCheck
    from burnish.finetuning import Forecast
    from burnish.program import Program

SHOWN = 20


@dataclass(frozen=True)
class Probing(OptionGroup):
    """Options of the comparison of gradients with central differences."""

    panel: ClassVar = "Gradients"
    gradients: Annotated[
        bool,
        typer.Option(
            "--gradients/--no-gradients",
            help="Compare every gradient with central differences in float64.",
            show_default="on without --data",
        ),
    ] = True
    probes: Annotated[
        int, typer.Option("--probes", min=1, help="Directions for each tensor: one through all of it, the others along elements.")
    ] = 4
    batch_size: Annotated[
        int,
        typer.Option(
            "--batch-size", "-b", min=1, help="Samples of a batch.", show_default="3 random ones, with --data what finetune takes"
        ),
    ] = 3
    extent: Annotated[
        list[str] | None,
        typer.Option("--extent", metavar="NAME=N", help="Extent of another symbolic dimension; repeatable.", show_default="8"),
    ] = None
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the batch, and of a new head.")] = 0
    rtol: Annotated[float, typer.Option("--rtol", help="Relative tolerance between a gradient and the differences.")] = 1e-6

    OF_GRADIENTS: ClassVar = ("probes", "extent", "rtol")


@dataclass(frozen=True)
class CheckedData(Data):
    """The data of a run of ``burnish finetune`` to check."""

    panel: ClassVar = "With --data"
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            "-d",
            help="Data to fine-tune on: prints the plan, the memory and the time of burnish finetune.",
            show_default=False,
        ),
        COMMON,
    ] = None  # type: ignore[assignment]  # a check needs none


@dataclass(frozen=True)
class Checked(OptionGroup):
    """Options of ``burnish finetune``, and the form of the answers."""

    panel: ClassVar = "With --data"
    freeze_until: Annotated[str | None, declared_option(TuningOptions, "freeze_until")] = None
    unfreeze: Annotated[str | None, declared_option(TuningOptions, "unfreeze")] = None
    head: Annotated[str, declared_option(TuningOptions, "head")] = AUTO
    folded_norm: Annotated[str, declared_option(TuningOptions, "folded_norm")] = AUTO
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Epochs of the run.")] = FinetuneOptions().epochs
    engine: Annotated[str, declared_option(RunOptions, "engine")] = "auto"
    device: Annotated[str | None, declared_option(RunOptions, "device")] = None
    threads: Annotated[int | None, declared_option(RunOptions, "threads")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel="Output"), COMMON] = False


OF_COMPILATION = ("loss", "trainable", "norm", "outputs", "batch", "sample_axis", "bind")
OF_ADAPTERS = ("adapter", "rank", "alpha", "adapter_layers", "adapter_from")
OF_DATA = tuple(
    field.name for field in fields(CheckedData) if field.name not in ("eval_data", "augment", "data_workers", "named")
)
WITHOUT_DATA = ("trainable", "norm", "batch", "bind")
"""Options of compilation that ``burnish finetune`` lacks."""


@takes_options(
    only=(
        *(*OF_COMPILATION, *Probing.__dataclass_fields__, *OF_DATA, *OF_ADAPTERS),
        *(field.name for field in fields(Pixels) if field.name != "named"),
        *(name for name in declarations(TextOptions) if name not in ("task", "masked_share", "joined")),
        *(field.name for field in fields(Checked) if field.name != "named"),
    ),
    defaults={"loss": "cross_entropy, with --data the one that fits"},
)
def check(
    model: ModelArgument,
    *,
    compilation: Compilation,
    probing: Probing,
    data: CheckedData,
    checked: Checked,
    pixels: Pixels,
    texts: TextOptions,
) -> None:
    """Check that a model can be trained.

    Without --data it also checks the gradients. With --data it says how burnish finetune would train, and with how much memory
    and time. It names what stands in the way; the exit status is then 1.
    """
    _check_options(data.data, compilation, probing, {*data.named, *checked.named, *pixels.named, *texts.named})
    if data.data is None:
        found = _checked(model, compilation, probing, is_quiet=checked.as_json)
    else:
        forecast = _forecast(model, compilation, probing, data, checked, pixels, texts)
        found = forecast.as_dict()
        if not checked.as_json:
            for line in forecast.lines() if forecast.trainable else ():
                output().print(line)
            if not forecast.trainable:
                print_error(f"{model} cannot be trained on {data.data}: {forecast.reason}")
        if forecast.trainable and "gradients" in probing.named and probing.gradients:
            found["gradients"] = _gradients(model, compilation, compilation.program(model), probing, checked.as_json)
    if checked.as_json:
        echo(json.dumps(found, indent=1))
    if not found["trainable"] or (found.get("gradients") or {}).get("agree") is False:
        raise typer.Exit(1)


def _check_options(data: str | None, compilation: Compilation, probing: Probing, of_data: Collection[str]) -> None:
    if data is None:
        if named := sorted(name for name in of_data if name != "as_json"):
            raise typer.BadParameter(f"--{named[0].replace('_', '-')} is of a run on data: give --data, or leave it out")
        return
    for name in WITHOUT_DATA:
        if name in compilation.named:
            raise typer.BadParameter(f"--{name} is no option of burnish finetune, which --data checks: leave one of them out")
    for name in Probing.OF_GRADIENTS:
        if name in probing.named and not ("gradients" in probing.named and probing.gradients):
            raise typer.BadParameter(f"--{name} is for the comparison of gradients: with --data, give --gradients too")


def _forecast(
    model: Path,
    compilation: Compilation,
    probing: Probing,
    data: CheckedData,
    checked: Checked,
    pixels: Pixels,
    texts: TextOptions,
) -> Forecast:
    if model.is_dir() and is_program(model):
        raise typer.BadParameter(f"'{model}' is a compiled program, whose head cannot be replaced: give the ONNX file")
    data.check_reading(pixels)
    from burnish import finetuning

    asked = {name: getattr(checked, name) for name in ("freeze_until", "unfreeze", "head", "folded_norm")}
    options = compilation.options
    return finetuning.check(
        model,
        data.data,  # type: ignore[arg-type]  # the caller has some
        **values_of(FinetuneOptions, **asked),
        loss=options.loss if "loss" in compilation.named else None,
        head_output=options.outputs if "outputs" in compilation.named else None,
        sample_axis=options.sample_axis,
        adapters=compilation.adapters.source(),
        epochs=checked.epochs,
        batch_size=probing.batch_size if "batch_size" in probing.named else None,
        seed=probing.seed,
        **data.tuning(pixels, texts),
        engine=checked.engine,
        device=checked.device,
        threads=checked.threads,
    )


def _checked(model: Path, compilation: Compilation, probing: Probing, is_quiet: bool) -> dict[str, Any]:
    """Check a model without data; print the result unless quiet, and return it.

    Returns:
        ``model``, ``trainable``, ``reason`` (None if it can train), ``parameters`` and ``tensors`` that train, ``trains`` (in
        words), ``agrees_with_file`` and ``comparison`` (None if nothing was compared), ``gradients`` (None, or ``agree``,
        ``message`` and ``tensors``).
    """
    from burnish.program import Role

    found: dict[str, Any] = {"model": str(model), "trainable": False, "reason": None}
    try:
        program = _compiled(model, compilation)
    except BurnishError as error:
        if not is_quiet:
            raise
        return {**found, "reason": str(error)}
    signature = program.signature["step"]
    trained = [entry for entry in signature.inputs_of(Role.PARAMETER) if entry.name in signature.updates]
    found |= {"trainable": True, "parameters": sum(program.weights[entry.name].size for entry in trained)}
    found |= {"tensors": len(trained), "trains": what_trains(program), "agrees_with_file": None, "comparison": None}
    if not is_quiet:
        output().print(f"{model} can be trained: {found['trains']}")
    if not is_program(model):
        found["agrees_with_file"], found["comparison"] = _compare_with_file(model, program, probing, is_quiet)
    return {**found, "gradients": _gradients(model, compilation, program, probing, is_quiet) if probing.gradients else None}


def _compiled(model: Path, compilation: Compilation) -> Program:
    from burnish.cli.summary import summarize

    try:
        return compilation.program(model)
    except GradientError as error:
        options = compilation.options
        lacking = summarize(model, batch=options.batch, bind=options.bind)["lacking"]
        if len(lacking) > 1:
            raise GradientError(f"{error}. In all, these lack one: {'; '.join(lacking)}") from error
        raise


def _compare_with_file(model: Path, program: Program, probing: Probing, is_quiet: bool) -> tuple[bool | None, str | None]:
    """Compare the program's predictions with the file on a random batch; return True if they agree, and a sentence, which is
    printed."""
    from burnish.data.random_data import random_batches
    from burnish.training import Session
    from burnish.training.objective import compare_with_file

    try:
        extents = read_extents(probing.extent or [])
        batch = next(random_batches(program, batch_size=probing.batch_size, seed=probing.seed, extents=extents))
        with Session(program, state=program.initial_state(probing.seed)) as session:
            found = compare_with_file(model, program, session.predict, batch)
    except BurnishError as error:  # the gradients use the reference engine, which runs more models
        agrees, message = None, f"what it predicts was not compared with the file: {error}"
    else:
        if found is None:
            return None, None
        agrees, message = found.agrees, found.message(model)
    if not is_quiet:
        (errors() if agrees is False else output()).print(message)
    return agrees, message


def _projected(model: Path, compilation: Compilation, program: Program) -> Program:
    """The program with a loss that projects its inputs on random numbers of either sign, unless the command line gives a loss."""
    if is_program(model) or "loss" in compilation.named:
        return program
    from burnish.comparison import Projection
    from burnish.compiler.compile import compiled
    from burnish.graph import garbage_kept

    read = [prediction["output"] for prediction in program.options["predictions"]]
    options = replace(compilation.options, loss=Projection(outputs=len(read)), outputs=read)
    with warnings.catch_warnings(), garbage_kept():
        warnings.simplefilter("ignore")  # the program already gave its warnings
        return compiled(model, options)


def _gradients(model: Path, compilation: Compilation, program: Program, probing: Probing, is_quiet: bool) -> dict[str, Any]:
    try:
        found = _check_gradients(_projected(model, compilation, program), probing)
    except BurnishError as error:
        if not is_quiet:
            raise
        return {"agree": False, "message": str(error), "tensors": []}
    if not is_quiet:
        _print(found)
        if found.agrees:
            output().print(found.message())
        else:
            print_error(found.message())
    tensors = [
        {
            "name": tensor.name.removeprefix("param/"),
            "shape": list(tensor.shape),
            "error": tensor.error,
            "directions": tensor.probes,
            "agrees": tensor.agrees,
        }
        for tensor in found.tensors
    ]
    return {"agree": found.agrees, "message": found.message(), "tensors": tensors}


def _check_gradients(program: Program, probing: Probing) -> GradientCheck:
    from burnish.comparison import check_gradients
    from burnish.program import Role

    console = errors()
    with console.status("central differences") as status:
        try:
            found = check_gradients(
                program,
                batch_size=probing.batch_size,
                extents=read_extents(probing.extent or []),
                probes=probing.probes,
                rtol=probing.rtol,
                seed=probing.seed,
                progress=lambda name: status.update(f"central differences of '{name}'"),
            )
        except EngineError as error:
            entries = program.signature["grad"].inputs_of(Role.DATA)
            name = next((entry.name for entry in entries if entry.dtype.is_integer() and entry.maximum is None), None)
            if name is None:
                raise
            raise EngineError(
                f"the gradients were to be checked on a random batch, which may be at fault: {error}. Where '{name}' says a "
                f"shape or a length, give it one: --bind '{name}=[...]'"
            ) from error
    return found


def _print(found: GradientCheck) -> None:
    table = Table(box=None)
    for name in ("tensor", "shape", "worst error", "directions", ""):
        table.add_column(name, justify="left" if name in ("tensor", "shape", "") else "right", overflow="fold")
    tensors = sorted(found.tensors, key=lambda tensor: (tensor.agrees, -tensor.error))
    for tensor in tensors[:SHOWN]:
        verdict = "" if tensor.agrees else f"differs: {found.faults[0] if found.faults else 'no node by itself'}"
        if tensor.kinks:
            verdict = f"{verdict}; " * bool(verdict) + f"no derivative along {counted(tensor.kinks, 'direction')} more"
        named, shape = cell(tensor.name.removeprefix("param/")), cell(str(list(tensor.shape)))
        table.add_row(named, shape, f"{tensor.error:.1e}", str(tensor.probes), cell(verdict or "zero" * tensor.is_zero))
    output().print(table)
    if hidden := tensors[SHOWN:]:
        differing = sum(not tensor.agrees for tensor in hidden)
        output().print(f"and {counted(len(hidden), 'tensor')} more" + (f", {differing:,} of which differ" if differing else ""))
