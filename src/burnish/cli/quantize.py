"""``burnish quantize``: a model to train in quantized form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from burnish.cli.compilation_options import SampleAxisOption
from burnish.cli.console import counted, output
from burnish.cli.data_options import Pixels, TextOptions
from burnish.cli.option_groups import COMMON, OptionGroup, takes_options, values_of
from burnish.cli.predict import DATA, RESULT, ImageSizeOption
from burnish.compiler.options import CompileOptions
from burnish.files.file_writing import check_output

BATCH = 32
NONE = "none"


@dataclass(frozen=True)
class Integers(OptionGroup):
    """Formats of weights and activations."""

    panel: ClassVar = "Integers"
    weights: Annotated[
        str,
        typer.Option(
            "--weights",
            metavar="FORMAT",
            help="Format of weights: int8, int8 per channel, int4, int4 per channel or int4 blocks of 32.",
        ),
    ] = "int8 per channel"
    activations: Annotated[
        str,
        typer.Option("--activations", metavar="FORMAT", help="Format of activations: uint8, int8, or none for weights alone."),
    ] = "uint8"
    method: Annotated[str, typer.Option("--method", help="Range of activations: minmax, percentile or entropy.")] = "minmax"
    scales: Annotated[
        str, typer.Option("--scales", help="Scales in training: learned by gradients, observed from the data, or fixed.")
    ] = "learned"
    freeze_observers_after: Annotated[
        str | None,
        typer.Option(
            "--freeze-observers-after",
            metavar="WHEN",
            help="End of observing: a number of steps, '2 epochs', or settled (moved by less than 1 %).",
        ),
    ] = None
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", metavar="PATTERN", help="Layers that stay in float32, by name or pattern; repeatable."),
    ] = None
    first_and_last: Annotated[
        str | None,
        typer.Option(
            "--first-and-last",
            metavar="FORMAT",
            help="Format of the first and the last layer: int8 or float32.",
            show_default="as all others",
        ),
    ] = None
    reduce_range: Annotated[
        bool,
        typer.Option(
            "--reduce-range/--full-range", help="Use 7 of 8 bits for weights, for x86 processors without VNNI, or all 8."
        ),
    ] = True


@takes_options()
def quantize(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX file in float32.", show_default=False)],
    *,
    path: Annotated[
        Path,
        typer.Option("--output", "-o", help="ONNX file to write, to be trained.", show_default=False, rich_help_panel=RESULT),
        COMMON,
    ],
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            "-d",
            help="Data that the ranges of activations are measured on, as predict takes them.",
            rich_help_panel=DATA,
        ),
        COMMON,
    ] = None,
    label: Annotated[str | None, typer.Option("--label", help="Column of a table to leave out.", rich_help_panel=DATA)] = None,
    image_size: ImageSizeOption = None,
    samples: Annotated[
        int, typer.Option("--samples", min=1, help="Largest number of samples to read.", rich_help_panel=DATA), COMMON
    ] = 256,
    sample_axis: SampleAxisOption = None,
    pixels: Pixels,
    texts: TextOptions,
    integers: Integers,
) -> None:
    """Prepare a model for training as it will compute with integers.

    ``burnish train`` trains the file that it writes, and exports integers.
    """
    from burnish import surgery
    from burnish.data.unlabelled import open_samples
    from burnish.files.export import save_inference
    from burnish.finetuning.quantization import calibration_batches
    from burnish.quantization.quantize import remaining_line
    from burnish.sample_axes import ask_sample_axes
    from burnish.training.trained_model import open_model

    activations = None if integers.activations == NONE else integers.activations
    if path.suffix != ".onnx":
        raise typer.BadParameter(f"--output {path}: a model is written as .onnx")
    check_output(path, "--output", read=[model, data])
    if activations is not None and data is None:
        raise typer.BadParameter(
            "the ranges of activations are measured on data: give --data, or --activations none for weights alone"
        )
    if activations is None and data is not None:
        raise typer.BadParameter("--data is for the ranges of activations, and --activations none leaves them: leave it out")
    calibration, read, axes = None, 0, values_of(CompileOptions, sample_axis=sample_axis).get("sample_axis")
    if data is not None:
        opened = open_model(model, sample_axis=axes, to_evaluate=False)
        text = texts.settings_for(model, data, opened.described)
        found = open_samples(data, opened.to_predict, label=label, image_size=image_size, pixels=pixels.settings(), text=text)
        size = opened.fixed_batch("predict") or BATCH
        calibration, read = calibration_batches(found.dataset, samples, size, opened.to_predict.axes)
    chosen: dict[str, Any] = {
        name: getattr(integers, name)
        for name in ("weights", "method", "scales", "freeze_observers_after", "first_and_last", "reduce_range")
    }
    quantized = surgery.quantize(model, activations=activations, calibration=calibration, skip=integers.skip or (), **chosen)
    ask_sample_axes(quantized.graph, axes)
    save_inference(quantized, path)
    remaining = remaining_line(quantized)
    count = sum(node.op_type == "QuantizeLinear" for node in quantized.graph)
    measured = f", calibrated on {counted(read, 'sample')} of {data}" if read else ""
    output().print(f"{path}: {counted(count, 'quantization')}{measured}; burnish train {path} trains it, and exports integers")
    if remaining is not None:
        output().print(f"{path}: {remaining}")
