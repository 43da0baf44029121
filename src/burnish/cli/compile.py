"""``burnish compile``: write the training program of a model to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from burnish.cli.compilation_options import Compilation, is_program
from burnish.cli.console import counted, output, planned_line
from burnish.cli.optimizer_options import COMPILATION, check_schedule, has_end, with_schedule
from burnish.cli.option_groups import COMMON, takes_options
from burnish.errors import ModelError
from burnish.files.file_writing import check_output


@takes_options("save_adapters")
def compile(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX file.", show_default=False)],
    folder: Annotated[
        Path,
        typer.Option("--output", "-o", help="Folder to write the program to, or one .onnx file.", show_default=False),
        COMMON,
    ],
    *,
    compilation: Compilation,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, help="Steps of the schedule, with the warm-up.", rich_help_panel=COMPILATION),
    ] = None,
    target: Annotated[
        str,
        typer.Option(
            "--target",
            help="Runtime: onnxruntime, web, webgpu, mobile, ort-minimal, or the TOML file of one.",
            rich_help_panel=COMPILATION,
        ),
        COMMON,
    ] = "onnxruntime",
) -> None:
    """Turn a model into a training program.

    It is six ONNX graphs of standard operators, with their state.

    An output that ends in .onnx is one file: the inference graph with the training as the standard's training_info.
    """
    optimizer = compilation.optimizer
    check_schedule(optimizer.schedule, optimizer.warmup, optimizer.lr)
    if steps is not None and not has_end(optimizer.schedule):
        raise typer.BadParameter("--steps is for a --schedule that has an end, such as cosine; leave it out")
    if is_program(model):
        raise ModelError(
            f"'{model}' is a program that is compiled already: train it (burnish train {model}), look at it "
            f"(burnish inspect {model}), or compile the ONNX file that it was made from"
        )
    check_output(folder, "--output", is_folder=folder.suffix != ".onnx", read=[model])
    program = compilation.program(model, target=target)
    program = with_schedule(program, optimizer.schedule, optimizer.warmup, steps, "give --steps, the steps of the whole")
    program.save(folder)
    console = output()
    console.print(f"{folder}: the program of {model}")
    if folder.suffix == ".onnx":
        console.print("  inference with training_info: any runtime predicts with it, burnish trains it")
        return
    for name, graph in program.graphs.items():
        console.print(f"  {name + '.onnx':<14} {counted(sum(1 for _ in graph.graph), 'node')}")
    console.print(planned_line(program))
