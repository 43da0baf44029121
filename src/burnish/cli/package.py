"""``burnish package``: what trains a program, or runs a graph of it, without Python."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from burnish.cli.console import output
from burnish.cli.data_options import read_extents
from burnish.errors import ModelError
from burnish.files.file_writing import check_output


def package(
    program: Annotated[
        Path,
        typer.Argument(
            metavar="PROGRAM", help="A program that burnish compile wrote, or the folder of a run.", show_default=False
        ),
    ],
    path: Annotated[
        Path, typer.Option("--output", "-o", help="The folder to write, or with a suffix .pt2 the file.", show_default=False)
    ],
    runtime: Annotated[
        str | None,
        typer.Option("--runtime", metavar="c", help="Write a folder with a client that trains the program, in this language."),
    ] = None,
    graph: Annotated[
        str | None, typer.Option("--graph", metavar="NAME", help="Of a .pt2 file: which graph it runs; by default step.")
    ] = None,
    extent: Annotated[
        list[str] | None,
        typer.Option(
            "--extent", metavar="NAME=N", help="Of a .pt2 file: the extent of a symbolic dimension; may be given again."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="Of a .pt2 file: where it runs; by default cpu.")] = None,
) -> None:
    """Pack a program for machines without Python: --runtime c with a client in C, or one graph compiled into a .pt2 file."""
    from burnish.cli.summary import program_at
    from burnish.program import Program

    check_output(path, "--output", is_folder=path.suffix != ".pt2")
    folder = program_at(program)
    if folder is None:
        raise ModelError(f"'{program}' is a model, not a program: compile it first (burnish compile {program} -o program)")
    loaded = Program.load(folder)
    loaded.package(path, runtime=runtime, graph=graph, extents=read_extents(extent or []), device=device)
    output().print(f"{path}: the program of {program}")
    if runtime is not None:
        output().print(
            f"  make -C {path} ORT=/path/to/onnxruntime builds what trains it; {path / 'README.md'} says how to run it"
        )
