"""``burnish new``: a small model to train, with initial weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from burnish.cli.console import counted, output
from burnish.errors import ConfigurationError
from burnish.files.file_writing import check_output
from burnish.settings import is_natural_text

if TYPE_CHECKING:
    import onnx

DATA = {
    "mlp": "table.csv --label COLUMN",
    "cnn": "FOLDER",
    "resnet": "FOLDER",
    "unet": "FOLDER",
    "ssd": "FOLDER",
    "transformer": "texts.csv --tokenizer tokenizer.json",
    "gpt": "texts.jsonl --tokenizer tokenizer.json",
    "lstm": "data.npz",
}
"""Data for each family, as options of the command that trains it."""


def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="mlp, cnn, resnet, unet, ssd, transformer, gpt or lstm.", show_default=False)
    ],
    shape: Annotated[
        str,
        typer.Option(
            "--input",
            metavar="SHAPE",
            help="Shape of a sample, such as 3x64x64 (an image), 4 (features) or 50x6 (length, features).",
            show_default=False,
        ),
    ],
    path: Annotated[Path, typer.Option("--output", "-o", help="ONNX file to write.", show_default=False)],
    classes: Annotated[
        int | None, typer.Option("--classes", min=1, help="Number of classes.", show_default="required, but for gpt")
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            "--vocabulary",
            min=1,
            help="Number of tokens that the tokenizer of a transformer or gpt knows.",
            show_default="30,522, or 50,257",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the initial weights.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
) -> None:
    """Write a small model to start with."""
    import onnx_ir as ir

    from burnish.files.export import save_inference
    from burnish.models import create

    if path.suffix != ".onnx":
        raise typer.BadParameter(f"--output {path}: a model is written as .onnx")
    check_output(path, "--output")
    if path.exists() and not overwrite:
        raise ConfigurationError(f"'{path}' is there already: replace it (--overwrite), or name another file (--output)")
    extents = shape.lower().split("x")
    if not all(map(is_natural_text, extents)):
        raise typer.BadParameter(f"--input {shape}: give whole numbers with x between, such as 3x64x64")
    model = create(name, classes=classes, input_shape=[*map(int, extents)], seed=seed, vocabulary=vocabulary)
    save_inference(ir.from_proto(model), path)
    statistics = {statistic for node in model.graph.node if node.op_type == "BatchNormalization" for statistic in node.input[3:]}
    count = sum(math.prod(weight.dims) for weight in model.graph.initializer if weight.name not in statistics)
    inputs, outputs = (", ".join(map(_shaped, values)) for values in (model.graph.input, model.graph.output))
    console = output()
    console.print(f"{path}: {name}, {counted(count, 'parameter')}, from {inputs} to {outputs}")
    console.print(f"next: burnish finetune {path} --data {DATA[name]}")


def _shaped(value: onnx.ValueInfoProto) -> str:
    """``x [batch, 3, 64, 64]``."""
    dims = value.type.tensor_type.shape.dim
    return f"{value.name} [{', '.join(dim.dim_param or str(dim.dim_value) for dim in dims)}]"
