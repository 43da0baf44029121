"""``burnish compile``: a model becomes a training program in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from burnish.cli.console import counted, output
from burnish.cli.options import (
    DecayOption,
    LossOption,
    MetricsOption,
    ModelArgument,
    MomentumOption,
    NormOption,
    OptimizerOption,
    OutputsOption,
    RateOption,
    TrainableOption,
    compile_model,
)


def compile(
    model: ModelArgument,
    folder: Annotated[Path, typer.Option("--output", "-o", help="The folder to write the program to.", show_default=False)],
    loss: LossOption = "cross_entropy",
    optimizer: OptimizerOption = "sgd",
    lr: RateOption = None,
    momentum: MomentumOption = None,
    weight_decay: DecayOption = None,
    trainable: TrainableOption = None,
    norm: NormOption = None,
    metrics: MetricsOption = None,
    outputs: OutputsOption = None,
) -> None:
    """Turn a model into a training program: six ONNX graphs of standard operators, with their state."""
    program = compile_model(model, loss, optimizer, lr, momentum, weight_decay, trainable, norm, metrics, outputs)
    program.save(folder)
    console = output()
    console.print(f"{folder}: the program of {model}", markup=False)
    for name, graph in program.graphs.items():
        console.print(f"  {name + '.onnx':<14} {counted(sum(1 for _ in graph.graph), 'node')}", markup=False)
