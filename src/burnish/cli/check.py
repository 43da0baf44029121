"""``burnish check``: whether a model can be trained, without training it."""

from __future__ import annotations

from burnish.cli.compilation_options import Compilation, ModelArgument
from burnish.cli.compilation_values import read_bind
from burnish.cli.console import output
from burnish.cli.option_groups import takes_options
from burnish.cli.program_lines import what_trains
from burnish.errors import GradientError


@takes_options(only=("loss", "trainable", "norm", "outputs", "batch", "bind"))
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
    output().print(f"{model} can be trained: {what_trains(program)}")
