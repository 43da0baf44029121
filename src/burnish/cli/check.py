"""``burnish check``: whether a model can be trained, and whether its gradients are right, without training it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from rich.table import Table

from burnish.cli.compilation_options import Compilation, ModelArgument, is_program
from burnish.cli.console import cell, counted, errors, output, print_error, what_trains
from burnish.cli.data_options import read_extents
from burnish.cli.option_groups import OptionGroup, takes_options
from burnish.errors import EngineError, GradientError

if TYPE_CHECKING:
    from burnish.comparison import GradientCheck
    from burnish.program import Program

SHOWN = 20


@dataclass(frozen=True)
class Probing(OptionGroup):
    """How gradients are compared with central differences."""

    panel: ClassVar = "Gradients"
    gradients: Annotated[
        bool, typer.Option("--gradients/--no-gradients", help="Compare every gradient with central differences in float64.")
    ] = True
    probes: Annotated[
        int, typer.Option("--probes", min=1, help="Directions for each tensor: one through all of it, the others along elements.")
    ] = 4
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Samples of the random batch.")] = 3
    extent: Annotated[
        list[str] | None,
        typer.Option("--extent", metavar="NAME=N", help="Extent of another symbolic dimension; repeatable.", show_default="8"),
    ] = None
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the random batch.")] = 0
    rtol: Annotated[float, typer.Option("--rtol", help="Relative tolerance between a gradient and the differences.")] = 1e-6


@takes_options(only=("loss", "trainable", "norm", "outputs", "batch", "sample_axis", "bind", *Probing.__dataclass_fields__))
def check(model: ModelArgument, *, compilation: Compilation, probing: Probing) -> None:
    """Check that a model can be trained and that its gradients are right.

    It names what stands in the way; the exit status is then 1.
    """
    from burnish.cli.summary import summarize

    try:
        program = compilation.program(model)
    except GradientError as error:
        options = compilation.options
        lacking = summarize(model, batch=options.batch, bind=options.bind)["lacking"]
        if len(lacking) > 1:
            raise GradientError(f"{error}. In all, these lack one: {'; '.join(lacking)}") from error
        raise
    output().print(f"{model} can be trained: {what_trains(program)}")
    if not is_program(model):
        _compare_with_file(model, program, probing)
    if probing.gradients:
        _check_gradients(_projected(model, compilation, program), probing)


def _compare_with_file(model: Path, program: Program, probing: Probing) -> None:
    """Say whether the program predicts what the file computes, on a random batch."""
    from burnish.data.random_data import random_batches
    from burnish.errors import BurnishError
    from burnish.training import Session
    from burnish.training.objective import compare_with_file

    try:
        extents = read_extents(probing.extent or [])
        batch = next(random_batches(program, batch_size=probing.batch_size, seed=probing.seed, extents=extents))
        with Session(program, state=program.initial_state(probing.seed)) as session:
            found = compare_with_file(model, program, session.predict, batch)
    except BurnishError as error:  # the gradients are compared on the reference engine, which runs more
        output().print(f"what it predicts was not compared with the file: {error}")
        return
    if found is not None:
        (output() if found.agrees else errors()).print(found.message(model))


def _projected(model: Path, compilation: Compilation, program: Program) -> Program:
    """The same with a loss that weighs what the loss reads by numbers of either sign, unless the command line names one."""
    if is_program(model) or "loss" in compilation.named:
        return program
    from burnish.comparison import Projection
    from burnish.compiler.compile import compiled
    from burnish.graph import garbage_kept

    read = [prediction["output"] for prediction in program.options["predictions"]]
    options = replace(compilation.options, loss=Projection(outputs=len(read)), outputs=read)
    with warnings.catch_warnings(), garbage_kept():
        warnings.simplefilter("ignore")  # the program was warned of already
        return compiled(model, options)


def _check_gradients(program: Program, probing: Probing) -> None:
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
    _print(found)
    if not found.agrees:
        print_error(found.message())
        raise typer.Exit(1)
    output().print(found.message())


def _print(found: GradientCheck) -> None:
    """Print how far the gradients are from the differences, the worst first."""
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
