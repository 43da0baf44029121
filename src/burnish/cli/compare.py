"""``burnish compare``: the same steps on several engines, and the node at which they differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import Console
from rich.table import Table

from burnish.cli.compilation_options import Compilation, ModelArgument
from burnish.cli.console import cell, counted, output, print_error
from burnish.cli.data_options import check_data_options, read_extents
from burnish.cli.option_groups import OptionGroup, takes_options
from burnish.files.file_writing import check_output, write_text
from burnish.settings import split

if TYPE_CHECKING:
    from burnish.comparison import Comparison
    from burnish.comparison.engines import EngineReport
    from burnish.program import Program

COMPARISON = "Comparison"
SHOWN = 12


@dataclass(frozen=True)
class Steps(OptionGroup):
    """The steps to run on the engines, and the tolerances."""

    panel: ClassVar = COMPARISON
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to run.")] = 24
    data: Annotated[
        str | None, typer.Option("--data", "-d", help="Data to train on.", show_default="random numbers that fit")
    ] = None
    label: Annotated[
        str | None, typer.Option("--label", help="Label column of a table.", show_default="label, y, target or the last")
    ] = None
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Samples of a batch.")] = 4
    extent: Annotated[
        list[str] | None,
        typer.Option(
            "--extent",
            metavar="NAME=N",
            help="Extent of another symbolic dimension of random data; repeatable.",
            show_default="8",
        ),
    ] = None
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the initial weights and the random data.")] = 0
    rtol: Annotated[
        float | None, typer.Option("--rtol", help="Relative tolerance.", show_default="by dtype, 1.2e-4 for float32")
    ] = None
    atol: Annotated[float, typer.Option("--atol", help="Absolute tolerance, on top of the relative one.")] = 0.0
    against_float64: Annotated[
        bool, typer.Option("--float64", help="Also show how far each engine is from float64, which is slow.")
    ] = False
    own_state: Annotated[
        bool,
        typer.Option("--own-state", help="Let every engine continue from its own state, not from the first engine's."),
    ] = False
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Processor threads.", show_default="each engine's choice")
    ] = None
    report: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to a file.")] = None


@takes_options("schedule", "warmup", "recompute")
def compare(
    model: ModelArgument,
    engines: Annotated[
        list[str],
        typer.Option(
            "--engines",
            help="Engines, two or more with commas between; the others are compared with the first.",
            rich_help_panel=COMPARISON,
        ),
    ] = ["onnxruntime", "reference"],  # noqa: B006  # typer copies it
    *,
    options: Steps,
    compilation: Compilation,
) -> None:
    """Run the same steps on several engines and name the node where they differ.

    The exit status is 1 if they differ.
    """
    from burnish.comparison import compare_engines

    extents = read_extents(options.extent or [])
    if extents and options.data is not None:
        raise typer.BadParameter("--extent is for random data; with --data, leave it out")
    check_data_options(options.data, label=options.label)
    if options.report is not None:
        check_output(options.report, "--json", read=[model, options.data])
    program = compilation.program(model)
    comparison = compare_engines(
        program,
        split(engines),
        _batches(program, options, extents),
        steps=options.steps,
        seed=options.seed,
        rtol=options.rtol,
        atol=options.atol,
        against_float64=options.against_float64,
        own_state=options.own_state,
        threads=options.threads,
    )
    _print(comparison)
    if options.report is not None:
        report = json.dumps(comparison.to_dict(), indent=1, allow_nan=False)
        write_text(options.report, report + "\n")
    if not comparison.agrees:
        print_error(comparison.message())
        raise typer.Exit(1)
    output().print(comparison.message())


def _batches(program: Program, options: Steps, extents: Mapping[str, int]) -> Iterable[Mapping[str, Any]]:
    if options.data is None:
        from burnish.data.random_data import random_batches

        return random_batches(program, options.batch_size, options.seed, extents)
    from burnish.data import DataSpec, Loader, open_dataset

    spec = DataSpec.by(program)
    dataset = open_dataset(options.data, spec, label=options.label)
    if (note := getattr(dataset, "note", None)) is not None:
        output().print(note)
    loader = Loader(dataset, min(options.batch_size, len(dataset)), options.seed, drop_last=True, spec=spec)
    return (batch for epoch in count() for batch in loader.epoch(epoch))


def _print(comparison: Comparison) -> None:
    console = output()
    losses = Table(title="loss", title_justify="left", box=None)
    for name in ("step", *comparison.engines):
        losses.add_column(name, justify="right")
    for step, loss in enumerate(comparison.losses):
        losses.add_row(str(step), *(f"{loss[name]:.7g}" if name in loss else "-" for name in comparison.engines))
    console.print(losses)
    for report in comparison.reports:
        console.print()
        console.print(f"{report.engine} beside {comparison.engines[0]}")
        _print_report(console, comparison, report)


def _print_report(console: Console, comparison: Comparison, report: EngineReport) -> None:
    table = Table(box=None)
    for name in ("tensor", "kind", "by norm", "by max", "tolerance", "step", ""):
        table.add_column(name, justify="left" if name in ("tensor", "kind", "") else "right", overflow="fold")
    for name in comparison.engines if comparison.errors else ():
        table.add_column(f"{name} error", justify="right")
    tensors = sorted(report.tensors.values(), key=lambda tensor: (tensor.agrees, not tensor.by_rounding, -tensor.worst.relative))
    for tensor in tensors[:SHOWN]:
        verdict = "differs" if not tensor.agrees else "rounding" if tensor.by_rounding else ""
        figures = (f"{tensor.worst.by_norm:.1e}", f"{tensor.worst.by_max:.1e}", f"{tensor.tolerance:.1e}", str(tensor.step))
        exact = [f"{comparison.errors[name].get(tensor.name, 0.0):.1e}" for name in comparison.engines if comparison.errors]
        table.add_row(cell(tensor.name), tensor.kind, *figures, verdict, *exact)
    console.print(table)
    if hidden := tensors[SHOWN:]:
        differing = sum(not tensor.agrees for tensor in hidden)
        among = f", {differing:,} of which differ" if differing else ""
        console.print(f"and {counted(len(hidden), 'tensor')} more{among} (--json has all)")
    if report.grown is not None:
        console.print(f"Marked rounding: every node, run alone on the same inputs, agrees; rounding grows from {report.grown} on")
