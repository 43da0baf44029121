"""``burnish check``: whether a model can be trained, without training it."""

from __future__ import annotations

from burnish.cli.console import output, split
from burnish.cli.options import (
    LossOption,
    ModelArgument,
    NormOption,
    OutputsOption,
    TrainableOption,
    norm_policies,
    options_named,
    read_outputs,
)
from burnish.cli.train import what_trains
from burnish.errors import GradientError


def check(
    model: ModelArgument,
    loss: LossOption = "cross_entropy",
    trainable: TrainableOption = None,
    norm: NormOption = None,
    outputs: OutputsOption = None,
) -> None:
    """Say whether a model can be trained, or what stands in the way."""

    from burnish.cli.summary import summarize
    from burnish.program.compile import compile

    policies = norm_policies(norm or [])
    try:
        with options_named():
            program = compile(
                model, loss=loss, trainable=split(trainable) if trainable else None, norm=policies, outputs=read_outputs(outputs)
            )
    except GradientError as error:
        lacking = summarize(model)["lacking"]
        if len(lacking) > 1:
            raise GradientError(f"{error}. In all, these lack one: {'; '.join(lacking)}") from error
        raise
    output().print(f"{model} can be trained: {what_trains(program)}", markup=False)
