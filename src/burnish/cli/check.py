"""``burnish check``: whether a model can be trained, without training it."""

from __future__ import annotations

from burnish.cli.console import output
from burnish.cli.options import Compilation, ModelArgument, read_bind, takes_compilation
from burnish.cli.train import what_trains
from burnish.errors import GradientError


@takes_compilation(only=("loss", "trainable", "norm", "outputs", "batch", "bind"))
def check(model: ModelArgument, *, compilation: Compilation) -> None:
    """Say whether a model can be trained, or what stands in the way."""
    from burnish.cli.summary import summarize

    try:
        program = compilation.program(model)
    except GradientError as error:
        lacking = summarize(model, batch=compilation.batch, bind=read_bind(compilation.bind or []))["lacking"]
        if len(lacking) > 1:
            raise GradientError(f"{error}. In all, these lack one: {'; '.join(lacking)}") from error
        raise
    output().print(f"{model} can be trained: {what_trains(program)}", markup=False)
